"""A run whose first steps give nothing to learn from says so, once."""

from __future__ import annotations

import pytest
import torch

from cepo.config.trainer_schema import TrainerConfig
from cepo.trainer.health import Health


def warned(caplog: pytest.LogCaptureFixture, *steps: list[float]) -> list[str]:
    health = Health(TrainerConfig())
    for rewards in steps:
        health.count_equal_rewards(torch.tensor(rewards))
    return [record.getMessage() for record in caplog.records]


def test_three_steps_of_equal_rewards_are_reported(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The report has the number of steps and the value."""
    (message,) = warned(caplog, *[[0.5] * 4] * 5)
    assert message.startswith(
        "in each of the first 3 steps all responses got the same reward, now 0.5, so that nothing can be learnt"
    )
    assert "data.answer_key" in message


@pytest.mark.parametrize(
    "steps",
    [[[0.0] * 4] * 2, [[0.0] * 4, [0.0] * 4, [0.0, 0.0, 0.0, 1.0]], [[0.0, 1.0], [0.0] * 2, [0.0] * 2, [0.0] * 2]],
)
def test_two_equal_steps_or_one_other_reward_say_nothing(
    steps: list[list[float]], caplog: pytest.LogCaptureFixture
) -> None:
    assert warned(caplog, *steps) == []
