"""A run that learns nothing says so at its first steps, and ends when its updates are all skipped."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cepo.algorithms import build_estimator
from cepo.config.schema import TrainerConfig
from cepo.errors import EngineError
from cepo.metrics import fraction
from cepo.trainer.health import Health


@pytest.mark.parametrize(
    ("steps", "is_told"),
    [
        ([[0.5] * 4] * 5, True),
        ([[0.0] * 4] * 2, False),
        ([[0.0] * 4, [0.0] * 4, [0.0, 0.0, 0.0, 1.0]], False),
        ([[0.0, 1.0], [0.0] * 2, [0.0] * 2, [0.0] * 2], False),
    ],
)
def test_equal_rewards_in_all_of_3_first_steps_are_told_once(
    steps: list[list[float]], is_told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    health = Health(TrainerConfig(), Path("run"))
    for rewards in steps:
        health.count_equal_rewards(torch.tensor(rewards))
    start = "in each of the first 3 steps all responses got the same reward, now 0.5, so that nothing can be learnt"
    assert [text.startswith(start) and "data.answer_key" in text for text in caplog.messages] == [True] * is_told


def test_the_first_step_with_most_answers_missing_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    health = Health(TrainerConfig(), Path("run"))
    for num_missing in (4, 6, 8):
        health.count_missing_answers(fraction(num_missing, 8))
    (message,) = caplog.messages
    assert message.startswith("6 of 8 responses (75 %) have no final answer that a teacher could read")
    assert "worker.reward.answer_function" in message
    assert r"\boxed{...}" in message


@pytest.mark.parametrize(
    ("method", "settings", "reads"),
    [
        ("cepo", {}, True),
        ("cepo", {"negative": {"source": "peer_full"}}, False),
        ("rlsd", {}, False),
        ("opsd", {"positive": {"source": "peer_answer"}}, True),
        ("grpo", {}, False),
    ],
)
def test_only_methods_that_show_answers_depend_on_them(method: str, settings: dict[str, object], reads: bool) -> None:
    assert build_estimator(method, settings).reads_answers is reads


def test_the_third_skipped_step_in_a_row_ends_the_run(caplog: pytest.LogCaptureFixture) -> None:
    health = Health(TrainerConfig(max_skipped_steps=3), Path("run"))
    counts = [(0, 2), (1, 2), (2, 2), (2, 2), (0, 0), (1, 2), (2, 2), (2, 2)]
    for step, (skipped, updates) in enumerate(counts, start=1):
        health.count_skipped(step, skipped, updates)
        health.require_updates()
    told = caplog.messages
    assert [text[:7] for text in told] == ["step 3 ", "step 7 "]
    assert "all of its 2 updates were skipped" in told[0]
    assert "after 3 such steps the run ends (trainer.max_skipped_steps)" in told[0]
    health.count_skipped(9, 2, 2)
    words = r"last 3 steps were skipped.*trainer\.max_skipped_steps=3; -1 never stops.*in run"
    with pytest.raises(EngineError, match=words):
        health.require_updates()
    endless = Health(TrainerConfig(max_skipped_steps=-1), Path("run"))
    for step in range(100):
        endless.count_skipped(step, 1, 1)
        endless.require_updates()
    assert endless.skipped_in_a_row == 100
