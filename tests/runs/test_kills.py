"""A command that is killed with -9 and given again ends as if nothing had happened, and leaves nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("ray")  # the module also injects faults under Ray
from benchmarks.faults import killed_runs


@pytest.mark.heavy
def test_three_kills_change_no_bit_and_leave_nothing(tmp_path: Path) -> None:
    """The main process alone, its whole group, and the main process again; 13 steps with teachers."""
    found = killed_runs(tmp_path, "local", [], num_kills=3)
    assert found["differences"] == []
    assert (found["faults"], found["planned"], found["steps_recorded"]) == (3, 3, 13)
