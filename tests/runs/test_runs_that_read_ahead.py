"""Reading ahead changes no bit of a run, stopped and resumed or not, and its wait is recorded."""

from __future__ import annotations

import time
from typing import Any

import pytest
from actors import differing
from training_runs import TWO_TEACHERS, FinishedRun, Train

from cepo.data import read_ahead
from cepo.data.dataset import ProblemSet

pytestmark = pytest.mark.heavy

SLOW_SECONDS = 0.1


@pytest.fixture
def slow_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row takes a tenth of a second to read, as one with large images does."""
    plain = ProblemSet.__getitem__

    def slow(problems: ProblemSet, index: Any) -> Any:
        time.sleep(SLOW_SECONDS)
        return plain(problems, index)

    monkeypatch.setattr(ProblemSet, "__getitem__", slow)


def waits(finished: FinishedRun) -> list[float]:
    return [row["timing_s/read"] for row in finished.steps]


def test_a_run_that_reads_ahead_is_the_same_run(
    train: Train, monkeypatch: pytest.MonkeyPatch, slow_images: None
) -> None:
    """4 prompts take 0.4 s to read: each step waits that long, or only the first one does; weights and rollouts agree."""
    options = [*TWO_TEACHERS, "trainer.max_steps=4", "trainer.save_freq=2"]
    monkeypatch.setattr(read_ahead, "WORTHWHILE_SECONDS", 1000.0)
    plain = train(*options, name="plain")
    monkeypatch.setattr(read_ahead, "WORTHWHILE_SECONDS", 0.0)
    ahead = train(*options, name="ahead")
    assert min(waits(plain)) > 4 * SLOW_SECONDS
    assert waits(ahead)[0] > 4 * SLOW_SECONDS
    assert differing(plain.parameters, ahead.parameters) == []
    assert plain.rollouts == ahead.rollouts
    resumed = train(*options, f"trainer.load_checkpoint_path={ahead.folder}/global_step_2", name="resumed")
    assert resumed.first_step == 2
    assert differing(plain.parameters, resumed.parameters) == []
