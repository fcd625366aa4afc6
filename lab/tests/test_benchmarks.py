"""The measured processes behind the benchmarks and stages: what they say they do is what they do."""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from lab import stages
from lab.support.machine import ROOT
from lab.support.model_flops import PATCH_VALUES
from lab.support.paired import Record, paired_ratio, side_by_side, summary, take_turns
from lab.support.problems import Script
from lab.support.profiling import LISTED_OPERATIONS, profile_tables
from lab.support.rows import HINT_TOKENS
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


on_a_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="the trainer takes the GPU; figures are of a CPU")
ROWS, PICTURE_PATCHES = 8, 4 * MICRO.image_tokens
PATCH_FLOPS = 2 * PICTURE_PATCHES * PATCH_VALUES * MICRO.vision_hidden
"""The tower's patch embedding is a convolution."""


def told(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Any:
    monkeypatch.setattr("sys.argv", ["stages", "--shape", "micro", *arguments])
    return stages.arguments()


@pytest.fixture(scope="module")
def record() -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        scoring = ("score student", "teachers", "score all")
        found = stages.measure(told(patch, "--repeats", "1", "--profile", "--stages", *scoring))
    return json.loads(json.dumps(found))


@on_a_cpu
@pytest.mark.heavy
def test_teachers_alone_share_their_prompt_when_packed(record: dict[str, Any]) -> None:
    """Padded they are 16 rows of 148 tokens."""
    student, teachers, both = (record["stages"][name] for name in ("score student", "teachers", "score all"))
    longest = MICRO.prompt_tokens + HINT_TOKENS + MICRO.longest
    assert teachers["padded"]["tokens"] == 2 * ROWS * longest == 16 * 148
    assert both["padded"]["tokens"] == teachers["padded"]["tokens"] + student["padded"]["tokens"]
    # The prompt up to the hint is passed once, however many teachers read it: alone they pay for it again.
    shared = MICRO.prompt_tokens - 5 - 2
    alone = student["packed"]["tokens"] + teachers["packed"]["tokens"] - both["packed"]["tokens"]
    assert alone == pytest.approx(shared, abs=3)
    difference = record["stages"]["teachers (difference)"]["packed"]["seconds"]
    assert difference == pytest.approx(both["packed"]["seconds"] - student["packed"]["seconds"])


@on_a_cpu
@pytest.mark.heavy
def test_the_profile_lists_12_operations_and_counts_products(record: dict[str, Any]) -> None:
    """The products are counted for each stage, as torch counts them."""
    assert list(record["profile"]) == ["score student", "teachers", "score all"] == list(record["matrix_products"])
    for name, operations in record["profile"].items():
        seconds = [operation["seconds"] for operation in operations]
        assert len(seconds) == LISTED_OPERATIONS
        assert seconds == sorted(seconds, reverse=True)
        assert 0.5 < sum(operation["share"] for operation in operations) <= 1
        products = record["matrix_products"][name]
        assert products["flops"] == record["stages"][name]["packed"]["matrix_product_flops"] - PATCH_FLOPS
        assert products["gflops_per_second"] == pytest.approx(products["flops"] / products["seconds"] / 1e9)
        large = products["large_product"]
        assert large["sizes"] == [record["stages"][name]["packed"]["tokens"], MICRO.hidden, MICRO.intermediate]
        assert large["gflops_per_second"] > 0
    tables = profile_tables(record)
    assert [text.partition(":")[0] for text in tables[:3]] == ["| score student", "| teachers", "| score all"]
    assert tables[3].count("128 x 384, float32") == 3


@on_a_cpu
def test_teachers_of_the_students_context_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are left out of what is measured by itself."""
    assert told(monkeypatch, "--contexts", "1").stages == ["generate", "score student", "score all", "update"]
    assert "teachers" in told(monkeypatch).stages
    with pytest.raises(SystemExit):
        told(monkeypatch, "--contexts", "1", "--stages", "teachers")
    assert "give --contexts 2 or more" in capsys.readouterr().err
