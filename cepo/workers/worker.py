"""Implements the worker process of one device: policy, optional critic, and rollout engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import psutil
import torch
from safetensors import SafetensorError
from torch import Tensor

from cepo.algorithms import load_plugin
from cepo.algorithms.settings import TeacherConfig
from cepo.config import RunConfig
from cepo.config.schema import AlgorithmConfig
from cepo.config.worker_schema import ActorConfig, CriticConfig
from cepo.data.batch import CriticBatch, Kept, OptimizerBatch, ScoringRow
from cepo.errors import CheckpointError
from cepo.files.trees import Fields
from cepo.losses import available_losses, build_loss
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
from cepo.workers.pass_sizes import PassNeeds, PassSizes, chosen_for, needs_of


@dataclass(frozen=True, kw_only=True)
class WorkerSpec:
    """What a worker is built from."""

    actor: ActorConfig
    critic: CriticConfig | None  # None for methods that read no values
    teacher: TeacherConfig
    generator: GeneratorSettings
    kl: KlInLoss
    needs_initial_weights: bool  # for a KL in the reward or in the loss
    skips_special_tokens: bool  # in the texts of responses
    saves_weights_only: bool
    chat_template: str | None  # replaces the checkpoint's
    chat_template_kwargs: Fields  # further variables of the template
    plugins: tuple[str, ...]  # files that register policy losses
    total_steps: int
    seed: int
    longest_row: int  # in tokens, prompt and response
    pass_needs: Mapping[str, PassNeeds] = field(default_factory=dict)  # of "actor" and "critic", if there may be a GPU
    passes: Mapping[str, PassSizes] = field(default_factory=dict)  # that this process's GPU holds

    @classmethod
    def of(
        cls,
        config: RunConfig,
        *,
        teacher: TeacherConfig,
        needs_values: bool,
        total_steps: int,
        most_visuals: tuple[int, int],
    ) -> WorkerSpec:
        """Returns what `config` says; `most_visuals` are the largest numbers of images and of videos in a prompt."""
        worker = config.worker
        num_devices = config.trainer.num_devices
        return cls(
            actor=worker.actor,
            critic=worker.resolved_critic if needs_values else None,
            teacher=teacher,
            generator=settings_of_run(config.data, worker, num_devices=num_devices, most_visuals=most_visuals),
            kl=KlInLoss.of(config.algorithm),
            needs_initial_weights=not config.algorithm.disable_kl,
            skips_special_tokens=worker.reward.skip_special_tokens,
            saves_weights_only=config.trainer.save_model_only,
            chat_template=config.data.override_chat_template,
            chat_template_kwargs=config.data.chat_template_kwargs,
            plugins=tuple(config.trainer.plugins),
            total_steps=total_steps,
            seed=config.trainer.seed,
            longest_row=config.data.longest_row,
        )

    def with_pass_needs(self, config: RunConfig, *, with_vllm: bool) -> WorkerSpec:
        """Returns these values with what passes of each trained model need on a GPU."""
        models: dict[str, ActorConfig | CriticConfig] = {"actor": self.actor}
        if self.critic is not None:
            models["critic"] = self.critic
        needs = {name: needs_of(config, settings, with_vllm=with_vllm) for name, settings in models.items()}
        return dataclasses.replace(self, pass_needs=needs)

    def for_this_device(self, memory: Memory | None) -> WorkerSpec:
        """Returns these values with the engine's `sleep` and the passes decided by this process's GPU, if it has one."""
        device = this_device()
        generator = with_sleep_decided(memory, self.generator, device)
        if memory is None or device.type != "cuda":
            return dataclasses.replace(self, generator=generator)
        passes = {
            name: chosen_for(needs, memory, generator, device, name=name) for name, needs in self.pass_needs.items()
        }
        return dataclasses.replace(self, generator=generator, passes=passes)


@dataclass(frozen=True, kw_only=True)
class KlInLoss:
    """The KL from the initial weights that the loss has: `coefficient` is 0 if it has none."""

    penalty: str  # algorithm.kl_penalty
    coefficient: float

    @classmethod
    def of(cls, algorithm: AlgorithmConfig) -> KlInLoss:
        in_loss = algorithm.use_kl_loss and not algorithm.disable_kl
        return cls(penalty=algorithm.kl_penalty, coefficient=algorithm.kl_coef if in_loss else 0.0)


class Worker:
    """The part of `cepo.trainer.protocol.Backend` that runs on each device, with this rank's own rows.

    With several ranks each worker has its own process, in which torch.distributed is already initialised. All ranks
    must call the same methods in the same order, even without rows. Loss denominators are totals over all ranks.

    Raises:
        ConfigError, EngineError: a model cannot be loaded, or the rollout engine does not start.
    """

    def __init__(self, spec: WorkerSpec, processing: Processing) -> None:
        self._processing = processing
        self._skips_special_tokens = spec.skips_special_tokens
        self._merges_adapter = spec.generator.merge_lora
        self._saves_weights_only = spec.saves_weights_only
        common = {"total_steps": spec.total_steps, "seed": spec.seed, "longest_row": spec.longest_row}
        with phase("loading the model"):
            self.actor = Actor(
                spec.actor,
                processing,
                temperature=spec.generator.temperature,
                teacher=spec.teacher,
                objective_settings=objective_settings(spec.actor, spec.kl, plugins=spec.plugins),
                with_reference=spec.needs_initial_weights,
                chosen=spec.passes.get("actor"),
                **common,
            )
            self.critic = None
            if spec.critic is not None:
                self.critic = Critic(spec.critic, processing, chosen=spec.passes.get("critic"), **common)
        self._models: dict[str, Actor | Critic] = {"actor": self.actor}
        if self.critic is not None:
            self._models["critic"] = self.critic
        torch.cuda.empty_cache()  # the engine takes its share of what is free
        before_engine = AllocatorBytes.now()
        generator = spec.generator
        if generator.lora_rank > 0:
            generator = dataclasses.replace(generator, adapted_layers=self.actor.adapted_layers)
        self.generator = build_generator(generator, processing, device=this_device().type)
        self._engine_bytes = AllocatorBytes.now() - before_engine
        self._has_sampled = True  # the engine's start counts as sampling
        self.generator_name = self.generator.name

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
        self, rows: Sequence[ScoringRow], *, keep: Kept | None = None, temperature: float | None = None
    ) -> list[Tensor]:
        self._end_sampling()
        return self.actor.score(rows, keep=keep, temperature=temperature)

    def score_teacher(self, rows: Sequence[ScoringRow], *, keep: Kept | None = None) -> list[Tensor]:
        self._end_sampling()
        return self.actor.score_teacher(rows, keep=keep)

    def score_initial(self, rows: Sequence[ScoringRow]) -> list[Tensor]:
        self._end_sampling()
        return self.actor.score_initial(rows)

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


def objective_settings(actor: ActorConfig, kl: KlInLoss, *, plugins: Sequence[str] = ()) -> ObjectiveSettings:
    """Returns the settings of the objective; raises `ConfigError` if no file of `plugins` registers the policy loss."""
    if actor.loss_type not in available_losses():  # a worker process under Ray has read no configuration
        for plugin in plugins:
            load_plugin(plugin)
    return ObjectiveSettings(
        loss=build_loss(actor.loss_type, section_of(actor.loss_type, vars(actor))),
        entropy_coefficient=actor.entropy_coef,
        rollout_is=actor.rollout_is,
        rollout_is_threshold=actor.rollout_is_threshold,
        kl_penalty=kl.penalty,
        kl_coefficient=kl.coefficient,
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
