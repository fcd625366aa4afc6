"""Updates that are all skipped are told at once, and end the run after some steps."""

from __future__ import annotations

from fractions import Fraction

import pytest

from cepo.config.trainer_schema import TrainerConfig
from cepo.errors import EngineError
from cepo.rewards.contract import ContractError, validate_score
from cepo.trainer.health import Health


def test_the_third_skipped_step_in_a_row_ends_the_run(caplog: pytest.LogCaptureFixture) -> None:
    health = Health(TrainerConfig(max_skipped_steps=3))
    for step, (skipped, updates) in enumerate(
        [(0, 2), (1, 2), (2, 2), (2, 2), (0, 0), (1, 2), (2, 2), (2, 2)], start=1
    ):
        health.count_skipped(step, skipped, updates)
        health.require_updates("run")
    told = [record.getMessage() for record in caplog.records]
    assert [text[:7] for text in told] == ["step 3 ", "step 7 "]
    assert "all of its 2 updates were skipped" in told[0]
    assert "after 3 such steps the run ends (trainer.max_skipped_steps)" in told[0]
    health.count_skipped(9, 2, 2)
    with pytest.raises(
        EngineError, match=r"last 3 steps were skipped.*trainer\.max_skipped_steps=3; -1 never stops.*in run"
    ):
        health.require_updates("run")


def test_minus_1_never_ends_a_run() -> None:
    health = Health(TrainerConfig(max_skipped_steps=-1))
    for step in range(100):
        health.count_skipped(step, 1, 1)
        health.require_updates("run")
    assert health.skipped_in_a_row == 100


HUGE = [1e300, -1e300, 1e19, float("inf"), float("nan"), 10**400, 10**5000, Fraction(10**400, 3)]


@pytest.mark.parametrize("value", HUGE, ids=range(len(HUGE)))
def test_a_reward_beyond_what_float32_can_square_is_none(value: float) -> None:
    with pytest.raises(ContractError, match=r"'overall' = .*Return a number from -1e\+18 to 1e\+18"):
        validate_score({"overall": value}, sample=3, source="f")


def test_a_key_of_a_class_of_its_own_becomes_a_plain_text() -> None:
    class Name(str):
        __slots__ = ()

    (key,) = (key for key in validate_score({Name("overall"): 1, Name("x"): 0.5}, sample=0, source="f") if key == "x")
    assert type(key) is str
    assert validate_score({"overall": 1e18}, sample=0, source="f") == {"overall": 1e18}
