"""lambda is a pure function of the 0-based rollout step."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from cepo.algorithms.settings import WeightConfig


def test_default_is_a_half_at_step_0_and_0_from_step_25_on() -> None:
    config = WeightConfig()
    assert config.lambda_at(0) == 0.5
    assert config.lambda_at(5) == 0.4
    assert config.lambda_at(24) == pytest.approx(0.02)
    assert [config.lambda_at(step) for step in (25, 26, 1000)] == [0.0, 0.0, 0.0]


def test_constant_schedule_stays_at_lambda_init() -> None:
    config = WeightConfig(lambda_schedule="constant", lambda_init=1.0)
    assert {config.lambda_at(step) for step in range(100)} == {1.0}


def test_warm_up_reaches_lambda_init_and_decays_after_it() -> None:
    """It is reached at the last of 4 warm-up steps."""
    config = WeightConfig(lambda_init=0.8, lambda_warmup_steps=4, lambda_decay_steps=10)
    assert [config.lambda_at(step) for step in range(4)] == pytest.approx([0.2, 0.4, 0.6, 0.8])
    assert config.lambda_at(4) == 0.8
    assert config.lambda_at(9) == pytest.approx(0.4)
    assert config.lambda_at(14) == 0.0


@given(st.floats(0, 1), st.integers(1, 60), st.integers(0, 20), st.integers(0, 200))
def test_lambda_stays_in_its_range_and_never_rises_after_warm_up(
    init: float, decay: int, warmup: int, step: int
) -> None:
    """The range is 0 to lambda_init."""
    config = WeightConfig(lambda_init=init, lambda_decay_steps=decay, lambda_warmup_steps=warmup)
    value = config.lambda_at(step)
    assert 0 <= value <= init
    if step >= warmup:
        assert config.lambda_at(step + 1) <= value
    assert config.lambda_at(warmup + decay) == 0.0


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("lambda_init", value) for value in (1.5, -0.1, float("nan"))),
        ("lambda_decay_steps", 0),
        ("lambda_warmup_steps", -1),
        ("lambda_schedule", "cosine"),
        *(("clip_radius", value) for value in (1.0, -0.1)),
    ],
)
def test_values_out_of_range_are_refused_by_the_settings_name(key: str, value: object) -> None:
    with pytest.raises(ValidationError, match=key):
        WeightConfig(**{key: value})  # type: ignore[arg-type]
