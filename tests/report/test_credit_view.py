"""The numbers of the page's credit view are those of training: its step, and its views."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from run_folders import group, rollout, write_run

from cepo.files.trees import Tree
from cepo.report.credit_view import credit_view, step_credit
from cepo.report.recorded_run import load_run

DELTA = 0.25


def columns_of(folder: Path, step: int, *, without_reference: bool = False) -> list[Tree]:
    """The columns of `rlsd` in a run of `cepo`, for a right and a wrong rollout; the second may lack a reference."""
    right = rollout(right=True, delta=DELTA)
    wrong = rollout(right=False, delta=DELTA)
    if without_reference:
        student_alone = {"student": wrong.log_probs["student"], "correct": None, "wrong": None}
        wrong = replace(wrong, log_probs=student_alone, references={"correct": None, "wrong": None})
    groups = [group(step, [right, wrong])]
    write_run(folder, [(step, {"loss": 1.0})], groups=groups)
    credit = step_credit(load_run(folder), groups)
    place = credit["methods"].index("rlsd") + 1
    return [row["columns"][place] for row in credit["rollouts"]]


@pytest.mark.parametrize(("step", "mixing"), [(1, 0.5), (13, 0.26), (25, 0.02), (26, 0.0)])
def test_lambda_is_that_of_the_step_in_training(step: int, mixing: float, tmp_path: Path) -> None:
    """Steps are recorded from 1 on, and lambda of the k-th is 0.5 (1 - (k - 1) / 25); A is 1 / sqrt(2)."""
    right, _ = columns_of(tmp_path, step)
    weight = 2.718281828 ** min(DELTA, 0.405465108)
    assert right["advantage"] == pytest.approx([0.70710 * (1 + mixing * (weight - 1))] * 3, abs=1e-4)


def test_a_view_without_a_reference_is_the_students(tmp_path: Path) -> None:
    """Its evidence is 0, not the student's own log-prob with another sign."""
    right, wrong = columns_of(tmp_path, 1, without_reference=True)
    assert right["delta"] == pytest.approx([DELTA] * 3)
    assert wrong["delta"] == [0.0] * 3
    assert wrong["advantage"] == pytest.approx([-0.70710] * 3, abs=1e-4)


def test_the_belief_is_above_the_text_of_the_opening_pair(tmp_path: Path) -> None:
    """The right response's p is (0 + 1/2) / 2: odds of 1/3, times exp(0.25) for each token; the wrong one's odds are 3."""
    pair = group(1, [rollout(right=True, delta=DELTA), rollout(right=False, delta=DELTA)])
    write_run(tmp_path, [(1, {"loss": 1.0})], groups=[pair])
    view = credit_view(load_run(tmp_path))
    assert view is not None
    right_side, wrong_side = view.contrast.sides
    right = right_side.rows[0]
    wrong = wrong_side.rows[0]
    likelihood_ratios = [math.exp(DELTA * place) for place in range(3)]
    assert right.belief == pytest.approx([probability(ratio / 3) for ratio in likelihood_ratios])
    assert wrong.belief == pytest.approx([probability(3 * ratio) for ratio in likelihood_ratios])
    assert right.belief_points(100, 100) == "0.0,75.0 50.0,70.0 100.0,64.5"
    assert right.tokens[1].help.endswith(", P(right) 0.30")
    assert not right_side.rows[1].belief, "once, above the first text"


def probability(odds: float) -> float:
    return odds / (1 + odds)
