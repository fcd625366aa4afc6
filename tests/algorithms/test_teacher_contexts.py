"""The one sequence of questions that says what teachers read, and which rows learn from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from cepo.algorithms import Estimator, build_estimator
from cepo.algorithms.teacher_contexts import TeacherContexts, teacher_contexts_of
from cepo.types import Reference, Rollout, RolloutGroup

Show = Callable[[int, Reference], str | None]


def group(number: int, *answers: str) -> RolloutGroup:
    """Wrong rollouts with these answers; the truth is 7."""
    rollouts = [
        Rollout(
            index=index,
            reward=0.0,
            correct=False,
            response_ids=torch.tensor([1]),
            answer=answer,
            answer_equals_ground_truth=False,
        )
        for index, answer in enumerate(answers)
    ]
    return RolloutGroup(prompt_id=str(number), ground_truth="7", rollouts=rollouts, seed=0, step=0)


def text_of(row: int, reference: Reference) -> str | None:
    """The reference's text; that of the answer 9 does not fit."""
    return None if reference.text == "9" else f"{row}: {reference.text}"


def read(method: Estimator, groups: Sequence[RolloutGroup], live: Tensor, show: Show = text_of) -> TeacherContexts[str]:
    """TeacherContexts of rows whose rewards are all 0."""
    group_ids = torch.arange(len(live))
    return teacher_contexts_of(method, groups, live, show, rewards=torch.zeros(len(live)), group_ids=group_ids)


def test_rows_follow_the_groups_and_what_cannot_be_shown_is_none() -> None:
    """CEPO shows 4 to the group of 2 and, as 9 cannot be shown, no wrong answer to the group of 1."""
    method = build_estimator("cepo", {"negative": {"fallback": "neutral"}})
    readings = read(method, [group(0, "4", "4"), group(1, "9")], torch.ones(3, dtype=torch.bool))
    assert readings.shown == {"correct": ["0: 7", "1: 7", None], "wrong": ["0: 4", "1: 4", None]}
    assert {view: rows.tolist() for view, rows in readings.has_reference.items()} == {
        "correct": [True, True, False],
        "wrong": [True, True, False],
    }
    chosen = readings.chosen["wrong"][2]
    assert chosen is not None
    assert chosen.text == "9", "the method's choice stays known"


def test_a_row_without_a_demonstration_does_not_learn() -> None:
    """OPSD learns from references alone: the row whose text does not fit is left out, and so is one that was not live."""
    method = build_estimator("opsd")
    live = torch.tensor([True, True, False])

    def only_first_and_last(row: int, reference: Reference) -> str | None:
        return reference.text if row != 1 else None

    readings = read(method, [group(0, "4", "5", "6")], live, only_first_and_last)
    assert readings.learning.tolist() == [True, False, False]


def test_without_groups_no_teacher_reads_and_live_rows_learn() -> None:
    live = torch.tensor([True, False])
    readings = read(build_estimator("opsd"), [], live)
    assert readings.chosen == {}
    assert readings.shown == {}
    assert readings.has_reference == {}
    assert readings.learning.tolist() == [True, False]
