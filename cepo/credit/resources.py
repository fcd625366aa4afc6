"""Opens the resources of a measurement: problems, rewards, and one device with the checkpoint's weights."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

from torch import Tensor

from cepo.algorithms import Estimator
from cepo.algorithms.settings import TeacherConfig
from cepo.config import RunConfig
from cepo.data.batch import ScoringRow
from cepo.data.prompts import ContextBuilder, Problem
from cepo.data.training_set import TrainingProblems, most_visuals, read_training_sets
from cepo.errors import ConfigError
from cepo.files.trees import Tree
from cepo.models.processing import Processing, processing_of
from cepo.rewards.pool import RewardPool
from cepo.run_folder.environment import describe_software
from cepo.trainer.rollouts import Rollouts
from cepo.trainer.sampling import RolloutSampler, training_settings
from cepo.workers.checkpoint import load_weights
from cepo.workers.teacher_model import require_fitting_teacher
from cepo.workers.worker import Worker, WorkerSpec


class Scorer(Protocol):
    """The part of a worker that scores rows."""

    def score(self, rows: Sequence[ScoringRow]) -> list[Tensor]:
        """Returns each row's log-probs, (response length,)."""
        ...

    def score_teacher(self, rows: Sequence[ScoringRow]) -> list[Tensor]:
        """Does the same under the weights of a teacher that has its own."""
        ...


@dataclass(frozen=True, kw_only=True)
class Scoring:
    """What scores responses: settings, a processor, a grader, and a model."""

    config: RunConfig
    processing: Processing
    rewards: RewardPool
    backend: Scorer


@dataclass(frozen=True, kw_only=True)
class Session(Scoring):
    """What samples responses beside scoring them."""

    problems: TrainingProblems
    contexts: ContextBuilder
    backend: Worker
    sampler: RolloutSampler

    def description(self, checkpoint: str | None) -> Tree:
        """Returns what the results depend on."""
        config = self.config
        return {
            "checkpoint": checkpoint,
            "model": config.worker.actor.model.model_path,
            "data": config.data.train_sources,
            "generator": self.backend.generator_name,
            "seed": config.worker.rollout.seed,
            "sampling": asdict(training_settings(config.worker.rollout, config.data.max_response_length)),
            **describe_software(),
        }

    def problems_of(self, step: int) -> list[Problem]:
        return [self.problems[index] for index in self.problems.indices(step, self.config.data.rollout_batch_size)]

    def sample(self, step: int, *, with_baselines: bool) -> Rollouts:
        """Samples and rewards what training would at the 0-based `step`, with greedy responses as baselines if asked."""
        settings = training_settings(self.config.worker.rollout, self.config.data.max_response_length)
        rollouts = self.sampler.sample(self.problems_of(step), self.backend, settings, step=step)
        return self.sampler.with_baselines(rollouts, self.backend, settings) if with_baselines else rollouts


@contextlib.contextmanager
def opened(config: RunConfig, actor: Path | None, methods: Iterable[Estimator]) -> Iterator[Session]:
    """Opens a measurement on this process's device, with the weights of a checkpoint's folder `actor`, or the model's own.

    Of the `methods`, those whose teacher has weights of its own must name the same ones.

    Raises a `CepoError` if problems, weights, engine or reward cannot be used.
    """
    teachers = {method.teacher.model_path: method for method in methods if method.teacher.model_path is not None}
    if len(teachers) > 1:
        raise ConfigError(f"teacher.model_path: one measurement loads one teacher, not {', '.join(sorted(teachers))}")
    processing = processing_of(config)
    problems = read_training_sets(config.data, processing)
    for method in teachers.values():
        require_fitting_teacher(method, config.worker.actor.model, processing)
    contexts = ContextBuilder(processing, TeacherConfig(), max_context_length=config.data.max_prompt_length)
    spec = WorkerSpec.of(
        config,
        teacher=TeacherConfig(model_path=next(iter(teachers), None)),
        needs_values=False,
        total_steps=1,
        most_visuals=most_visuals(problems),
    )
    with contextlib.ExitStack() as stack:
        rewards = stack.enter_context(RewardPool(config.worker.reward))
        backend = Worker(spec, processing)
        stack.callback(backend.close)
        if actor is not None:
            load_weights(backend.actor, actor)
        backend.synchronise_rollout()
        yield Session(
            config=config,
            processing=processing,
            problems=problems,
            contexts=contexts,
            rewards=rewards,
            backend=backend,
            sampler=RolloutSampler(config.worker, config.algorithm, contexts, processing, rewards),
        )
