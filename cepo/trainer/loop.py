"""The training step: sample, generate, reward, score, consult teachers, estimate, update, record."""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cepo import interrupts
from cepo.algorithms import Estimator
from cepo.config import RunConfig, resolved_critic
from cepo.data.batch import ScoringRow
from cepo.data.contexts import ContextBuilder
from cepo.data.dataset import Problem, ProblemSet
from cepo.data.mixing import MixedProblems
from cepo.errors import CheckpointError
from cepo.metrics import Metrics, merge_metrics, results, sum_value
from cepo.models.processing import Processing
from cepo.rewards.pool import RewardPool
from cepo.rollout.base import GenerationRequest, SamplingSettings
from cepo.tracking.tracker import Tracker
from cepo.trainer import evidence, measures
from cepo.trainer.backend import Backend
from cepo.trainer.checkpoints import CheckpointStore
from cepo.trainer.clock import StageClock
from cepo.trainer.equal_rewards import EqualRewards
from cepo.trainer.filtering import collect_batch
from cepo.trainer.optimizer_batches import actor_batches, critic_batches
from cepo.trainer.penalty import penalise
from cepo.trainer.records import group_records
from cepo.trainer.rewarding import Rewarding
from cepo.trainer.rollouts import RolloutBatch, View
from cepo.trainer.sampling import generation_request, training_settings
from cepo.trainer.skipped_updates import SkippedUpdates
from cepo.trainer.state import TrainerState
from cepo.trainer.validation import Validator
from cepo.types import TokenSignal

logger = logging.getLogger(__name__)

_SKIPPED = "actor/skipped_updates"


@dataclass(kw_only=True)
class Trainer:
    """One run. Steps are 0-based inside and 1-based in everything written: step k is recorded after its update.

    `restarts` counts how often this run's workers were lost so far.
    """

    config: RunConfig
    problems: ProblemSet | MixedProblems
    processing: Processing
    estimator: Estimator
    contexts: ContextBuilder
    backend: Backend
    rewards: RewardPool
    tracker: Tracker
    checkpoints: CheckpointStore
    validator: Validator | None
    total_steps: int
    state: TrainerState
    restarts: int = 0

    def __post_init__(self) -> None:
        self.clock = StageClock()
        self._equal_rewards = EqualRewards()
        self._skipped_updates = SkippedUpdates(self.config.trainer.max_skipped_steps)
        self._first_step = self.state.step
        self._last_validated = -1
        self._last_val_reward: float | None = None
        self._last_saved = -1
        self._is_save_missing = False

    def fit(self) -> None:
        """Trains from `state.step` to `total_steps`, validating and saving on the way and at the end."""
        settings = self.config.trainer
        self.backend.synchronise_rollout()
        if settings.val_only:
            self.validate(self._first_step)
            return
        if settings.val_before_train and self._first_step == 0:
            self.validate(0)
        for step in range(self._first_step, self.total_steps):
            self.train_step(step)
            interrupts.raise_if_lost()
            done = step + 1
            if _due(done, settings.val_freq):
                self.validate(done)
            self._skipped_updates.require_an_update(self.checkpoints.folder)
            if (_due(done, settings.save_freq) or self._is_save_missing) and done < self.total_steps:
                self.save_if_possible(done)
        if self.total_steps > self._first_step:
            if settings.val_freq > 0 or settings.val_before_train:
                self.validate(self.total_steps)
            self.save(self.total_steps)

    def train_step(self, step: int) -> None:
        """One step of the algorithm."""
        with self.clock.stage("step"):
            batch, metrics = self.make_batch(step)
            metrics.append(self.score(batch))
            metrics.append(self.consult_teachers(batch))
            self.value(batch)
            signal = self.estimate(batch)
            metrics += [signal.metrics, self.update(batch, signal)]
        self.state.step = step + 1
        self.record(batch, [*metrics, self.clock.drain()])

    def make_batch(self, step: int) -> tuple[RolloutBatch, list[Metrics]]:
        """Rewarded rollouts of `rollout_batch_size` problems; under online filtering, of as many rounds as it takes."""
        algorithm, data = self.config.algorithm, self.config.data

        def next_round(attempt: int) -> RolloutBatch:
            return self.rewarded(self.sample(), step, training_settings(self.config), attempt=attempt)

        metrics: list[Metrics] = []
        if algorithm.online_filtering:
            most = self.config.trainer.max_try_make_batch
            batch, filtered = collect_batch(
                next_round,
                algorithm,
                num_groups=data.rollout_batch_size,
                max_rounds=most,
                rounds_per_pass=-(-len(self.problems) // self._problems_per_round),
            )
            metrics.append(filtered)
        else:
            batch = next_round(0)
        if self.estimator.needs_baseline:
            batch.reward_baselines = self.greedy_rewards(batch)
        if self.estimator.needs_teacher(step=step):
            batch.groups = evidence.rollout_groups(
                batch,
                self.rewards,
                special_texts=self.processing.special_texts,
                eos_token_ids=self.processing.eos_token_ids,
                seed=self.config.trainer.seed,
            )
        self._equal_rewards.see(batch.rewards)
        return batch, [*metrics, measures.reward_metrics(batch)]

    def sample(self) -> Sequence[Problem]:
        """The next problems: a function of the seed and of how many rounds have been asked."""
        indices = self.problems.indices(self.state.rounds, self._problems_per_round)
        self.state.rounds += 1
        return [self.problems[index] for index in indices]

    @property
    def _problems_per_round(self) -> int:
        data = self.config.data
        asked_in_parts = data.mini_rollout_batch_size if self.config.algorithm.online_filtering else None
        return asked_in_parts or data.rollout_batch_size

    def rewarded(
        self, problems: Sequence[Problem], step: int, settings: SamplingSettings, *, attempt: int = 0
    ) -> RolloutBatch:
        """Responses with their rewards; groups that are finished are rewarded while others are still generated."""
        with Rewarding(problems, self.config, self.processing, self.rewards) as rewarding:
            batch = self.generate(problems, step, settings, rewarding, attempt=attempt)
            return self.reward(batch, rewarding)

    def generate(
        self,
        problems: Sequence[Problem],
        step: int,
        settings: SamplingSettings,
        rewarding: Rewarding,
        *,
        attempt: int = 0,
    ) -> RolloutBatch:
        """Responses to each problem, with a sampling seed of their own for every step, round within it, and prompt."""
        with self.clock.stage("generate"):
            prompts = [self.contexts.student(problem) for problem in problems]
            seed = self.config.worker.rollout.seed
            asked: Counter[str] = Counter()
            requests: list[GenerationRequest] = []
            for problem, prompt in zip(problems, prompts, strict=True):
                copy = asked[problem.prompt_id]
                requests.append(generation_request(problem, prompt, seed=seed, step=step, attempt=attempt, copy=copy))
                asked[problem.prompt_id] += 1
            groups = self.backend.generate(requests, settings, rewarding.begin)
        generations = [generation for group in groups for generation in group]
        self.clock.count_tokens("generate", sum(len(generation.response_ids) for generation in generations))
        return RolloutBatch(step=step, problems=problems, prompts=prompts, generations=generations)

    def reward(self, batch: RolloutBatch, rewarding: Rewarding) -> RolloutBatch:
        """Scores every response and tells right from wrong; a reward that raises or hangs costs its own sample.

        The stage's time is what generation has not covered.
        """
        algorithm = self.config.algorithm
        with self.clock.stage("reward"):
            batch.responses, outcome = rewarding.finish(batch.generations_by_group())
            batch.scores = outcome.scores
            batch.num_raised, batch.num_timed_out = outcome.num_raised, outcome.num_timed_out
            batch.rewards = torch.tensor([score["overall"] for score in batch.scores])
            batch.correct = measures.correctness(batch.scores, algorithm.correct_key, algorithm.correct_threshold)
        return batch

    def greedy_rewards(self, batch: RolloutBatch) -> Tensor:
        """(B,) the reward of the greedy response to each row's prompt."""
        greedy = dataclasses.replace(training_settings(self.config), num_samples=1, temperature=0.0)
        return self.rewarded(batch.problems, batch.step, greedy).rewards.repeat_interleave(batch.group_size)

    def score(self, batch: RolloutBatch) -> Metrics:
        """Log-probs under the weights that start the update, of live rows that something reads.

        Live teachers have the student's weights: their views are scored in the same pass, which computes the prompt that all
        contexts begin with once. A KL penalty gives every row a signal, and its reference log-probs.
        """
        with_kl = not self.config.algorithm.disable_kl
        batch.sampled_log_probs = batch.padded([generation.log_probs for generation in batch.generations])
        batch.old_log_probs = batch.sampled_log_probs.clone()
        batch.live = self.estimator.live_rows(batch.rewards, batch.group_ids) | with_kl
        batch.on_policy = self._on_policy_rows(batch)
        if self.estimator.needs_teacher(step=batch.step):
            batch.views = evidence.plan_views(batch, self.estimator, self.contexts)
            batch.live = self.estimator.learning_rows(batch.live, evidence.has_reference(batch.views)) | with_kl
        needed = evidence.student_rows(batch, self.estimator, batch.views, every=with_kl)
        rows = [batch.scoring_row(row, keep_state=False) for row in needed]
        together = batch.views if self.estimator.teacher.source == "actor" else []
        scored = self._log_probs([rows, *(view.scoring_rows for view in together)], together)
        for row, log_probs in zip(needed, scored[0], strict=True):
            batch.old_log_probs[row, : len(log_probs)] = log_probs
        self.clock.count_tokens("score", sum(row.num_tokens for row in rows))
        is_scored = torch.zeros_like(batch.live).index_fill(0, torch.tensor(needed, dtype=torch.long), True)
        metrics = measures.work_metrics(batch, is_scored, self.config.worker.rollout.temperature)
        if self.config.worker.rollout.temperature != 1.0:
            with self.clock.stage("score"):
                metrics |= measures.gap_at_temperature_1(batch, self.backend)
        if with_kl:
            metrics |= self._penalty(batch, [batch.scoring_row(row) for row in needed])
        return metrics

    def _on_policy_rows(self, batch: RolloutBatch) -> Tensor:
        """(B,) rows of the step's first optimizer batch, if no later epoch needs what they were then."""
        actor = self.config.worker.actor
        first = actor.global_batch_size * batch.group_size if actor.ppo_epochs == 1 else 0
        return torch.arange(len(batch.generations)) < first

    def _log_probs(
        self, parts: Sequence[Sequence[ScoringRow]], views: Sequence[View], *, as_teacher: bool = False
    ) -> list[list[Tensor]]:
        """One pass over all parts, the last of which are those of `views`; the views get theirs."""
        rows = [row for part in parts for row in part]
        keep = any(view.distilled for view in views)
        with self.clock.stage("teachers" if as_teacher else "score"):
            scored = iter(self.backend.score(rows, as_teacher=as_teacher, keep_states=keep) if rows else [])
        results = [[next(scored) for _ in part] for part in parts]
        first = len(parts) - len(views)
        for number, view in enumerate(views, first):
            view.log_probs, view.first_place = results[number], sum(len(part) for part in parts[:number])
        return results

    def _penalty(self, batch: RolloutBatch, rows: Sequence[ScoringRow]) -> Metrics:
        """Log-probs under the initial weights, and the KL's share in the rewards."""
        over_vocabulary = self.config.algorithm.kl_penalty == "full"
        with self.clock.stage("score"):
            batch.reference_log_probs = batch.padded(self.backend.score_reference(rows, keep_states=over_vocabulary))
            if over_vocabulary:
                batch.reference_divergence = batch.padded(self.backend.reference_divergence(rows))
        return penalise(batch, self.config.algorithm, self.state)

    def consult_teachers(self, batch: RolloutBatch) -> Metrics:
        """log-probs of the same responses behind contexts that hold a right or a wrong answer."""
        if not self.estimator.needs_teacher(step=batch.step):
            return {"work/teacher_rows": sum_value(0)} if self.estimator.views else {}
        if self.estimator.teacher.source != "actor":
            self._log_probs([view.scoring_rows for view in batch.views], batch.views, as_teacher=True)
        self.clock.count_tokens("teachers", sum(view.num_tokens for view in batch.views))
        return evidence.fill_views(batch, batch.views) | evidence.fallback_metrics(
            batch.groups, self.estimator.negative
        )

    def value(self, batch: RolloutBatch) -> None:
        """The critic's values, for methods that learn from them."""
        if self.estimator.needs_values:
            rows = [batch.scoring_row(row) for row in range(len(batch.generations))]
            with self.clock.stage("score"):
                batch.values = batch.padded(self.backend.values(rows))

    def estimate(self, batch: RolloutBatch) -> TokenSignal:
        """What each token shall learn."""
        with self.clock.stage("estimate"):
            batch.signal = self.estimator.signal(batch.token_batch(), step=batch.step)
        return batch.signal

    def update(self, batch: RolloutBatch, signal: TokenSignal) -> Metrics:
        """Optimizer steps of the critic and, once it is warm, of the actor; then refreshed teachers and rollout weights."""
        actor, longest = self.config.worker.actor, self.config.data.max_response_length
        metrics: Metrics = {}
        with self.clock.stage("update"):
            if self.estimator.needs_values:
                critic = resolved_critic(self.config.worker)
                targets = critic_batches(
                    batch,
                    signal,
                    num_prompts=critic.global_batch_size or actor.global_batch_size,
                    epochs=critic.ppo_epochs,
                    max_response_length=longest,
                )
                metrics |= self.backend.update_critic(targets, step=batch.step)
            if self.estimator.needs_values and batch.step < self.config.trainer.critic_warmup:
                return metrics
            batches = actor_batches(
                batch,
                signal,
                num_prompts=actor.global_batch_size,
                epochs=actor.ppo_epochs,
                max_response_length=longest,
            )
            updated = self.backend.update(batches, step=batch.step)
            skipped = results({name: updated[name] for name in (_SKIPPED,) if name in updated})
            self._skipped_updates.see(batch.step + 1, skipped.get(_SKIPPED, 0.0), len(batches))
            metrics |= updated
            self.backend.finish_step(batch.step)
        with self.clock.stage("sync"):
            self.backend.synchronise_rollout()
        self.clock.count_tokens("update", sum(row.num_tokens for part in batches for row in part.rows))
        return metrics

    def record(self, batch: RolloutBatch, parts: Sequence[Metrics]) -> None:
        """Writes the step's metrics and some of its rollouts."""
        if self.restarts:
            parts = [*parts, {"faults/restarts": sum_value(self.restarts)}]
        self.tracker.log_metrics(batch.step + 1, results(merge_metrics(parts)))
        self.tracker.log_rollouts(group_records(batch, self.processing, self.config.trainer.rollouts_to_log))

    def validate(self, done: int) -> None:
        """Accuracy on held-out problems after `done` steps."""
        if self.validator is None or self._last_validated == done:
            return
        logger.info("validation after step %d: %d responses", done, self.validator.num_responses)
        with self.clock.stage("validate"):
            metrics, rows = self.validator.run(self.backend)
            self.backend.forget_work()
        self._last_validated = done
        values = results(merge_metrics([metrics, self.clock.drain()]))
        self._last_val_reward = values.get("val/reward")
        self.tracker.log_metrics(done, values)
        self.tracker.log_generations(done, rows)

    def save_if_possible(self, done: int) -> None:
        """A checkpoint on the way; where it cannot be written the run goes on, and tries again after the next step.

        None is written while updates fail, so that those of before are not pruned for it.
        """
        if self._skipped_updates.steps_in_a_row:
            self._is_save_missing = True
            return
        try:
            self.save(done)
            self._is_save_missing = False
        except CheckpointError as error:
            self._is_save_missing = True
            logger.error("%s. The run goes on and tries again after the next step", error)

    def save(self, done: int) -> None:
        """A checkpoint after `done` steps."""
        if self._last_saved == done:
            return
        with self.clock.stage("save"):
            score = self._last_val_reward if self._last_validated == done else None
            folder = self.checkpoints.save(self.state, self.backend, val_reward_score=score)
        self._last_saved = done
        logger.info("checkpoint after step %d: %s", done, folder)


def _due(done: int, every: int) -> bool:
    return every > 0 and done % every == 0
