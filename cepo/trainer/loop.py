"""Implements the training step: sample, plan, score, estimate, update, record."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from cepo.algorithms import Estimator
from cepo.config.schema import AlgorithmConfig, DataConfig, TrainerConfig
from cepo.config.worker_schema import WorkerConfig
from cepo.data.batch import Kept, RowName, ScoringRow
from cepo.data.prompts import ContextBuilder, Problem
from cepo.data.read_ahead import ProblemReader, problems_and_prompts
from cepo.data.training_set import TrainingProblems
from cepo.losses.kl import kl_penalty
from cepo.metrics import Metrics, merge_metrics, results, sum_value
from cepo.models.interface import EncodedPrompt
from cepo.models.processing import Processing
from cepo.rollout.generator import Sampler
from cepo.run_folder.sinks.tracker import Tracker
from cepo.terminal.progress import phase
from cepo.trainer.batches import ScoredBatch, actor_batches, critic_batches, restricted, scored_batch, with_scored
from cepo.trainer.callbacks import Callback
from cepo.trainer.checkpoints import TrainerState
from cepo.trainer.filtering import sample_until_enough
from cepo.trainer.penalty import gap_at_temperature_1, penalise
from cepo.trainer.planning import ScoringPlan, make_plan
from cepo.trainer.protocol import Backend
from cepo.trainer.recording import group_records, reward_metrics, work_metrics
from cepo.trainer.rollout_groups import rollout_groups
from cepo.trainer.rollouts import Rollouts
from cepo.trainer.run_policy import RunPolicy
from cepo.trainer.sampling import RolloutSampler, training_settings
from cepo.trainer.stage_clock import StageClock
from cepo.trainer.validation import Validator
from cepo.types import RolloutGroup, TokenSignal

logger = logging.getLogger(__name__)

_SKIPPED = "actor/skipped_updates"


@dataclass(kw_only=True)
class Trainer:
    """Trains one run. Steps are 0-based in the code and 1-based in all output: step k is recorded after its update."""

    data: DataConfig
    algorithm: AlgorithmConfig
    worker: WorkerConfig
    settings: TrainerConfig
    problems: TrainingProblems
    processing: Processing
    estimator: Estimator
    contexts: ContextBuilder
    backend: Backend
    sampler: RolloutSampler
    tracker: Tracker
    policy: RunPolicy
    validator: Validator | None
    total_steps: int
    callback: Callback = field(default_factory=Callback)

    def __post_init__(self) -> None:
        self.clock = StageClock()
        self._reader = ProblemReader(self.problems, self.contexts, self._problems_per_round)
        self._sampling = training_settings(self.worker.rollout, self.data.max_response_length)
        self._updates_every_row = self.worker.actor.entropy_coef != 0
        self._first_step = self.state.step
        self._last_validation: tuple[int, float | None] = (-1, None)

    @property
    def state(self) -> TrainerState:
        return self.policy.state

    @property
    def _problems_per_round(self) -> int:
        filtered = self.data.mini_rollout_batch_size if self.algorithm.online_filtering else None
        return filtered or self.data.rollout_batch_size

    @property
    def _starts_with_validation(self) -> bool:
        """Whether step 0 is validated, or the checkpoint's step is due and was not: the run was stopped before it."""
        checkpoint = self.policy.checkpoint
        if checkpoint is None:
            return self.settings.val_before_train
        is_due = self.settings.val_freq > 0 and self._first_step % self.settings.val_freq == 0
        return is_due and not self.policy.store.is_validated(checkpoint)

    def fit(self) -> None:
        """Trains from `state.step` to `total_steps`, with validations and checkpoints at set steps and at the end."""
        with phase("handing the weights to the rollout engine"):
            self.backend.synchronise_rollout()
        if self.settings.val_only or self._starts_with_validation:
            self.validate()
        if self.settings.val_only:
            return
        try:
            self._train()
        except KeyboardInterrupt:
            if self.policy.saves_interruption:
                self.save()
            raise
        finally:
            self._reader.close()

    def _train(self) -> None:
        settings = self.settings
        for step in range(self._first_step, self.total_steps):
            with self.policy.step():
                self.train_step(step)
            if settings.val_freq > 0 and self.state.step % settings.val_freq == 0:
                self.validate()
            self.policy.health.require_updates()
            if self.policy.is_save_due and self.state.step < self.total_steps:
                self.save()
        if self.total_steps > 0:
            if settings.validates_at_the_end:
                self.validate()
            self.save(is_last=True)

    def train_step(self, step: int) -> None:
        with self.clock.stage("step"):
            rollouts = self.sample(step)
            self.callback.after_sample(rollouts)
            plan = self.plan(rollouts)
            self.callback.after_plan(plan)
            batch = self.score(plan)
            self.callback.after_score(batch)
            signal = self.estimate(batch)
            self.callback.after_estimate(batch, signal)
            may_update = self.policy.health.may_update(batch, signal)
            updated = self.update(batch, signal) if may_update else self.leave_out_update(step)
            self.callback.after_update(batch, signal)
        self.state.step = step + 1
        self.record(batch, signal, updated)

    def sample(self, step: int) -> Rollouts:
        """Samples and rewards responses to `rollout_batch_size` problems, in several rounds with online filtering."""
        algorithm = self.algorithm

        def next_round(attempt: int) -> Rollouts:
            with self.clock.stage("read"):
                problems, prompts = problems_and_prompts(self._reader.round(self.state.rounds))
            self.state.rounds += 1
            if step + 1 < self.total_steps or algorithm.online_filtering:
                self._reader.read_ahead(self.state.rounds)
            return self.sample_problems(problems, self.backend, step=step, attempt=attempt, prompts=prompts)

        if algorithm.online_filtering:
            rollouts = sample_until_enough(
                next_round,
                algorithm,
                num_groups=self.data.rollout_batch_size,
                max_rounds=self.settings.max_try_make_batch,
                rounds_per_pass=-(-len(self.problems) // self._problems_per_round),
            )
        else:
            rollouts = next_round(0)
        return self.with_baselines(rollouts, self.backend)

    def sample_problems(
        self,
        problems: Sequence[Problem],
        sampler: Sampler,
        *,
        step: int,
        attempt: int = 0,
        prompts: Sequence[EncodedPrompt] | None = None,
    ) -> Rollouts:
        """Samples and rewards responses to `problems` with the settings of training; encodes `prompts` unless given."""
        return self.sampler.sample(
            problems, sampler, self._sampling, step=step, attempt=attempt, prompts=prompts, clock=self.clock
        )

    def with_baselines(self, rollouts: Rollouts, sampler: Sampler) -> Rollouts:
        """Adds the reward of a greedy response to each prompt, if the method reads it."""
        if "reward_baselines" not in self.estimator.reads:
            return rollouts
        return self.sampler.with_baselines(rollouts, sampler, self._sampling, self.clock)

    def plan(self, rollouts: Rollouts, *, every_row: bool = False) -> ScoringPlan:
        """Decides which rows learn, what their teachers read, and which rows the student must score.

        With `every_row`, the student and all teachers score every row, also in a step that would need no teacher.
        """
        groups: list[RolloutGroup] = []
        if every_row or self.estimator.needs_teacher(step=rollouts.step):
            groups = rollout_groups(
                rollouts,
                self.sampler.rewards,
                self.processing,
                seed=self.settings.seed,
                with_values=self.estimator.negative.counts_by_value,
            )
        on_policy = self._on_policy_rows(rollouts)
        plan = make_plan(
            rollouts,
            groups,
            self.estimator,
            self.contexts,
            on_policy=torch.zeros_like(on_policy) if every_row else on_policy,
            every_row=every_row or not self.algorithm.disable_kl,
            updates_every_row=self._updates_every_row,
            overlong_filter=self.algorithm.overlong_filter,
        )
        if groups and "peer_answer" in self.estimator.reference_sources:
            self.policy.health.count_missing_answers(plan.metrics["references/responses_without_answer"])
        return plan

    def _on_policy_rows(self, rollouts: Rollouts) -> Tensor:
        """Returns (B,) True on the rows of the step's first optimizer batch; on none if there are several epochs."""
        actor = self.worker.actor
        num_on_policy = 0
        if actor.ppo_epochs == 1:
            num_on_policy = actor.global_batch_size * rollouts.group_size
        return torch.arange(len(rollouts.generations)) < num_on_policy

    def score(self, plan: ScoringPlan) -> ScoredBatch:
        """Computes log-probs of the planned rows by the student and every teacher, before the update.

        Teachers with the student's live weights are scored in the student's pass, which computes the shared beginning
        of a prompt's contexts once. Other teachers need a separate pass.
        """
        rollouts = plan.rollouts
        student_rows = list(plan.student.values())
        teacher_rows: list[ScoringRow] = []
        for view in plan.views:
            teacher_rows += view.rows.values()
        shares_weights = self.estimator.teacher.is_actor
        metrics: Metrics = {}
        rewards: Tensor | None = None  # here and below (B, T); None for what this run does not compute
        reference_log_probs: Tensor | None = None
        values: Tensor | None = None
        entropies: Tensor | None = None
        with self.clock.stage("score"):
            first_rows = student_rows + teacher_rows if shares_weights else student_rows
            scored = self._log_probs(first_rows, self.backend.score)
            if self.worker.rollout.temperature != 1.0:
                metrics = gap_at_temperature_1(rollouts, self.backend)
            if not self.algorithm.disable_kl:
                reference_log_probs, penalties = self._reference(rollouts, student_rows, scored)
                rewards, penalty_metrics = penalise(
                    rollouts.token_level_rewards, penalties, rollouts.response_mask, self.algorithm, self.state
                )
                metrics |= penalty_metrics
            if "values" in self.estimator.reads:
                all_rows = [rollouts.scoring_row(row) for row in range(len(rollouts.generations))]
                values = rollouts.padded(self.backend.values(all_rows))
            if self.algorithm.top_entropy < 1:
                entropies = self._entropies(plan)
        self.clock.count_tokens("score", sum(row.num_tokens for row in student_rows))
        if plan.views:
            if not shares_weights:
                with self.clock.stage("teachers"):
                    scored |= self._log_probs(teacher_rows, self.backend.score_teacher)
            self.clock.count_tokens("teachers", sum(row.num_tokens for row in teacher_rows))
        return scored_batch(
            plan,
            scored,
            token_level_rewards=rewards,
            reference_log_probs=reference_log_probs,
            values=values,
            entropies=entropies,
            metrics=metrics,
        )

    def _log_probs(self, rows: Sequence[ScoringRow], score: Callable[..., list[Tensor]]) -> dict[RowName, Tensor]:
        """Scores rows in one pass, and keeps the hidden states of the view from which the update distils."""
        if not rows:
            return {}
        keep: Kept | None = None
        distilled_view = self.estimator.distilled_view
        if distilled_view is not None and any(row.view == distilled_view for row in rows):
            keep = Kept(distilled_view, with_entropies=self.estimator.reads_teacher_entropies)
        log_probs = score(rows, keep=keep)
        names = [row.name for row in rows]
        return dict(zip(names, log_probs, strict=True))

    def _reference(
        self, rollouts: Rollouts, rows: Sequence[ScoringRow], scored: Mapping[RowName, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Returns (B, T) log-probs under the initial weights, and each token's KL; `rows` must be all rows."""
        log_probs = rollouts.padded(self.backend.score_initial(rows))
        students_log_probs = with_scored(rollouts.sampled_log_probs, scored)
        return log_probs, kl_penalty(students_log_probs, log_probs, self.algorithm.kl_penalty)

    def _entropies(self, plan: ScoringPlan) -> Tensor:
        """Returns (B, T) the entropy before each token of live rows, 0 elsewhere."""
        zeros = torch.zeros_like(plan.rollouts.sampled_log_probs)
        rows = [plan.rollouts.scoring_row(int(row)) for row in plan.live.nonzero()]
        if not rows:
            return zeros
        entropies = self.backend.entropies(rows)
        names = [row.name for row in rows]
        return with_scored(zeros, dict(zip(names, entropies, strict=True)))

    def estimate(self, batch: ScoredBatch) -> TokenSignal:
        with self.clock.stage("estimate"):
            signal = self.estimator.checked_signal(batch, step=batch.rollouts.step)
            return restricted(signal, batch.rollouts, batch.plan.live, batch.entropies, self.algorithm)

    def update(self, batch: ScoredBatch, signal: TokenSignal) -> Metrics:
        """Updates the critic and, after its warm-up, the actor; then refreshes teachers and rollout weights."""
        actor = self.worker.actor
        step = batch.rollouts.step
        metrics: Metrics = {}
        with self.clock.stage("update"):
            if "values" in self.estimator.reads:
                metrics |= self._update_critic(batch, signal)
                if step < self.settings.critic_warmup:
                    self.backend.finish_step(step)
                    return metrics
            batches = actor_batches(
                batch,
                signal,
                num_prompts=actor.global_batch_size,
                max_response_length=self.data.max_response_length,
            )
            batches_of_epochs = batches * actor.ppo_epochs
            metrics |= self.backend.update(batches_of_epochs, step=step)
            num_skipped = results(metrics).get(_SKIPPED, 0.0)
            self.policy.health.count_skipped(step + 1, num_skipped, len(batches_of_epochs))
            self.backend.finish_step(step)
        with self.clock.stage("sync"):
            self.backend.synchronise_rollout()
        for optimizer_batch in batches_of_epochs:
            self.clock.count_tokens("update", sum(row.num_tokens for row in optimizer_batch.rows))
        return metrics

    def _update_critic(self, batch: ScoredBatch, signal: TokenSignal) -> Metrics:
        critic = self.worker.resolved_critic
        batches = critic_batches(
            batch,
            signal,
            num_prompts=critic.global_batch_size or self.worker.actor.global_batch_size,
            max_response_length=self.data.max_response_length,
        )
        return self.backend.update_critic(batches * critic.ppo_epochs, step=batch.rollouts.step)

    def leave_out_update(self, step: int) -> Metrics:
        """Ends the 0-based step without an update."""
        self.backend.forget_work()
        self.backend.finish_step(step)
        self.policy.health.count_skipped(step + 1, 1, 1, why="the step has a fault (trainer.on_fault)")
        return {_SKIPPED: sum_value(1.0)}

    def record(self, batch: ScoredBatch, signal: TokenSignal, updated: Metrics) -> None:
        """Writes the step's metrics and some of its rollouts."""
        rollouts = batch.rollouts
        parts = [
            rollouts.metrics,
            reward_metrics(rollouts),
            work_metrics(batch, self.worker.rollout.temperature),
            batch.metrics,
            batch.plan.metrics,
            signal.metrics,
            updated,
            self.policy.metrics,
            self.clock.drain(),
        ]
        values = results(merge_metrics(parts))
        self.tracker.log_metrics(rollouts.step + 1, values)
        if rollouts.step % self.settings.rollouts_freq == 0:
            views = self.estimator.views
            records = group_records(batch, signal, self.processing, views, self.settings.rollouts_to_log)
            self.tracker.log_rollouts(records)
        self.policy.health.require_sound(rollouts.step + 1, values)
        self.callback.after_record(rollouts.step + 1, values)

    def validate(self) -> None:
        """Validates the current weights on the held-out problems; does nothing if this has been done."""
        num_steps = self.state.step
        last_validated, _ = self._last_validation
        if self.validator is None or last_validated == num_steps:
            return
        logger.info("validation after step %d: %d responses", num_steps, self.validator.num_responses)
        with self.clock.stage("validate"):
            metrics, rows = self.validator.run(self.backend)
            self.backend.forget_work()
        values = results(merge_metrics([metrics, self.clock.drain()]))
        self._last_validation = (num_steps, values.get("val/reward"))
        self.tracker.log_metrics(num_steps, values)
        self.tracker.log_generations(num_steps, rows)
        self.callback.after_validate(num_steps, values)

    def save(self, *, is_last: bool = False) -> None:
        """Saves a checkpoint of the current step; see `RunPolicy.save`."""
        last_validated, reward = self._last_validation
        score = reward if last_validated == self.state.step else None
        with self.clock.stage("save"):
            self.policy.save(self.backend, val_reward_score=score, is_last=is_last)
