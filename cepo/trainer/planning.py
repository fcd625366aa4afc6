"""Plans a step's passes: which rows learn, what the teachers read, and which rows the student scores."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from cepo.algorithms import Estimator
from cepo.algorithms.references import wrong_reference, wrong_rollouts
from cepo.algorithms.settings import NegativeConfig
from cepo.config.schema import AlgorithmConfig
from cepo.data.batch import ScoringRow
from cepo.data.contexts import ContextBuilder, sanitise_reference
from cepo.metrics import Metrics, fraction, mean_of, sum_value
from cepo.models.inputs import EncodedPrompt
from cepo.models.processing import Processing
from cepo.rewards.pool import RewardPool
from cepo.trainer.asking import Rollouts
from cepo.types import Reference, Rollout, RolloutGroup, TokenSignal

WITHOUT_IMAGES = "(without images)"
"""Recorded as the reference of a teacher that reads the student's prompt without its images."""


@dataclass(frozen=True, kw_only=True)
class View:
    """What the teachers of one view read.

    Attributes:
        references: the text shown to the teacher of each row; None if it reads the student's own prompt.
        rows: row -> its response after the teacher's context, for live rows with a reference; only these get a pass.
        num_chosen: number of live rows for which the method chose a reference.
        num_empty, num_without_room: how many of these references sanitising emptied, or did not fit into the context.
        num_cut: number of `rows` whose reference was cut, by its cap or to fit into the context.
    """

    name: str
    references: Sequence[str | None]
    rows: Mapping[int, ScoringRow]
    num_chosen: int = 0
    num_empty: int = 0
    num_without_room: int = 0
    num_cut: int = 0

    @property
    def has_reference(self) -> Tensor:
        """(B,) whether the teacher of each row reads a reference."""
        return torch.tensor([text is not None for text in self.references])

    def metrics(self, num_live: int) -> Metrics:
        """Returns the shares of the live rows' references that were used, empty, too long, or cut.

        `_used` is a share of the live rows, `_cut` of the references shown, `_empty` and `_without_room` of the chosen.
        """
        return {
            f"references/{self.name}_used": fraction(len(self.rows), num_live),
            f"references/{self.name}_empty": fraction(self.num_empty, self.num_chosen),
            f"references/{self.name}_without_room": fraction(self.num_without_room, self.num_chosen),
            f"references/{self.name}_cut": fraction(self.num_cut, len(self.rows)),
        }


@dataclass(frozen=True, kw_only=True)
class ScoringPlan:
    """The rows of the rollouts that need each pass.

    Attributes:
        live: (B,) True on rows whose signal can be non-zero; the others get no pass.
        on_policy: (B,) True on rows whose optimizer step starts from the weights that sampled them.
        student: row -> its response after the student's prompt, for rows whose student log-probs are needed.
        views: one per view of the method; empty if this step uses no teacher, as are `answers`.
        answers: the final answer of each row, None where there is none.
    """

    rollouts: Rollouts
    live: Tensor
    on_policy: Tensor
    student: Mapping[int, ScoringRow]
    views: Sequence[View]
    metrics: Metrics
    answers: Sequence[str | None] = ()


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
        live = live & _finished_rows(rollouts)
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
            metrics |= view.metrics(int(live.sum()))
        metrics |= fallback_metrics(groups, estimator.negative)
        metrics["references/responses_without_answer"] = fraction(num_without_answer(groups), len(live))
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
    pairs = list(zip(doubtful.values(), truths, strict=True))
    equal = dict(zip(doubtful, pool.same_statements(pairs), strict=True)) if pairs else {}
    values: dict[int, str] = {}
    if with_values and doubtful:
        values = dict(zip(doubtful, pool.value_keys(list(doubtful.values())), strict=True))

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
    chosen = [estimator.references(group) for group in groups]
    builder = _ReferenceContexts(rollouts, live, contexts)
    references = {name: [one for group in chosen for one in group[name]] for name in estimator.views}
    shown = {
        name: [builder.shown(row, reference) for row, reference in enumerate(of_rows)]
        for name, of_rows in references.items()
    }
    kept = estimator.settled({name: [each.text is not None for each in rows] for name, rows in shown.items()})
    views: list[View] = []
    for name in estimator.views:
        texts = [each.text if is_kept else None for each, is_kept in zip(shown[name], kept[name], strict=True)]
        rows = [row for row, text in enumerate(texts) if text is not None and live[row]]
        asked = [shown[name][row] for row, reference in enumerate(references[name]) if reference and live[row]]
        views.append(
            View(
                name=name,
                references=texts,
                rows={row: rollouts.scoring_row(row, shown[name][row].context, view=name) for row in rows},
                num_chosen=len(asked),
                num_empty=sum(each.is_empty for each in asked),
                num_without_room=sum(each.is_without_room for each in asked),
                num_cut=sum(shown[name][row].is_cut for row in rows),
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
    has_reference = torch.zeros(len(live), dtype=torch.bool)
    lacks_reference = has_reference.clone()
    for view in views:
        has_reference |= view.has_reference
        lacks_reference |= ~view.has_reference
    read = has_reference & lacks_reference
    if estimator.reads_old_log_probs:
        read |= has_reference if estimator.views else True
    needed = live if every else live & (read | ~on_policy)
    return [row for row, is_needed in enumerate(needed) if is_needed]


def num_without_answer(groups: Sequence[RolloutGroup]) -> int:
    return sum(rollout.answer is None for group in groups for rollout in group.rollouts)


def fallback_metrics(groups: Sequence[RolloutGroup], negative: NegativeConfig) -> Metrics:
    """Returns the shares of groups without a wrong rollout, and of groups whose wrong rollouts yield no reference."""
    wrong = [group for group in groups if wrong_rollouts(group)]
    unextractable = [group for group in wrong if wrong_reference(group, negative) is None]
    return {
        "references/groups_without_wrong": fraction(len(groups) - len(wrong), len(groups)),
        "references/groups_wrong_unextractable": fraction(len(unextractable), len(groups)),
    }


@dataclass(frozen=True, kw_only=True)
class _ShownReference:
    """A row's reference as shown to its teacher; `text` is None if none is shown."""

    text: str | None = None
    context: EncodedPrompt | None = None
    is_empty: bool = False
    is_without_room: bool = False
    is_cut: bool = False


class _ReferenceContexts:
    """Builds reference texts, and teacher contexts for live rows, once for all rollouts that share them."""

    def __init__(self, rollouts: Rollouts, live: Tensor, contexts: ContextBuilder) -> None:
        self._rollouts, self._live, self._contexts = rollouts, live, contexts
        self._built, self._fitted = cache(self._build), cache(self._fit)

    def shown(self, row: int, reference: Reference | None) -> _ShownReference:
        if reference is None:
            return _ShownReference()
        return self._built(row // self._rollouts.group_size, reference, is_live=bool(self._live[row]))

    def _build(self, prompt: int, reference: Reference, *, is_live: bool) -> _ShownReference:
        rollouts, contexts = self._rollouts, self._contexts
        if reference.blind:
            if rollouts.prompts[prompt].images is None:
                return _ShownReference()
            context = contexts.blind(rollouts.problems[prompt]) if is_live else None
            return _ShownReference(text=WITHOUT_IMAGES, context=context)
        text = contexts.reference_text(reference)
        if not text:
            return _ShownReference(is_empty=True)
        is_cut = text != contexts.whole_text(reference)
        if not is_live:
            return _ShownReference(text=text, is_cut=is_cut)
        fitted = self._fitted(prompt, text, is_answer=reference.is_answer)
        if fitted is None:
            return _ShownReference(is_without_room=True)
        context, shown = fitted
        return _ShownReference(text=shown, context=context, is_cut=is_cut or shown != text)

    def _fit(self, prompt: int, text: str, *, is_answer: bool) -> tuple[EncodedPrompt, str] | None:
        """Fits a text into a context. References with the same text share one, so that passes compute it once."""
        rollouts = self._rollouts
        return self._contexts.fitted(rollouts.problems[prompt], rollouts.prompts[prompt], text, is_answer=is_answer)


def _finished_rows(rollouts: Rollouts) -> Tensor:
    return torch.tensor([generation.finished for generation in rollouts.generations])


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
    metrics: Metrics = {}
    if algorithm.overlong_filter:
        kept = kept & _finished_rows(rollouts).unsqueeze(1)
    if entropies is not None:
        learning = kept & live.unsqueeze(1)
        found = entropies[learning]
        if len(found):
            first = len(found) - max(1, round(algorithm.top_entropy * len(found)))
            kept = kept & (entropies >= found.sort().values[first])
        metrics = {
            "rollout/vocabulary_entropy": mean_of(entropies, learning),
            "rollout/learning_tokens": mean_of(kept.float(), learning),
        }
    distillation = signal.distillation
    if distillation is not None:
        distillation = dataclasses.replace(distillation, token_weight=distillation.token_weight.where(kept, 0.0))
    return dataclasses.replace(
        signal,
        advantages=signal.advantages.where(kept, 0.0),
        metrics={**signal.metrics, **metrics},
        distillation=distillation,
    )
