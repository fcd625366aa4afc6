"""Asks a method what the teachers of a step read: one sequence of questions for every trainer, command and page."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from cepo.types import Reference, RolloutGroup

if TYPE_CHECKING:
    from jaxtyping import Bool
    from torch import Tensor

    from cepo.algorithms.base import Estimator

Shown = TypeVar("Shown")
"""What a caller makes of a reference that can be shown: a text, or a teacher's whole context."""


@dataclass(frozen=True, kw_only=True)
class Readings(Generic[Shown]):
    """What the teachers of a step read, by view, and which of the B rows learn from it.

    The mappings are empty in a step without teachers.
    """

    chosen: Mapping[str, Sequence[Reference | None]]  # the method's choice for each row
    shown: Mapping[str, Sequence[Shown | None]]  # what remains of it; None: the teacher reads the student's own prompt
    has_reference: Mapping[str, Bool[Tensor, " B"]]  # whether the teacher of each row reads a reference
    learning: Bool[Tensor, " B"]  # rows whose signal can be non-zero


def readings_of(
    estimator: Estimator,
    groups: Sequence[RolloutGroup],
    live: Bool[Tensor, " B"],
    show: Callable[[int, Reference], Shown | None],
) -> Readings[Shown]:
    """Returns what teachers read of `groups`, whose rollouts in succession are the B rows; without groups nothing.

    The method chooses a reference for each row and view; `show(row, reference)` returns what the teacher would read, or
    None if the reference cannot be shown, because it is empty or does not fit; given which can, the method settles which
    are kept, and which of the `live` rows still learn.
    """
    if not groups:
        return Readings(chosen={}, shown={}, has_reference={}, learning=live)
    chosen = _chosen(estimator, groups)
    showable: dict[str, list[Shown | None]] = {}
    for view, references in chosen.items():
        showable[view] = [
            None if reference is None else show(row, reference) for row, reference in enumerate(references)
        ]
    is_kept = estimator.settled({view: [one is not None for one in rows] for view, rows in showable.items()})
    shown: dict[str, list[Shown | None]] = {}
    for view, rows in showable.items():
        shown[view] = [one if keep else None for one, keep in zip(rows, is_kept[view], strict=True)]
    has_reference = {view: live.new_tensor([one is not None for one in rows]) for view, rows in shown.items()}
    learning = estimator.learning_rows(live, has_reference)
    return Readings(chosen=chosen, shown=shown, has_reference=has_reference, learning=learning)


def _chosen(estimator: Estimator, groups: Sequence[RolloutGroup]) -> dict[str, list[Reference | None]]:
    """Returns by view the reference that the method chooses for each row."""
    chosen: dict[str, list[Reference | None]] = {view: [] for view in estimator.views}
    for group in groups:
        references = estimator.references(group)
        for view in estimator.views:
            chosen[view].extend(references[view])
    return chosen
