"""lambda is a pure function of the 0-based rollout step."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cepo.algorithms import build_estimator


def mixing_at(step: int, **weight: Any) -> float:
    method: Any = build_estimator("rlsd", {"weight": weight})
    return method.mixing(step)


@pytest.mark.parametrize(
    ("weight", "expected"),
    [
        ({}, {0: 0.5, 5: 0.4, 24: 0.02, 25: 0.0, 26: 0.0, 1000: 0.0}),
        ({"lambda_schedule": "constant", "lambda_init": 1.0}, {0: 1.0, 1: 1.0, 99: 1.0}),
        (
            {"lambda_init": 0.8, "lambda_warmup_steps": 4, "lambda_decay_steps": 10},
            {0: 0.2, 1: 0.4, 2: 0.6, 3: 0.8, 4: 0.8, 9: 0.4, 14: 0.0},
        ),
    ],
    ids=["default", "constant", "warm-up"],
)
def test_lambdas_are_those_worked_out_by_hand(weight: dict[str, Any], expected: dict[int, float]) -> None:
    assert {step: mixing_at(step, **weight) for step in expected} == pytest.approx(expected, abs=1e-12)


@given(st.floats(0, 1), st.integers(1, 60), st.integers(0, 20), st.integers(0, 200))
def test_lambda_stays_in_its_range_and_never_rises_after_warm_up(
    init: float, decay: int, warmup: int, step: int
) -> None:
    """The range is 0 to lambda_init."""
    weight = {"lambda_init": init, "lambda_decay_steps": decay, "lambda_warmup_steps": warmup}
    value = mixing_at(step, **weight)
    assert 0 <= value <= init
    if step >= warmup:
        assert mixing_at(step + 1, **weight) <= value
    assert mixing_at(warmup + decay, **weight) == 0.0
