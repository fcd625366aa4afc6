"""The measured processes behind the benchmarks: what they say they do is what they do."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from typing import Any

import pytest

from lab.support.machine import ROOT
from lab.support.paired import Record, paired_ratio, side_by_side, summary, take_turns
from lab.support.problems import Script
from lab.support.shapes import MICRO


def test_a_paired_ratio_is_the_median_of_ratios() -> None:
    """It is not the ratio of medians."""
    # A slow minute hits both sides of the second pair alike.
    found = paired_ratio([2.0, 30.0, 2.2], [1.0, 10.0, 1.0])
    assert (found.median, found.count) == (2.2, 3)
    assert (found.lower_quartile, found.upper_quartile) == (pytest.approx(2.1), pytest.approx(2.6))
    assert summary([4.0]).record == {"median": 4.0, "lower_quartile": 4.0, "upper_quartile": 4.0, "count": 1}


def test_a_script_gives_the_same_lengths_for_the_same_step() -> None:
    """It makes 2 of 5 prompts dead."""
    script = Script(shape=MICRO, prompts=5, dead_share=0.4)
    assert script.lengths(3) == script.lengths(3) != script.lengths(4)
    right = [sum(script.is_right(prompt, sample) for sample in range(8)) for prompt in range(5)]
    assert right == [0, 0, 4, 4, 4]


def turns(folder: Path, sides: dict[str, dict[str, Any]], modules: dict[str, str]) -> dict[str, list[Record]]:
    shared = {"folder": str(folder), "shape": "micro", "prompts": 2, "steps": 2, "dead_share": 0.5}
    told = {name: (modules[name], shared | own) for name, own in sides.items()}
    with side_by_side(told, threads=1, folder=folder) as processes:
        return take_turns(processes, steps=2)


@pytest.mark.heavy
def test_measured_steps_have_the_scripts_lengths_and_rewards(tmp_path: Path) -> None:
    """They have them with and without teachers."""
    module = "lab.support.training"
    sides = {
        "with": {"method": "cepo", "overrides": ["algorithm.weight.lambda_decay_steps=1"]},
        "without": {"method": "grpo"},
    }
    records = turns(tmp_path, sides, dict.fromkeys(sides, module))
    script = Script(shape=MICRO, prompts=2, dead_share=0.5)
    for step in (0, 1):
        lengths = script.lengths(step)
        for side in sides:
            record = records[side][step]
            assert record["tokens"]["generate"] == sum(map(sum, lengths))
            # The second prompt alone has differing rewards: its 8 rows are updated, each with its prompt of 64 tokens.
            assert record["counts"]["live_rows"] == 8
            assert record["tokens"]["update"] == sum(lengths[1]) + 8 * 64
    assert [record["active"] for record in records["with"]] == [True, False]
    assert [record["counts"]["teacher_rows"] for record in records["with"]] == [16, 0]
    assert [record["active"] for record in records["without"]] == [False, False]


@pytest.mark.heavy
@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="TRL is not installed (extra `trl`)")
def test_trl_generates_and_updates_as_many_tokens_as_cepo(tmp_path: Path) -> None:
    sides: dict[str, dict[str, Any]] = {"ours": {"method": "grpo"}, "trl": {}}
    modules = {"ours": "lab.support.training", "trl": "lab.support.trl_training"}
    records = turns(tmp_path, {name: own | {"dead_share": 0.0} for name, own in sides.items()}, modules)
    for ours, theirs in zip(records["ours"], records["trl"], strict=True):
        assert ours["tokens"]["generate"] == theirs["tokens"]["generate"] > 0
        assert ours["tokens"]["update"] == theirs["tokens"]["update"] > 0
        assert theirs["tokens"]["update, padding included"] > theirs["tokens"]["update"]
        assert math.isfinite(theirs["seconds"])


def test_a_measured_process_that_dies_says_why(tmp_path: Path) -> None:
    with (
        side_by_side({"broken": ("lab.support.training", {"no": "option"})}, threads=1, folder=tmp_path) as found,
        pytest.raises(RuntimeError, match="unexpected keyword argument 'no'"),
    ):
        found["broken"].step()


def test_the_labs_readme_lists_every_program() -> None:
    readme = (ROOT / "lab" / "README.md").read_text(encoding="utf-8")
    programs = [
        file.parent.name if file.stem == "__main__" else file.stem
        for file in (ROOT / "lab").rglob("*.py")
        if file.parent.name not in ("support", "tests")
        and (file.parent.name != "gpu_dry" or file.stem == "__main__")
        and "if __name__ ==" in file.read_text(encoding="utf-8")
    ]
    assert len(programs) > 10
    assert [name for name in programs if f"lab.{name}" not in readme and f"lab/{name}.py" not in readme] == []
