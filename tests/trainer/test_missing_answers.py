"""A run whose responses have no final answer that can be read says so, once and with the share."""

from __future__ import annotations

import pytest
from factories import group, rollout

from cepo.algorithms import build_estimator
from cepo.config.trainer_schema import TrainerConfig
from cepo.trainer.health import Health
from cepo.trainer.planning import num_without_answer


def test_the_first_step_with_most_answers_missing_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    health = Health(TrainerConfig())
    health.count_missing_answers(4, 8)
    assert caplog.records == []
    health.count_missing_answers(6, 8)
    health.count_missing_answers(8, 8)
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith("6 of 8 responses (75 %) have no final answer that a teacher could read")
    assert "worker.reward.answer_function" in message
    assert r"\boxed{...}" in message


def test_responses_without_an_answer_are_counted_over_groups() -> None:
    groups = [group(rollout(0, 1.0, "70", correct=True), rollout(1, 0.0, None)), group(rollout(0, 0.0, None))]
    assert num_without_answer(groups) == 2


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
