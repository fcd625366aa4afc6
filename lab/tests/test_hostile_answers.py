"""Generated adversarial answers get one verdict in any order, and no time limit is reached."""

from __future__ import annotations

import pytest

from lab.hostile_answers import figures, samples_of


@pytest.mark.heavy
def test_generated_adversarial_answers_are_graded_in_any_order() -> None:
    """`python3 -m lab.hostile_answers` does the same with 10,000."""
    found = figures(samples_of(150, seed=3), timeout=10.0, workers=2, seed=4)
    assert found["other_verdict_in_another_order"] == 0
    assert (found["timed_out"], found["raised"]) == (0, 0)
    assert 0 < found["right"] < 150
    assert found["mean_seconds"] < 0.1
