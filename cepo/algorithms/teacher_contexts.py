"""Asks a method what the teachers of a step read: one sequence of questions for every trainer, command and page."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from cepo.algorithms import statistics
from cepo.types import Reference, RolloutGroup

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int64
    from torch import Tensor

    from cepo.algorithms.base import Estimator

Shown = TypeVar("Shown")
"""What a caller makes of a reference that can be shown: a text, or a teacher's whole context."""


@dataclass(frozen=True, kw_only=True)
class TeacherContexts(Generic[Shown]):
    """What the teachers of a step read, by view, and which of the B rows learn from it.

    The mappings are empty in a step without teachers.
    """

    chosen: Mapping[str, Sequence[Reference | None]]  # the method's choice for each row
    shown: Mapping[str, Sequence[Shown | None]]  # what remains of it; None: the teacher reads the student's own prompt
    has_reference: Mapping[str, Bool[Tensor, " B"]]  # whether the teacher of each row reads a reference
    learning: Bool[Tensor, " B"]  # rows whose signal can be non-zero


def possible_rows(
    estimator: Estimator, rewards: Float[Tensor, " B"], group_ids: Int64[Tensor, " B"], *, with_teachers: bool
) -> Bool[Tensor, " B"]:
    """Returns which rows can have a non-zero signal before it is known which references can be shown.

    With teachers, these are the rows that are live if every teacher reads a reference.
    """
    every_row = statistics.all_rows(rewards)
    reads_reference = every_row if with_teachers else ~every_row
    has_reference = dict.fromkeys(estimator.views, reads_reference)
    return estimator.live_rows(rewards, group_ids, has_reference)


def teacher_contexts_of(
    estimator: Estimator,
    groups: Sequence[RolloutGroup],
    live: Bool[Tensor, " B"],
    show: Callable[[int, Reference], Shown | None],
    *,
    rewards: Float[Tensor, " B"],
    group_ids: Int64[Tensor, " B"],
) -> TeacherContexts[Shown]:
    """Returns what teachers read of `groups`, whose rollouts in succession are the B rows; without groups nothing.

    The method chooses a reference for each row and view; `show(row, reference)` returns what the teacher would read, or
    None if the reference cannot be shown, because it is empty or does not fit; given which can, the method settles which
    are kept, and says which of the `live` rows still learn.
    """
    if not groups:
        return TeacherContexts(chosen={}, shown={}, has_reference={}, learning=live)
    chosen = _chosen(estimator, groups)
    showable: dict[str, list[Shown | None]] = {}
    can_be_shown: dict[str, Bool[Tensor, " B"]] = {}
    for view, references in chosen.items():
        texts: list[Shown | None] = []
        for row, reference in enumerate(references):
            texts.append(None if reference is None else show(row, reference))
        showable[view] = texts
        can_be_shown[view] = _is_there(texts, live)
    has_reference = estimator.settled(can_be_shown)
    settled: dict[str, list[Shown | None]] = {}
    for view, texts in showable.items():
        settled[view] = []
        for text, is_settled in zip(texts, has_reference[view], strict=True):
            settled[view].append(text if is_settled else None)
    learning = live & estimator.live_rows(rewards, group_ids, has_reference)
    return TeacherContexts(chosen=chosen, shown=settled, has_reference=has_reference, learning=learning)


def _chosen(estimator: Estimator, groups: Sequence[RolloutGroup]) -> dict[str, list[Reference | None]]:
    """Returns by view the reference that the method chooses for each row."""
    chosen: dict[str, list[Reference | None]] = {view: [] for view in estimator.views}
    for group in groups:
        references = estimator.checked_references(group)
        for view in estimator.views:
            chosen[view].extend(references[view])
    return chosen


def _is_there(texts: Sequence[object | None], live: Bool[Tensor, " B"]) -> Bool[Tensor, " B"]:
    """Returns which rows have something to show, on the device of `live`."""
    return live.new_tensor([text is not None for text in texts])
