"""The soak: what must not grow over training steps is measured, judged by its slope, and was measured to be flat."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from isolation import restored_process

from lab import soak

RESULT = Path(soak.__file__).parent / "results" / "soak.json"


def test_growth_has_the_slope_and_error_worked_out_by_hand() -> None:
    """Deviations of x are -15, -5, 5, 15 (squares 500), products 10, residuals -0.2, 0.6, -0.6, 0.2 (squares 0.8).

    The slope is 10 / 500 = 0.02 a step, its error sqrt(0.8 / 2 / 500) = 0.02828.
    """
    grown = soak.growth([0, 10, 20, 30], [0, 1, 0, 1])
    assert grown == pytest.approx({"slope": 10.0, "standard_error": 14.1421, "upper": 10 + 2.04 * 14.1421}, rel=1e-5)


def test_a_planted_leak_is_not_flat() -> None:
    """One handle and 100 kB in every tenth step, after a jump in the warm-up that does not count."""
    steady = dict.fromkeys(soak.BOUNDS, 7.0)
    figures = [{"step": step, **steady, "threads": 7.0 if step > 100 else 1.0} for step in range(10, 501, 10)]
    assert all(one["flat"] for one in soak.verdicts(figures).values())
    for number, each in enumerate(figures):
        each["file_handles"] += number
        each["resident_bytes"] += 100_000 * number
    found = soak.verdicts(figures)
    assert [name for name, one in found.items() if not one["flat"]] == ["file_handles"]  # 5 MB are within the bound
    assert found["file_handles"]["slope"] == pytest.approx(50)
    assert found["resident_bytes"]["slope"] == pytest.approx(5e6)


@pytest.mark.heavy
def test_8_steps_with_new_images_leave_nothing(tmp_path: Path) -> None:
    """Between the 4th and the 7th of 8 steps, with two teachers, averaged weights and a KL in the loss."""
    with restored_process():
        soak.train([*soak.RUNS["transformers"], "trainer.val_freq=-1"], 8, tmp_path / "run.json")
    figures = json.loads((tmp_path / "run.json").read_text())
    assert [each["step"] for each in figures] == list(range(1, 9))
    for name in ("tensor_bytes", "threads", "child_processes", "cached_entries"):
        assert figures[3][name] == figures[6][name], name  # the last step reads no further problems ahead
    assert figures[7]["tensor_bytes"] > 1e6
    assert abs(figures[6]["python_objects"] - figures[3]["python_objects"]) < 500


def test_500_steps_were_measured_to_be_flat() -> None:
    record = json.loads(RESULT.read_text(encoding="utf-8"))
    assert record["steps"] >= 500
    assert "transformers" in record["runs"]
    for name, run in record["runs"].items():
        assert run["figures"][-1]["step"] == record["steps"]
        assert soak.verdicts(run["figures"]) == run["verdicts"]
        assert all(one["flat"] for one in run["verdicts"].values()), name
