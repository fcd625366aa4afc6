"""Implements the training step: ask, plan, score, estimate, update, record."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

from cepo import interrupts
from cepo.algorithms import Estimator
from cepo.config import RunConfig, resolved_critic
from cepo.data.batch import RowName, ScoringRow
from cepo.data.contexts import ContextBuilder
from cepo.data.dataset import Problem, ProblemSet
from cepo.data.mixing import MixedProblems
from cepo.errors import CheckpointError
from cepo.losses.kl import kl_penalty
from cepo.metrics import Metrics, merge_metrics, results, sum_value
from cepo.models.processing import Processing
from cepo.progress import phase
from cepo.rewards.pool import RewardPool
from cepo.tracking.tracker import Tracker
from cepo.trainer.asking import Asker, Rollouts, training_settings
from cepo.trainer.callbacks import Callback
from cepo.trainer.checkpoints import CheckpointStore, TrainerState
from cepo.trainer.faults import FaultWatch
from cepo.trainer.filtering import ask_until_enough
from cepo.trainer.health import EqualRewards, MissingAnswers, SkippedUpdates, StageClock
from cepo.trainer.planning import ScoringPlan, make_plan, num_without_answer, rollout_groups
from cepo.trainer.protocol import Backend
from cepo.trainer.recording import answer_metrics, group_records, reward_metrics, work_metrics
from cepo.trainer.scoring import (
    ScoredBatch,
    actor_batches,
    critic_batches,
    gap_at_temperature_1,
    penalise,
    with_scored,
)
from cepo.trainer.token_masks import restricted
from cepo.trainer.validation import Validator
from cepo.types import TokenSignal

logger = logging.getLogger(__name__)

_SKIPPED = "actor/skipped_updates"


@dataclass(kw_only=True)
class Trainer:
    """Trains one run. Steps are 0-based in the code and 1-based in all output: step k is recorded after its update.

    `restarts` is the number of times that this run's workers have been lost so far.
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
    callback: Callback = field(default_factory=Callback)

    def __post_init__(self) -> None:
        self.clock = StageClock()
        self._asker = Asker(self.config, self.contexts, self.processing, self.rewards, self.clock)
        self._equal_rewards = EqualRewards()
        self._missing_answers = MissingAnswers()
        self._skipped_updates = SkippedUpdates(self.config.trainer.max_skipped_steps)
        self._faults = FaultWatch(self.config.trainer)
        self._first_step = self.state.step
        self._last_validated = -1
        self._last_val_reward: float | None = None
        self._last_saved = -1
        self._is_between_steps = True
        self._is_save_missing = False

    def fit(self) -> None:
        """Trains from `state.step` to `total_steps`, with validations and checkpoints at set steps and at the end.

        With `trainer.save_on_interrupt` an interruption is raised at the end of its step, when a checkpoint has been saved.
        """
        settings = self.config.trainer
        with phase("handing the weights to the rollout engine"):
            self.backend.synchronise_rollout()
        if settings.val_only:
            self.validate(self._first_step)
            return
        if settings.val_before_train and self._first_step == 0:
            self.validate(0)
        try:
            self._train()
        except KeyboardInterrupt:
            if settings.save_on_interrupt and self._is_between_steps and self.state.step > self._first_step:
                self.save_if_possible(self.state.step)
            raise

    def _train(self) -> None:
        settings = self.config.trainer
        for step in range(self._first_step, self.total_steps):
            self._is_between_steps = False
            with self._unbroken(f"step {step + 1} is finished and saved first (trainer.save_on_interrupt)"):
                self.train_step(step)
            self._is_between_steps = True
            interrupts.raise_if_lost()
            done = step + 1
            if _due(done, settings.val_freq):
                self.validate(done)
            self._skipped_updates.require_an_update(self.checkpoints.folder)
            if (_due(done, settings.save_freq) or self._is_save_missing) and done < self.total_steps:
                self.save_if_possible(done)
                interrupts.raise_if_lost()
        if self.total_steps > 0:
            if settings.val_freq > 0 or settings.val_before_train:
                self.validate(self.total_steps)
            self.save_last()

    def train_step(self, step: int) -> None:
        """Runs one training step through all its stages."""
        with self.clock.stage("step"):
            rollouts = self.ask(step)
            self.callback.after_ask(rollouts)
            plan = self.plan(rollouts)
            self.callback.after_plan(plan)
            batch = self.score(plan)
            self.callback.after_score(batch)
            signal = self.estimate(batch)
            self.callback.after_estimate(batch, signal)
            may_learn = self._faults.before_update(batch, signal)
            updated = self.update(batch, signal) if may_learn else self.leave_out_update(step)
            self.callback.after_update(batch, signal)
        self.state.step = step + 1
        self.record(batch, signal, updated)

    def ask(self, step: int) -> Rollouts:
        """Samples and rewards responses to `rollout_batch_size` problems, in several rounds with online filtering."""
        algorithm, settings = self.config.algorithm, training_settings(self.config)

        def next_round(attempt: int) -> Rollouts:
            return self._asker.ask(self._next_problems(), self.backend, settings, step=step, attempt=attempt)

        if algorithm.online_filtering:
            rollouts = ask_until_enough(
                next_round,
                algorithm,
                num_groups=self.config.data.rollout_batch_size,
                max_rounds=self.config.trainer.max_try_make_batch,
                rounds_per_pass=-(-len(self.problems) // self._problems_per_round),
            )
        else:
            rollouts = next_round(0)
        if self.estimator.needs_baseline:
            rollouts = self._asker.with_baselines(rollouts, self.backend, settings)
        self._equal_rewards.see(rollouts.rewards)
        return rollouts

    def _next_problems(self) -> Sequence[Problem]:
        """Returns the next round's problems, which depend only on the seed and the number of earlier rounds."""
        indices = self.problems.indices(self.state.rounds, self._problems_per_round)
        self.state.rounds += 1
        return [self.problems[index] for index in indices]

    @property
    def _problems_per_round(self) -> int:
        data = self.config.data
        asked_in_parts = data.mini_rollout_batch_size if self.config.algorithm.online_filtering else None
        return asked_in_parts or data.rollout_batch_size

    def plan(self, rollouts: Rollouts) -> ScoringPlan:
        """Decides which rows learn, what their teachers read, and which rows the student must score."""
        groups = []
        if self.estimator.needs_teacher(step=rollouts.step):
            groups = rollout_groups(
                rollouts,
                self.rewards,
                self.processing,
                seed=self.config.trainer.seed,
                with_values=self.estimator.negative.select == "most_frequent",
            )
            if self.estimator.reads_answers:
                self._missing_answers.see(num_without_answer(groups), len(rollouts.generations))
        return make_plan(
            rollouts,
            groups,
            self.estimator,
            self.contexts,
            on_policy=self._on_policy_rows(rollouts),
            with_kl=not self.config.algorithm.disable_kl,
            overlong_filter=self.config.algorithm.overlong_filter,
        )

    def _on_policy_rows(self, rollouts: Rollouts) -> Tensor:
        """Returns (B,) True on the rows of the step's first optimizer batch; on none if there are several epochs."""
        actor = self.config.worker.actor
        first = actor.global_batch_size * rollouts.group_size if actor.ppo_epochs == 1 else 0
        return torch.arange(len(rollouts.generations)) < first

    def score(self, plan: ScoringPlan) -> ScoredBatch:
        """Computes log-probs of the planned rows by the student and every teacher, before the update.

        Teachers with the student's live weights are scored in the student's pass, which computes the shared beginning
        of a prompt's contexts once. Other teachers need a separate pass. The critic's values and the reference
        log-probs of a KL are computed here too.
        """
        rollouts, temperature = plan.rollouts, self.config.worker.rollout.temperature
        student, teachers = list(plan.student.values()), [row for view in plan.views for row in view.rows.values()]
        is_live = self.estimator.teacher.source == "actor"
        scored = self._log_probs([*student, *(teachers if is_live else [])])
        self.clock.count_tokens("score", sum(row.num_tokens for row in student))
        old_log_probs = with_scored(rollouts.sampled_log_probs, scored)
        metrics: Metrics = {}
        if temperature != 1.0:
            with self.clock.stage("score"):
                metrics = gap_at_temperature_1(rollouts, self.backend)
        reference, rewards = None, rollouts.token_level_rewards
        if not self.config.algorithm.disable_kl:
            reference, penalties = self._reference(rollouts, student, old_log_probs)
            rewards, measured = penalise(rewards, penalties, rollouts.response_mask, self.config.algorithm, self.state)
            metrics |= measured
        if plan.views:
            scored |= {} if is_live else self._log_probs(teachers, as_teacher=True)
            self.clock.count_tokens("teachers", sum(row.num_tokens for row in teachers))
        return ScoredBatch(
            plan=plan,
            old_log_probs=old_log_probs,
            teacher_log_probs={view.name: with_scored(old_log_probs, scored, view.name) for view in plan.views},
            token_level_rewards=rewards,
            reference_log_probs=reference,
            values=self._values(rollouts) if self.estimator.needs_values else None,
            entropies=self._entropies(plan) if self.config.algorithm.top_entropy < 1 else None,
            metrics=metrics,
        )

    def _log_probs(self, rows: Sequence[ScoringRow], *, as_teacher: bool = False) -> dict[RowName, Tensor]:
        """Scores rows in one pass, and keeps the hidden states of the view from which the update distils."""
        distilled = self.estimator.distilled_view
        keep = distilled if any(row.view == distilled for row in rows) else None
        with self.clock.stage("teachers" if as_teacher else "score"):
            scored = self.backend.score(rows, as_teacher=as_teacher, keep_states=keep) if rows else []
        return {row.name: log_probs for row, log_probs in zip(rows, scored, strict=True)}

    def _reference(
        self, rollouts: Rollouts, rows: Sequence[ScoringRow], old_log_probs: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Returns (B, T) log-probs under the initial weights, and each token's KL; `rows` must be all rows."""
        penalty = self.config.algorithm.kl_penalty
        with self.clock.stage("score"):
            log_probs = rollouts.padded(self.backend.score_reference(rows, keep_states=penalty == "full"))
            if penalty == "full":
                return log_probs, rollouts.padded(self.backend.reference_divergence(rows))
        return log_probs, kl_penalty(old_log_probs, log_probs, penalty)

    def _values(self, rollouts: Rollouts) -> Tensor:
        """Returns (B, T) the critic's value before each token."""
        rows = [rollouts.scoring_row(row) for row in range(len(rollouts.generations))]
        with self.clock.stage("score"):
            return rollouts.padded(self.backend.values(rows))

    def _entropies(self, plan: ScoringPlan) -> Tensor:
        """Returns (B, T) the entropy before each token of live rows, 0 elsewhere."""
        rows = [plan.rollouts.scoring_row(int(row)) for row in plan.live.nonzero()]
        with self.clock.stage("score"):
            found = self.backend.entropies(rows) if rows else []
        result = torch.zeros_like(plan.rollouts.sampled_log_probs)
        return with_scored(result, {row.name: each for row, each in zip(rows, found, strict=True)})

    def estimate(self, batch: ScoredBatch) -> TokenSignal:
        """Computes the learning signal of each token."""
        with self.clock.stage("estimate"):
            signal = self.estimator.signal(batch.token_batch(), step=batch.rollouts.step)
            return restricted(signal, batch.rollouts, batch.plan.live, batch.entropies, self.config.algorithm)

    def update(self, batch: ScoredBatch, signal: TokenSignal) -> Metrics:
        """Updates the critic and, after its warm-up, the actor; then refreshes teachers and rollout weights."""
        actor, longest, step = self.config.worker.actor, self.config.data.max_response_length, batch.rollouts.step
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
                metrics |= self.backend.update_critic(targets, step=step)
            if self.estimator.needs_values and step < self.config.trainer.critic_warmup:
                self.backend.finish_step(step)
                return metrics
            batches = actor_batches(
                batch,
                signal,
                num_prompts=actor.global_batch_size,
                epochs=actor.ppo_epochs,
                max_response_length=longest,
            )
            updated = self.backend.update(batches, step=step)
            skipped = results({name: updated[name] for name in (_SKIPPED,) if name in updated})
            self._skipped_updates.see(step + 1, skipped.get(_SKIPPED, 0.0), len(batches))
            metrics |= updated
            self.backend.finish_step(step)
        with self.clock.stage("sync"):
            self.backend.synchronise_rollout()
        self.clock.count_tokens("update", sum(row.num_tokens for part in batches for row in part.rows))
        return metrics

    def leave_out_update(self, step: int) -> Metrics:
        """Ends the 0-based step without an update."""
        self.backend.forget_work()
        self.backend.finish_step(step)
        self._skipped_updates.see(step + 1, 1, 1, reason="the step has a fault (trainer.on_fault)")
        return {_SKIPPED: sum_value(1.0)}

    def record(self, batch: ScoredBatch, signal: TokenSignal, updated: Metrics) -> None:
        """Writes the step's metrics and some of its rollouts."""
        rollouts, settings = batch.rollouts, self.config.trainer
        parts = [
            rollouts.metrics,
            reward_metrics(rollouts),
            work_metrics(batch, self.config.worker.rollout.temperature),
            answer_metrics(batch, signal, self._asker),
        ]
        parts += [batch.metrics, batch.plan.metrics, signal.metrics, updated, self._faults.metrics, self.clock.drain()]
        parts += [{"faults/restarts": sum_value(self.restarts)}] if self.restarts else []
        values = results(merge_metrics(parts))
        self.tracker.log_metrics(rollouts.step + 1, values)
        if rollouts.step % settings.rollouts_freq == 0:
            views, count = self.estimator.views, settings.rollouts_to_log
            self.tracker.log_rollouts(group_records(batch, signal, self.processing, views, count))
        self._faults.after_update(rollouts.step + 1, values)
        self.callback.after_record(rollouts.step + 1, values)

    def validate(self, done: int) -> None:
        """Validates after `done` steps on the held-out problems; does nothing if this has been done."""
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
        self.callback.after_validate(done, values)

    def save_if_possible(self, done: int) -> None:
        """Saves a checkpoint during training; on failure the run continues and retries after the next step.

        While updates are being skipped nothing is written, so that no earlier good checkpoint is pruned.
        """
        if self._skipped_updates.steps_in_a_row:
            self._is_save_missing = True
            return
        try:
            self.save(done)
            self._is_save_missing = False
        except CheckpointError as error:
            self._is_save_missing = True
            logger.error("%s. The run continues and tries again after the next step", error)

    def save_last(self) -> None:
        """Saves the checkpoint of the last step.

        Raises:
            EngineError: the last steps trained nothing. Their weights were saved where no run resumes from them.
        """
        if self._skipped_updates.steps_in_a_row:
            self._skipped_updates.refuse_as_last(self.checkpoints.save_aside(self.state, self.backend))
        self.save(self.total_steps)

    def save(self, done: int) -> None:
        """Saves a checkpoint after `done` steps."""
        if self._last_saved == done:
            return
        with self.clock.stage("save"), self._unbroken("the checkpoint is written first"):
            score = self._last_val_reward if self._last_validated == done else None
            folder = self.checkpoints.save(self.state, self.backend, val_reward_score=score)
        self._last_saved = done
        logger.info("checkpoint after step %d: %s", done, folder)

    def _unbroken(self, what: str) -> AbstractContextManager[None]:
        return interrupts.postponed(what) if self.config.trainer.save_on_interrupt else nullcontext()


def _due(done: int, every: int) -> bool:
    return every > 0 and done % every == 0
