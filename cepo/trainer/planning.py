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
from cepo.algorithms.teacher_contexts import possible_rows, teacher_contexts_of
from cepo.data.batch import ScoringRow
from cepo.data.prompts import ContextBuilder, mask_for
from cepo.metrics import Metric, Metrics, fraction, sum_value
from cepo.models.interface import EncodedPrompt
from cepo.trainer.rollout_groups import reference_metrics
from cepo.trainer.rollouts import Rollouts
from cepo.types import ImageReference, PromptReference, Reference, RolloutGroup, TextReference, WordedReference

WITHOUT_IMAGES = "(without images)"
"""Recorded as the reference of a teacher that reads the student's prompt without its images."""
WITH_MASKED_IMAGES = "(images masked with probability {:g})"
"""Recorded as the reference of a teacher that reads the student's prompt with its images masked."""

WITH_OTHER_PROMPT = "(the prompt of problem {} in place of the student's)"
"""Recorded as the reference of a teacher that reads another problem's prompt."""


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
    live: Tensor  # (B,) True on rows whose signal can be non-zero; teachers score no others
    updated: Tensor  # (B,) True on rows with an update pass: the live ones, or all of them
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
    every_row: bool,
    updates_every_row: bool = False,
    overlong_filter: bool = False,
) -> ScoringPlan:
    """Plans a step. The teachers' references come from `groups`; without groups no teacher is used.

    With `overlong_filter`, truncated rows have no signal. With `every_row`, which a KL penalty needs, all rows get every
    pass. With `updates_every_row`, which an entropy in the loss needs, all rows get an update pass.
    """
    live = possible_rows(estimator, rollouts.rewards, rollouts.group_ids, with_teachers=bool(groups))
    if overlong_filter:
        live = live & rollouts.finished
    live = live | every_row
    views, learning = plan_views(rollouts, live, groups, estimator, contexts)
    live = learning | every_row
    updated = live | updates_every_row
    rows_to_score = set(student_rows(live, on_policy, estimator, views, every=every_row))
    off_policy = updated & ~on_policy  # on-policy rows get their old log-probs from the update itself
    rows_to_score.update(row for row, is_off_policy in enumerate(off_policy) if is_off_policy)
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
        updated=updated,
        on_policy=on_policy,
        student={row: rollouts.scoring_row(row) for row in sorted(rows_to_score)},
        views=views,
        metrics=metrics,
        answers=[rollout.answer for group in groups for rollout in group.rollouts],
    )


def plan_views(
    rollouts: Rollouts, live: Tensor, groups: Sequence[RolloutGroup], estimator: Estimator, contexts: ContextBuilder
) -> tuple[list[View], Tensor]:
    """Returns what the teachers of each view read, with their rows to score, and (B,) which live rows learn from it."""
    place = _placement(rollouts, live, groups, contexts)

    def show(row: int, reference: Reference) -> _Placed | None:
        placed = place(row, reference)
        return None if placed.text is None else placed

    readings = teacher_contexts_of(
        estimator, groups, live, show, rewards=rollouts.rewards, group_ids=rollouts.group_ids
    )
    views: list[View] = []
    for name, references in readings.chosen.items():
        fates: Counter[str] = Counter()
        for row, reference in enumerate(references):
            if reference is not None and live[row]:
                fates[place(row, reference).fate] += 1
        rows: dict[int, ScoringRow] = {}
        num_cut = 0
        for row, placed in enumerate(readings.shown[name]):
            if placed is not None and live[row]:  # other rows need no pass, but what was chosen for them is recorded
                rows[row] = rollouts.scoring_row(row, placed.context, view=name)
                num_cut += placed.fate == "cut"
        views.append(
            View(
                name=name,
                references=[None if placed is None else placed.text for placed in readings.shown[name]],
                rows=rows,
                metrics={
                    f"references/{name}_empty": fraction(fates["empty"], fates.total()),
                    f"references/{name}_without_room": fraction(fates["without_room"], fates.total()),
                    f"references/{name}_cut": fraction(num_cut, len(rows)),
                },
            )
        )
    return views, readings.learning


def student_rows(
    live: Tensor, on_policy: Tensor, estimator: Estimator, views: Sequence[View], *, every: bool
) -> list[int]:
    """Returns the live rows that the student must score; with `every` these are all live rows.

    On-policy rows get their old log-probs from the update itself. They need a scoring pass only if the method's signal
    reads old log-probs, or if one view of the row has a reference and another has none, so that its teacher is the
    student.
    """
    if every:
        return [row for row, is_live in enumerate(live) if is_live]
    in_some_view = torch.zeros_like(live)  # (B,) whether the teacher of some view reads a reference
    in_every_view = torch.zeros_like(live)
    if views:
        has_reference = torch.stack([view.has_reference for view in views])  # (views, B)
        in_some_view = has_reference.any(dim=0)
        in_every_view = has_reference.all(dim=0)
    reads_log_probs = in_some_view & ~in_every_view
    if "old_log_probs" in estimator.reads:
        # A method with teachers compares old log-probs with theirs; one without reads those of all rows.
        reads_log_probs = in_some_view if estimator.views else torch.ones_like(live)
    scored = live & (reads_log_probs | ~on_policy)
    return [row for row, is_scored in enumerate(scored) if is_scored]


@dataclass(frozen=True, kw_only=True)
class _Placed:
    """A reference in a teacher's context, or the reason why it cannot be shown."""

    text: str | None = None  # as the teacher reads it; None if it cannot be shown
    context: EncodedPrompt | None = None  # None for rows that are not live
    fate: Literal["whole", "cut", "empty", "without_room"] = "whole"


def _placement(
    rollouts: Rollouts, live: Tensor, groups: Sequence[RolloutGroup], contexts: ContextBuilder
) -> Callable[[int, Reference], _Placed]:
    """Returns a function of a row and its reference, which builds text and context once for all rows that share them."""

    @cache  # references with the same text share a context, so that passes compute it once
    def fitted(prompt: int, text: str, is_answer: bool) -> tuple[EncodedPrompt, str] | None:
        return contexts.fitted(rollouts.problems[prompt], rollouts.prompts[prompt], text, is_answer=is_answer)

    def changed_images(prompt: int, reference: ImageReference, is_live: bool) -> _Placed:
        problem = rollouts.problems[prompt]
        if reference.masked is None:
            return _Placed(text=WITHOUT_IMAGES, context=contexts.blind(problem) if is_live else None)
        context = None
        if is_live:
            mask = mask_for(groups[prompt], reference)
            context = contexts.masked(problem, rollouts.prompts[prompt], mask)
        return _Placed(text=WITH_MASKED_IMAGES.format(reference.masked), context=context)

    @cache
    def placed(prompt: int, reference: Reference, is_live: bool) -> _Placed:
        if isinstance(reference, ImageReference):
            if rollouts.prompts[prompt].images is None:  # the student does not see any either
                return _Placed()
            return changed_images(prompt, reference, is_live)
        if isinstance(reference, PromptReference):
            other_prompt = (prompt + 1) % len(rollouts.problems)
            if other_prompt == prompt:
                return _Placed()
            placeholder = WITH_OTHER_PROMPT.format(rollouts.problems[other_prompt].prompt_id)
            return _Placed(text=placeholder, context=rollouts.prompts[other_prompt])
        assert isinstance(reference, WordedReference)
        text = contexts.reference_text(reference)
        if not text:
            return _Placed(fate="empty")
        context = None
        if is_live:
            is_answer = isinstance(reference, TextReference) and reference.is_answer
            with_room = fitted(prompt, text, is_answer)
            if with_room is None:
                return _Placed(fate="without_room")
            context, text = with_room
        is_cut = text != contexts.whole_text(reference)
        return _Placed(text=text, context=context, fate="cut" if is_cut else "whole")

    return lambda row, reference: placed(row // rollouts.group_size, reference, bool(live[row]))
