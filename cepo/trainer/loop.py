"""The training step: sample, generate, reward, score, consult teachers, estimate, update, record."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from cepo.algorithms import Estimator
from cepo.config import RunConfig
from cepo.data.batch import DistillationRows, OptimizerBatch
from cepo.data.contexts import ContextBuilder
from cepo.data.dataset import Problem, ProblemSet
from cepo.data.order import problem_indices
from cepo.losses.policy import LossDenominators
from cepo.metrics import Metrics, merge_metrics, results, sum_value
from cepo.models.processing import Processing
from cepo.rewards import RewardPool
from cepo.rollout.base import GenerationRequest, SamplingSettings, sampling_seed
from cepo.tracking.tracker import Tracker
from cepo.trainer import evidence, measures
from cepo.trainer.backend import Backend
from cepo.trainer.checkpoints import CheckpointStore
from cepo.trainer.clock import StageClock
from cepo.trainer.records import group_records
from cepo.trainer.rollouts import RolloutBatch
from cepo.trainer.validation import Validator
from cepo.types import TokenSignal

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Trainer:
    """One run. Steps are 0-based inside and 1-based in everything written: step k is recorded after its update."""

    config: RunConfig
    problems: ProblemSet
    processing: Processing
    estimator: Estimator
    contexts: ContextBuilder
    backend: Backend
    rewards: RewardPool
    tracker: Tracker
    checkpoints: CheckpointStore
    validator: Validator | None
    total_steps: int
    first_step: int = 0

    def __post_init__(self) -> None:
        self.clock = StageClock()
        self._last_validated = -1
        self._last_saved = -1

    def fit(self) -> None:
        """Trains from `first_step` to `total_steps`, validating and saving on the way and at the end."""
        settings = self.config.trainer
        self.backend.synchronise_rollout()
        if settings.val_only:
            self.validate(self.first_step)
            return
        if settings.val_before_train and self.first_step == 0:
            self.validate(0)
        for step in range(self.first_step, self.total_steps):
            self.train_step(step)
            done = step + 1
            if _due(done, settings.val_freq):
                self.validate(done)
            if _due(done, settings.save_freq):
                self.save(done)
        if self.total_steps > self.first_step:
            if settings.val_freq > 0 or settings.val_before_train:
                self.validate(self.total_steps)
            self.save(self.total_steps)

    def train_step(self, step: int) -> None:
        """One step of the algorithm."""
        with self.clock.stage("step"):
            problems = self.sample(step)
            batch = self.generate(problems, step)
            metrics = [self.reward(batch)]
            metrics.append(self.score(batch))
            metrics.append(self.consult_teachers(batch))
            signal = self.estimate(batch)
            metrics += [signal.metrics, self.update(batch, signal)]
        self.record(batch, [*metrics, self.clock.drain()])

    def sample(self, step: int) -> Sequence[Problem]:
        """The problems of this step: a function of (seed, step) alone."""
        data = self.config.data
        indices = problem_indices(
            step,
            num_problems=len(self.problems),
            batch_size=data.rollout_batch_size,
            shuffle=data.shuffle,
            seed=data.seed,
        )
        return [self.problems[index] for index in indices]

    def generate(self, problems: Sequence[Problem], step: int) -> RolloutBatch:
        """G responses to each problem, with a sampling seed of their own for every step and prompt."""
        rollout = self.config.worker.rollout
        settings = SamplingSettings(
            num_samples=rollout.n,
            max_response_length=self.config.data.max_response_length,
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            ignore_eos=rollout.ignore_eos,
        )
        with self.clock.stage("generate"):
            prompts = [self.contexts.student(problem) for problem in problems]
            requests = [
                GenerationRequest(
                    prompt_ids=prompt.engine_ids,
                    num_prompt_tokens=len(prompt.token_ids),
                    images=problem.images,
                    seed=sampling_seed(rollout.seed, step, problem.prompt_id),
                )
                for problem, prompt in zip(problems, prompts, strict=True)
            ]
            generations = [one for group in self.backend.generate(requests, settings) for one in group]
        self.clock.count_tokens("generate", sum(len(generation.response_ids) for generation in generations))
        return RolloutBatch(step=step, problems=problems, prompts=prompts, generations=generations)

    def reward(self, batch: RolloutBatch) -> Metrics:
        """Scores every response and tells right from wrong; a reward that raises or hangs costs its own sample."""
        algorithm = self.config.algorithm
        with self.clock.stage("reward"):
            skip = self.config.worker.reward.skip_special_tokens
            batch.responses = [
                self.processing.decode(generation.response_ids, skip_special_tokens=skip)
                for generation in batch.generations
            ]
            outcome = self.rewards.score(measures.reward_inputs(batch))
            batch.scores = outcome.scores
            batch.rewards = torch.tensor([score["overall"] for score in batch.scores])
            batch.correct = measures.correctness(batch.scores, algorithm.correct_key, algorithm.correct_threshold)
            if self.estimator.needs_teacher(step=batch.step):
                batch.groups = evidence.rollout_groups(
                    batch,
                    self.rewards,
                    special_texts=self.processing.special_texts,
                    eos_token_ids=self.processing.eos_token_ids,
                    seed=self.config.trainer.seed,
                )
        return measures.reward_metrics(batch, outcome.num_raised, outcome.num_timed_out)

    def score(self, batch: RolloutBatch) -> Metrics:
        """Student log-probs of the rows that can carry a signal, under the weights that start the update."""
        with self.clock.stage("score"):
            batch.live = self.estimator.live_rows(batch.rewards, batch.group_ids)
            batch.old_log_probs = batch.padded([generation.log_probs for generation in batch.generations])
            live = batch.live.nonzero().flatten().tolist()
            rows = [batch.scoring_row(row) for row in live]
            sampled = batch.old_log_probs.clone()
            for row, log_probs in zip(live, self.backend.score(rows) if rows else [], strict=True):
                batch.old_log_probs[row, : len(log_probs)] = log_probs
        self.clock.count_tokens("score", sum(row.num_tokens for row in rows))
        return measures.agreement_metrics(batch, sampled, self.config.worker.rollout.temperature)

    def consult_teachers(self, batch: RolloutBatch) -> Metrics:
        """log-probs of the same responses behind contexts that hold a right or a wrong answer."""
        if not self.estimator.needs_teacher(step=batch.step):
            return {"work/teacher_rows": sum_value(0)} if self.estimator.views else {}
        with self.clock.stage("teachers"):
            metrics, num_tokens = evidence.consult_teachers(
                batch,
                self.estimator,
                self.contexts,
                lambda rows, keep: self.backend.score(rows, as_teacher=True, keep_states=keep),
            )
        self.clock.count_tokens("teachers", num_tokens)
        return metrics | evidence.fallback_metrics(batch.groups)

    def estimate(self, batch: RolloutBatch) -> TokenSignal:
        """What each token shall learn."""
        with self.clock.stage("estimate"):
            batch.signal = self.estimator.signal(batch.token_batch(), step=batch.step)
        return batch.signal

    def update(self, batch: RolloutBatch, signal: TokenSignal) -> Metrics:
        """PPO-clipped optimizer steps, then refreshed teachers and rollout weights."""
        with self.clock.stage("update"):
            batches = self._optimizer_batches(batch, signal)
            metrics = self.backend.update(batches, step=batch.step)
            self.backend.finish_step(batch.step)
        with self.clock.stage("sync"):
            self.backend.synchronise_rollout()
        self.clock.count_tokens("update", sum(row.num_tokens for part in batches for row in part.rows))
        return metrics

    def record(self, batch: RolloutBatch, parts: Sequence[Metrics]) -> None:
        """Writes the step's metrics and some of its rollouts."""
        self.tracker.log_metrics(batch.step + 1, results(merge_metrics(parts)))
        self.tracker.log_rollouts(group_records(batch, self.processing, self.config.trainer.rollouts_to_log))

    def validate(self, done: int) -> None:
        """Accuracy on held-out problems after `done` steps."""
        if self.validator is None or self._last_validated == done:
            return
        with self.clock.stage("validate"):
            metrics, rows = self.validator.run(self.backend)
        self._last_validated = done
        self.tracker.log_metrics(done, results(merge_metrics([metrics, self.clock.drain()])))
        self.tracker.log_generations(done, rows)

    def save(self, done: int) -> None:
        """A checkpoint after `done` steps."""
        if self._last_saved == done:
            return
        with self.clock.stage("save"):
            folder = self.checkpoints.save(done, self.backend)
        self._last_saved = done
        logger.info("checkpoint after step %d: %s", done, folder)

    def _optimizer_batches(self, batch: RolloutBatch, signal: TokenSignal) -> list[OptimizerBatch]:
        """Splits the rollout batch by prompts, `ppo_epochs` times over; rows without gradient only count."""
        actor = self.config.worker.actor
        size = actor.global_batch_size * batch.group_size
        parts = []
        for start in range(0, len(batch.generations), size):
            rows = torch.arange(start, min(start + size, len(batch.generations)))
            denominators = LossDenominators(
                num_tokens=int(batch.response_mask[rows].sum()),
                num_sequences=len(rows),
                max_response_length=self.config.data.max_response_length,
            )
            rows = rows[batch.live[rows]]
            parts.append(
                OptimizerBatch(
                    rows=[batch.scoring_row(int(row)) for row in rows],
                    old_log_probs=batch.old_log_probs[rows],
                    advantages=signal.advantages[rows],
                    response_mask=batch.response_mask[rows],
                    denominators=denominators,
                    distillation=_distillation_rows(batch, signal, rows.tolist()),
                )
            )
        return parts * actor.ppo_epochs


def _distillation_rows(batch: RolloutBatch, signal: TokenSignal, rows: list[int]) -> DistillationRows | None:
    if signal.distillation is None:
        return None
    return DistillationRows(
        divergence=signal.distillation.divergence,
        token_weight=signal.distillation.token_weight[rows],
        state_index=[batch.state_index.get(row, -1) for row in rows],
    )


def _due(done: int, every: int) -> bool:
    return every > 0 and done % every == 0
