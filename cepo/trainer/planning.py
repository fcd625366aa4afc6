"""Plans a step's passes: which rows learn, what teachers read, and which rows are scored."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Literal

import torch
from torch import Tensor

from cepo.algorithms import Estimator
from cepo.data.batch import ScoringRow
from cepo.data.contexts import ContextBuilder
from cepo.metrics import Metric, Metrics, fraction, sum_value
from cepo.models.inputs import EncodedPrompt
from cepo.trainer.groups import reference_metrics
from cepo.trainer.rollouts import Rollouts
from cepo.types import Reference, RolloutGroup

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
