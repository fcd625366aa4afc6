"""Plans a step's passes: which rows learn, what teachers read, which rows are scored, and in which batches they are trained."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor

from cepo.algorithms import Estimator
from cepo.algorithms.references import wrong_reference, wrong_rollouts
from cepo.algorithms.settings import NegativeConfig
from cepo.config.schema import AlgorithmConfig
from cepo.data.batch import OWN_VIEW, CriticBatch, OptimizerBatch, RowName, ScoringRow
from cepo.data.contexts import ContextBuilder, sanitise_reference
from cepo.losses.aggregation import LossDenominators
from cepo.metrics import Metric, Metrics, fraction, mean_of, sum_value
from cepo.models.inputs import EncodedPrompt
from cepo.models.processing import Processing
from cepo.rewards.pool import RewardPool
from cepo.trainer.asking import Rollouts
from cepo.types import Reference, Rollout, RolloutGroup, TokenBatch, TokenSignal

WITHOUT_IMAGES = "(without images)"
"""Recorded as the reference of a teacher that reads the student's prompt without its images."""


@dataclass(frozen=True, kw_only=True)
class View:
    """What the teachers of one view read.

    In `metrics`, `_empty` and `_without_room` are shares of the references chosen for live rows: those that sanitising
    emptied, or that did not fit into the context. `_cut` is the share of `rows` whose reference was cut.
    """

    name: str
    references: Sequence[str | None]  # the text shown to each row's teacher; None if it reads the student's own prompt
    rows: Mapping[int, ScoringRow]  # responses after the teacher's context, by row: live ones with a reference
    metrics: Metrics = field(default_factory=dict[str, Metric])

    @property
    def has_reference(self) -> Tensor:
        """(B,) whether the teacher of each row reads a reference."""
        return torch.tensor([text is not None for text in self.references])


@dataclass(frozen=True, kw_only=True)
class ScoringPlan:
    """The rows of the rollouts that need each pass. Without a teacher in this step, `views` and `answers` are empty."""

    rollouts: Rollouts
    live: Tensor  # (B,) True on rows whose signal can be non-zero; the others get no pass
    on_policy: Tensor  # (B,) True on rows whose optimizer step starts from the weights that sampled them
    student: Mapping[int, ScoringRow]  # responses after the student's prompt, by row: those that the student must score
    views: Sequence[View]
    metrics: Metrics
    answers: Sequence[str | None] = ()  # the final answer of each row, None where there is none


def make_plan(
    rollouts: Rollouts,
    groups: Sequence[RolloutGroup],
    estimator: Estimator,
    contexts: ContextBuilder,
    *,
    on_policy: Tensor,
    with_kl: bool,
    overlong_filter: bool = False,
) -> ScoringPlan:
    """Plans a step. The teachers' references come from `groups`; without groups no teacher is used.

    With `overlong_filter`, truncated rows have no signal. With a KL penalty (`with_kl`), every row has one.
    """
    live = estimator.live_rows(rollouts.rewards, rollouts.group_ids)
    if overlong_filter:
        live = live & rollouts.finished
    live = live | with_kl
    views: list[View] = []
    if groups:
        views = plan_views(rollouts, live, groups, estimator, contexts)
        live = estimator.learning_rows(live, {view.name: view.has_reference for view in views}) | with_kl
    needed = student_rows(live, on_policy, estimator, views, every=with_kl)
    metrics: Metrics = {}
    if estimator.views:
        metrics["work/teacher_rows"] = sum_value(sum(len(view.rows) for view in views))
    if groups:
        for view in views:
            metrics[f"references/{view.name}_used"] = fraction(len(view.rows), int(live.sum()))
            metrics |= view.metrics
        metrics |= reference_metrics(groups, estimator.negative)
    return ScoringPlan(
        rollouts=rollouts,
        live=live,
        on_policy=on_policy,
        student={row: rollouts.scoring_row(row) for row in needed},
        views=views,
        metrics=metrics,
        answers=[rollout.answer for group in groups for rollout in group.rollouts],
    )


def rollout_groups(
    rollouts: Rollouts, pool: RewardPool, processing: Processing, *, seed: int, with_values: bool = False
) -> list[RolloutGroup]:
    """Returns the rollouts' groups with their final answers, from which methods choose references.

    The grader compares answers of wrong responses with the ground truth: a rounding of the truth, for example, must not
    be shown to a teacher as wrong. Answers are sanitised here, so that one that becomes empty is no candidate. With
    `with_values`, wrong answers get the value by which `negative.select=most_frequent` counts them.
    """
    extracted = pool.extracted_answers(rollouts.responses)
    answers = [sanitise_reference(answer or "", processing.special_texts) or None for answer in extracted]
    doubtful = {row: answer for row, answer in enumerate(answers) if answer is not None and not rollouts.correct[row]}
    truths = [rollouts.problems[row // rollouts.group_size].ground_truth for row in doubtful]
    equal = dict(zip(doubtful, pool.same_statements([*zip(doubtful.values(), truths, strict=True)]), strict=True))
    values = dict(zip(doubtful, pool.value_keys([*doubtful.values()]), strict=True)) if with_values else {}

    def candidate(index: int, row: int) -> Rollout:
        response = rollouts.generations[row].response_ids
        return Rollout(
            index=index,
            reward=float(rollouts.rewards[row]),
            correct=bool(rollouts.correct[row]),
            response_ids=tuple(token for token in response if token not in processing.eos_token_ids),
            answer=answers[row],
            answer_equals_ground_truth=equal.get(row, bool(rollouts.correct[row])),
            answer_value=values.get(row),
        )

    return [
        RolloutGroup(
            prompt_id=problem.prompt_id,
            ground_truth=problem.ground_truth,
            rollouts=[candidate(index, row) for index, row in enumerate(rollouts.rows_of(number))],
            seed=seed,
            step=rollouts.step,
            solution=problem.solution,
        )
        for number, problem in enumerate(rollouts.problems)
    ]


def plan_views(
    rollouts: Rollouts, live: Tensor, groups: Sequence[RolloutGroup], estimator: Estimator, contexts: ContextBuilder
) -> list[View]:
    """Builds the teacher rows of each view from those of the method's references that can be shown."""
    by_group = [estimator.references(group) for group in groups]
    build = _builder(rollouts, live, contexts)
    references = {name: [one for group in by_group for one in group[name]] for name in estimator.views}
    shown = {name: [*map(build, range(len(of_rows)), of_rows)] for name, of_rows in references.items()}
    kept = estimator.settled({name: [each.text is not None for each in rows] for name, rows in shown.items()})
    views: list[View] = []
    for name in estimator.views:
        texts = [each.text if is_kept else None for each, is_kept in zip(shown[name], kept[name], strict=True)]
        rows = [row for row, text in enumerate(texts) if text is not None and live[row]]
        fates = Counter(shown[name][row].fate for row, given in enumerate(references[name]) if given and live[row])
        views.append(
            View(
                name=name,
                references=texts,
                rows={row: rollouts.scoring_row(row, shown[name][row].context, view=name) for row in rows},
                metrics={
                    f"references/{name}_empty": fraction(fates["empty"], fates.total()),
                    f"references/{name}_without_room": fraction(fates["without_room"], fates.total()),
                    f"references/{name}_cut": fraction(sum(shown[name][row].fate == "cut" for row in rows), len(rows)),
                },
            )
        )
    return views


def student_rows(
    live: Tensor, on_policy: Tensor, estimator: Estimator, views: Sequence[View], *, every: bool
) -> list[int]:
    """Returns the live rows that the student must score; with `every` these are all live rows.

    On-policy rows get their old log-probs from the update itself. They need a scoring pass only if the method's signal
    reads old log-probs, or if one view of the row has a reference and another has none, so that its teacher is the
    student.
    """
    shown = torch.stack([view.has_reference for view in views] or [torch.zeros(len(live), dtype=torch.bool)])
    read = shown.any(dim=0) & ~shown.all(dim=0)
    if estimator.reads_old_log_probs:
        read |= shown.any(dim=0) if estimator.views else True
    needed = live if every else live & (read | ~on_policy)
    return [row for row, is_needed in enumerate(needed) if is_needed]


def reference_metrics(groups: Sequence[RolloutGroup], negative: NegativeConfig) -> Metrics:
    """Returns the shares of responses without answer, and of groups without wrong rollouts or a reference from them."""
    answers = [rollout.answer for group in groups for rollout in group.rollouts]
    wrong = [group for group in groups if wrong_rollouts(group)]
    unextractable = [group for group in wrong if wrong_reference(group, negative) is None]
    return {
        "references/responses_without_answer": fraction(answers.count(None), len(answers)),
        "references/groups_without_wrong": fraction(len(groups) - len(wrong), len(groups)),
        "references/groups_wrong_unextractable": fraction(len(unextractable), len(groups)),
    }


@dataclass(frozen=True, kw_only=True)
class _ShownReference:
    text: str | None = None
    context: EncodedPrompt | None = None
    fate: Literal["whole", "cut", "empty", "without_room"] = "whole"


def _builder(
    rollouts: Rollouts, live: Tensor, contexts: ContextBuilder
) -> Callable[[int, Reference | None], _ShownReference]:
    """Returns a function of a row and its reference, which builds text and context once for all rollouts that share them."""

    @cache  # references with the same text share a context, so that passes compute it once
    def fitted(prompt: int, text: str, is_answer: bool) -> tuple[EncodedPrompt, str] | None:
        return contexts.fitted(rollouts.problems[prompt], rollouts.prompts[prompt], text, is_answer=is_answer)

    @cache
    def built(prompt: int, reference: Reference | None, is_live: bool) -> _ShownReference:
        if reference is None or (reference.blind and rollouts.prompts[prompt].images is None):
            return _ShownReference()
        if reference.blind:
            context = contexts.blind(rollouts.problems[prompt]) if is_live else None
            return _ShownReference(text=WITHOUT_IMAGES, context=context)
        text, context = contexts.reference_text(reference), None
        if not text:
            return _ShownReference(fate="empty")
        if is_live:
            found = fitted(prompt, text, reference.is_answer)
            if found is None:
                return _ShownReference(fate="without_room")
            context, text = found
        is_cut = text != contexts.whole_text(reference)
        return _ShownReference(text=text, context=context, fate="cut" if is_cut else "whole")

    return lambda row, reference: built(row // rollouts.group_size, reference, bool(live[row]))


@dataclass(frozen=True, kw_only=True)
class ScoredBatch(TokenBatch):
    """What the estimator reads of a step, and what the update needs beside it.

    The student's log-probs of rows that were not scored are the rollout engine's. A KL in the reward is subtracted from
    `token_level_rewards`.
    """

    plan: ScoringPlan
    reference_log_probs: Tensor | None = None  # (B, T) under the initial weights; None without a KL
    entropies: Tensor | None = None  # (B, T) in nats, of the student before each token of live rows; None if not needed
    metrics: Metrics = field(default_factory=dict[str, Metric])  # agreement with the engine's log-probs, and the KL

    @property
    def rollouts(self) -> Rollouts:
        return self.plan.rollouts


def scored_batch(plan: ScoringPlan, scored: Mapping[RowName, Tensor], **fields: Any) -> ScoredBatch:
    """Returns the batch of a plan whose rows got these log-probs, (response length,); `fields` replaces or adds some."""
    rollouts = plan.rollouts
    old_log_probs = with_scored(rollouts.sampled_log_probs, scored)
    common: dict[str, Any] = {
        "token_level_rewards": rollouts.token_level_rewards,
        "response_mask": rollouts.response_mask,
        "old_log_probs": old_log_probs,
        "group_ids": rollouts.group_ids,
        "teacher_log_probs": {view.name: with_scored(old_log_probs, scored, view.name) for view in plan.views},
        "correct": rollouts.correct,
        "has_reference": {view.name: view.has_reference for view in plan.views},
        "reward_baselines": rollouts.reward_baselines,
    }
    return ScoredBatch(plan=plan, **common | fields)


def with_scored(log_probs: Tensor, scored: Mapping[RowName, Tensor], view: str = OWN_VIEW) -> Tensor:
    """Returns (B, T) `log_probs`, with those of the scored rows, (response length,), in place of the view's."""
    result = log_probs.clone()
    for (name, row), values in scored.items():
        if name == view and row is not None:
            result[row, : len(values)] = values
    return result


def restricted(
    signal: TokenSignal, rollouts: Rollouts, live: Tensor, entropies: Tensor | None, algorithm: AlgorithmConfig
) -> TokenSignal:
    """Removes from the signal the tokens that `algorithm.overlong_filter` and `algorithm.top_entropy` exclude.

    `top_entropy` is the share to keep of the tokens of `live` rows, (B,): those drawn from the distributions with the
    highest of the `entropies`, (B, T) in nats. Ties at the threshold are kept. Denominators of the loss still count all
    tokens. Sources: DAPO (Yu et al. 2025) for cut responses; Wang et al. 2025 (arXiv 2506.01939) for entropy, who
    average over kept tokens alone.
    """
    kept = rollouts.response_mask
    metrics = dict(signal.metrics)
    if algorithm.overlong_filter:
        kept = kept & rollouts.finished.unsqueeze(1)
    if entropies is not None:
        learning = kept & live.unsqueeze(1)
        found = entropies[learning]
        if len(found):
            first = len(found) - max(1, round(algorithm.top_entropy * len(found)))
            kept = kept & (entropies >= found.sort().values[first])
        metrics["rollout/vocabulary_entropy"] = mean_of(entropies, learning)
        metrics["rollout/learning_tokens"] = mean_of(kept.float(), learning)
    distillation = signal.distillation
    if distillation is not None:
        distillation = dataclasses.replace(distillation, token_weight=distillation.token_weight.where(kept, 0.0))
    advantages = signal.advantages.where(kept, 0.0)
    return dataclasses.replace(signal, advantages=advantages, metrics=metrics, distillation=distillation)


def actor_batches(
    batch: ScoredBatch, signal: TokenSignal, *, num_prompts: int, max_response_length: int
) -> list[OptimizerBatch]:
    """Returns an epoch's batches of `num_prompts` prompts: live rows, but denominators of all rows."""
    rollouts, plan, distillation = batch.rollouts, batch.plan, signal.distillation
    reference = batch.reference_log_probs
    parts: list[OptimizerBatch] = []
    for rows, denominators in _cuts(rollouts, num_prompts, max_response_length):
        live = rows[plan.live[rows]]
        on_policy = bool(plan.on_policy[rows].all())
        distilled = distillation and dataclasses.replace(distillation, token_weight=distillation.token_weight[live])
        parts.append(
            OptimizerBatch(
                rows=[rollouts.scoring_row(int(row)) for row in live],
                old_log_probs=(rollouts.sampled_log_probs if on_policy else batch.old_log_probs)[live],
                on_policy=on_policy,
                advantages=signal.advantages[live],
                response_mask=rollouts.response_mask[live],
                denominators=denominators,
                sampled_log_probs=None if on_policy else rollouts.sampled_log_probs[live],
                reference_log_probs=None if reference is None else reference[live],
                distillation=distilled,
            )
        )
    return parts


def critic_batches(
    batch: ScoredBatch, signal: TokenSignal, *, num_prompts: int, max_response_length: int
) -> list[CriticBatch]:
    """Returns the critic's batches, split like `actor_batches` but with all rows, since each has a target."""
    assert batch.values is not None and signal.returns is not None, "a method with needs_values returns the targets"
    return [
        CriticBatch(
            rows=[batch.rollouts.scoring_row(int(row)) for row in rows],
            old_values=batch.values[rows],
            returns=signal.returns[rows],
            response_mask=batch.rollouts.response_mask[rows],
            denominators=denominators,
        )
        for rows, denominators in _cuts(batch.rollouts, num_prompts, max_response_length)
    ]


def _cuts(rollouts: Rollouts, num_prompts: int, max_response_length: int) -> Iterator[tuple[Tensor, LossDenominators]]:
    for rows in torch.split(torch.arange(len(rollouts.generations)), num_prompts * rollouts.group_size):
        num_tokens = int(rollouts.response_mask[rows].sum())
        yield rows, LossDenominators(num_tokens, len(rows), max_response_length)
