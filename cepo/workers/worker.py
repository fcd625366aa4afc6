"""Implements the worker process of one device: policy, optional critic, and rollout engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import psutil
import torch
from safetensors import SafetensorError
from torch import Tensor

from cepo.algorithms import load_plugin
from cepo.algorithms.settings import TeacherConfig
from cepo.config.schema import AlgorithmConfig, DataConfig, TrainerConfig
from cepo.config.worker_schema import ActorConfig, WorkerConfig
from cepo.data.batch import CriticBatch, InitialScores, OptimizerBatch, ScoringRow
from cepo.errors import CheckpointError
from cepo.losses import available_losses, build_loss
from cepo.losses.entropy import EntropyTerm
from cepo.losses.objective import ObjectiveSettings
from cepo.losses.registry import section_of
from cepo.metrics import Metrics, max_value
from cepo.models.processing import Processing
from cepo.rollout.factory import build_generator, settings_of_run
from cepo.rollout.generator import Generation, GenerationRequest, GeneratorSettings, OnFinished, SamplingSettings
from cepo.terminal.progress import phase
from cepo.workers.actor import Actor
from cepo.workers.checkpoint import load_state, save_state
from cepo.workers.critic import Critic
from cepo.workers.distributed import this_device
from cepo.workers.memory import Memory, with_sleep_decided


@dataclass(frozen=True)
class WorkerSpec:
    """The inputs of a worker.

    `needs_values` tells whether the method uses a critic; `most_visuals` are the maximum numbers of images and of videos
    in a prompt.
    """

    data: DataConfig
    algorithm: AlgorithmConfig
    worker: WorkerConfig
    trainer: TrainerConfig
    teacher: TeacherConfig
    needs_values: bool
    total_steps: int
    most_visuals: tuple[int, int]

    @property
    def generator(self) -> GeneratorSettings:
        """The settings of the rollout engine."""
        num_devices = self.trainer.num_devices
        return settings_of_run(self.data, self.worker, num_devices=num_devices, most_visuals=self.most_visuals)

    def sleep_decided(self, memory: Memory | None) -> WorkerSpec:
        """Returns the facts with `rollout.sleep` decided by the memory estimate for this process's GPU."""
        rollout = with_sleep_decided(memory, self.worker.rollout, this_device())
        return dataclasses.replace(self, worker=dataclasses.replace(self.worker, rollout=rollout))


class Worker:
    """The part of `cepo.trainer.protocol.Backend` that runs on each device, with this rank's own rows.

    With several ranks each worker has its own process, in which torch.distributed is already initialised. All ranks
    must call the same methods in the same order, even without rows. Loss denominators are totals over all ranks.

    Raises:
        ConfigError, EngineError: a model cannot be loaded, or the rollout engine does not start.
    """

    def __init__(self, facts: WorkerSpec, processing: Processing) -> None:
        settings = facts.worker
        self._processing = processing
        self._skips_special_tokens = settings.reward.skip_special_tokens
        self._merges_adapter = settings.rollout.merge_lora
        self._saves_weights_only = facts.trainer.save_model_only
        longest_row = facts.data.max_prompt_length + facts.data.max_response_length
        common = {"total_steps": facts.total_steps, "seed": facts.trainer.seed, "longest_row": longest_row}
        with phase("loading the model"):
            self.actor = Actor(
                settings.actor,
                processing,
                temperature=settings.rollout.temperature,
                teacher=facts.teacher,
                objective_settings=objective_settings(settings.actor, facts.algorithm, plugins=facts.trainer.plugins),
                with_reference=not facts.algorithm.disable_kl,
                **common,
            )
            self.critic = Critic(settings.resolved_critic, processing, **common) if facts.needs_values else None
        self._models: dict[str, Actor | Critic] = {"actor": self.actor}
        if self.critic is not None:
            self._models["critic"] = self.critic
        torch.cuda.empty_cache()  # the engine takes its share of what is free
        before_engine = AllocatorBytes.now()
        self.generator = build_generator(self._generator_settings(facts), processing, device=this_device().type)
        self._engine_bytes = AllocatorBytes.now() - before_engine
        self._has_sampled = True  # the engine's start counts as sampling
        self.generator_name = self.generator.name

    def _generator_settings(self, facts: WorkerSpec) -> GeneratorSettings:
        settings = facts.generator
        if settings.lora_rank == 0:
            return settings
        return dataclasses.replace(settings, adapted_layers=self.actor.adapted_layers)

    def generate(
        self,
        requests: Sequence[GenerationRequest],
        settings: SamplingSettings,
        on_finished: OnFinished | None = None,
    ) -> list[list[Generation]]:
        """Samples responses to this rank's requests, with the trained models offloaded meanwhile if so configured."""
        self._has_sampled = True
        for model in self._models.values():
            model.rest()
        if not requests:
            return []
        groups: list[list[Generation]] = [[] for _ in requests]

        def decode(index: int, group: Sequence[Generation]) -> None:
            """Adds the texts while other responses are being sampled."""
            groups[index] = [self._with_text(generation) for generation in group]
            if on_finished is not None:
                on_finished(index, groups[index])

        self.generator.generate(requests, settings, decode)
        return groups

    def _with_text(self, generation: Generation) -> Generation:
        tokens = generation.response_ids.tolist()
        text = self._processing.decode(tokens, skip_special_tokens=self._skips_special_tokens)
        return replace(generation, text=text)

    def _end_sampling(self) -> None:
        """Lets the generator rest, and begins to watch the memory's peak if it has sampled since the last pass."""
        self.generator.rest()
        if self._has_sampled and this_device().type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        self._has_sampled = False

    def score(
        self, rows: Sequence[ScoringRow], *, keep_states: str | None = None, temperature: float | None = None
    ) -> list[Tensor]:
        self._end_sampling()
        return self.actor.score(rows, keep_states=keep_states, temperature=temperature)

    def score_teacher(self, rows: Sequence[ScoringRow], *, keep_states: str | None = None) -> list[Tensor]:
        self._end_sampling()
        return self.actor.score_teacher(rows, keep_states=keep_states)

    def score_initial(self, rows: Sequence[ScoringRow], *, with_kl: bool = False) -> list[InitialScores]:
        self._end_sampling()
        return self.actor.score_initial(rows, with_kl=with_kl)

    def entropies(self, rows: Sequence[ScoringRow]) -> list[Tensor]:
        self._end_sampling()
        return self.actor.entropies(rows)

    def update(self, batches: Sequence[OptimizerBatch], *, step: int) -> Metrics:
        """See `Actor.update`; adds the memory in use."""
        self._end_sampling()
        metrics = self.actor.update(batches, step=step)
        memory = memory_metrics(self._engine_bytes)
        self.actor.forget_gradients()
        return metrics | memory

    def values(self, rows: Sequence[ScoringRow]) -> list[Tensor]:
        self._end_sampling()
        assert self.critic is not None
        return self.critic.values(rows)

    def update_critic(self, batches: Sequence[CriticBatch], *, step: int) -> Metrics:
        self._end_sampling()
        assert self.critic is not None
        metrics = self.critic.update(batches, step=step)
        self.critic.forget_gradients()
        return metrics

    def forget_work(self) -> None:
        self.actor.forget_work()

    def finish_step(self, step: int) -> None:
        self.actor.finish_step(step)

    def synchronise_rollout(self) -> None:
        self.generator.sync_weights(self.actor.rollout_weights(merged=self._merges_adapter))

    def save(self, folder: Path) -> None:
        """Writes this rank's part of the checkpoint; raises `CheckpointError` if a file cannot be written."""
        try:
            for name, model in self._models.items():
                save_state(model, folder / name, weights_only=self._saves_weights_only)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{error} (is the disk full?)") from error

    def load(self, folder: Path) -> None:
        for name, model in self._models.items():
            load_state(model, folder / name)

    def close(self) -> None:
        self.generator.close()


def objective_settings(
    actor: ActorConfig, algorithm: AlgorithmConfig, *, plugins: Sequence[str] = ()
) -> ObjectiveSettings:
    """Returns the settings of the objective; raises `ConfigError` if no file of `plugins` registers the policy loss."""
    if actor.loss_type not in available_losses():  # a worker process under Ray has read no configuration
        for plugin in plugins:
            load_plugin(plugin)
    in_loss = algorithm.use_kl_loss and not algorithm.disable_kl
    return ObjectiveSettings(
        loss=build_loss(actor.loss_type, section_of(actor.loss_type, vars(actor))),
        entropy=EntropyTerm(
            coefficient=actor.entropy_coef,
            final_coefficient=actor.entropy_coef_final,
            num_steps=actor.entropy_coef_steps,
        ),
        rollout_is=actor.rollout_is,
        rollout_is_threshold=actor.rollout_is_threshold,
        kl_penalty=algorithm.kl_penalty,
        kl_coefficient=algorithm.kl_coef if in_loss else 0.0,
    )


class AllocatorBytes(NamedTuple):
    """What torch's allocator on this process's GPU counts, in bytes; zeros without a GPU."""

    allocated: int
    reserved: int

    @classmethod
    def now(cls) -> AllocatorBytes:
        if this_device().type != "cuda":
            return cls(0, 0)
        return cls(torch.cuda.memory_allocated(), torch.cuda.memory_reserved())

    def __sub__(self, other: AllocatorBytes) -> AllocatorBytes:
        return AllocatorBytes(self.allocated - other.allocated, self.reserved - other.reserved)


def memory_metrics(engine: AllocatorBytes) -> Metrics:
    """Returns EasyR1's `perf/*` in GiB: this process's memory now and, on a GPU, the trainer's peaks; maxima over ranks.

    The peaks are those of scoring and update without what the rollout `engine` took at its start, since torch counts the
    memory of an engine that sleeps although it is free.
    """
    metrics = {"perf/cpu_memory_used_gb": max_value(psutil.Process().memory_info().rss / 2**30)}
    if this_device().type == "cuda":
        allocated = torch.cuda.max_memory_allocated() - engine.allocated
        reserved = torch.cuda.max_memory_reserved() - engine.reserved
        metrics["perf/max_memory_allocated_gb"] = max_value(allocated / 2**30)
        metrics["perf/max_memory_reserved_gb"] = max_value(reserved / 2**30)
    return metrics
