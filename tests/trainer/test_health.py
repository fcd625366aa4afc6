"""What a run says of the gap between the log-probs of rollout engine and trainer."""

from __future__ import annotations

import logging
from typing import Literal

import pytest

from cepo.config.schema import TrainerConfig
from cepo.errors import EngineError
from cepo.trainer.health import LOG_PROB_GAP, Health


@pytest.mark.parametrize(
    ("gaps", "warnings"),
    [
        ([0.02, 0.099], []),
        ([0.1, 0.3, 0.2], ["step 1: the log-probs of rollout engine and trainer differ by 0.1 nats"]),
        ([0.02, 0.99], ["step 2: the log-probs of rollout engine and trainer differ by 0.99 nats"]),
        ([1.5], ["step 1: the log-probs of rollout engine and trainer differ by 1.5 nats"]),
    ],
)
def test_a_gap_that_rounding_does_not_explain_is_told_once(
    gaps: list[float], warnings: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """bf16 explains about 0.02 nats; from 0.1 on the run warns, and above `trainer.max_log_prob_gap` it is a fault."""
    caplog.set_level(logging.WARNING, logger="cepo")
    health = Health(TrainerConfig())
    for number, gap in enumerate(gaps, start=1):
        health.require_sound(number, {LOG_PROB_GAP: gap})
    messages = [record.getMessage() for record in caplog.records]
    assert [message[: len(words)] for message, words in zip(messages, warnings, strict=True)] == warnings


def test_a_gap_above_the_bound_still_stops_the_run() -> None:
    health = Health(TrainerConfig(on_fault="stop"))
    health.require_sound(1, {LOG_PROB_GAP: 1.0})
    with pytest.raises(EngineError, match=r"step 2: .* differ by 1\.01 nats a token .*max_log_prob_gap=1"):
        health.require_sound(2, {LOG_PROB_GAP: 1.01})


@pytest.mark.parametrize("on_fault", ["stop", "warn"])
def test_a_gap_that_is_no_number_is_a_fault(
    on_fault: Literal["stop", "warn"], caplog: pytest.LogCaptureFixture
) -> None:
    """NaN is above no bound, and is what log-probs of a broken engine give."""
    health = Health(TrainerConfig(on_fault=on_fault))
    if on_fault == "stop":
        with pytest.raises(EngineError, match=r"step 1: .* differ by nan nats a token"):
            health.require_sound(1, {LOG_PROB_GAP: float("nan")})
    else:
        health.require_sound(1, {LOG_PROB_GAP: float("nan")})
        assert "differ by nan nats a token" in caplog.text
