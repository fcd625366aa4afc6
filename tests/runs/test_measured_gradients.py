"""`python3 -m lab.gradient`: what is known of the gradients' ratios comes out; test_actor.py holds the gradients to autograd."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lab.gradient.__main__ import main

pytestmark = [pytest.mark.heavy, pytest.mark.nightly("a program of the lab")]

METHODS = "methods=grpo, rlsd(lambda_init=1)"


def without_floats(text: str) -> tuple[Any, list[float]]:
    """A JSON document with null for each number that is not whole, and these numbers in their order."""
    numbers: list[float] = []
    return json.loads(text, parse_float=lambda digits: numbers.append(float(digits))), numbers


@pytest.fixture(scope="module")
def gradient_command(tiny_run: list[str]) -> list[str]:
    return [*tiny_run, "data.rollout_batch_size=2", "batches=3", METHODS]


@pytest.fixture(scope="module")
def results(gradient_command: list[str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("gradient") / "measured"
    assert main([*gradient_command, f"out={folder}"]) == 0
    assert not (folder / "gradients").exists(), "vectors are of no use once their products are known"
    return json.loads((folder / "gradient.json").read_text(encoding="utf-8"))


def test_a_group_mean_differs_from_leave_one_out_in_length_alone(results: dict[str, Any]) -> None:
    """`R - mean_g` of 4 rollouts is 3/4 of `R - mean of the others`: the same ratio and direction."""
    uniform, group, other = results["gradient"]
    assert (uniform["name"], group["name"]) == ("uniform", "grpo")
    assert group["ratio"]["value"] == pytest.approx(1.0, abs=1e-4)
    assert group["length"]["value"] == pytest.approx(0.75, abs=1e-4)
    assert abs(other["ratio"]["value"] - 1.0) > 1e-3, "a method that weighs its tokens is another estimator"
    assert results["counts"]["largest_length_error"] < 1e-5


def test_an_ended_measurement_of_gradients_goes_on(
    results: dict[str, Any], gradient_command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A dry run keeps the batch that it timed; a finished measurement is not made again."""
    assert main([*gradient_command, f"out={tmp_path / 'new'}", "dry_run=true"]) == 0
    assert "3 batches of 3 gradients" in capsys.readouterr().out
    assert [file.name for file in (tmp_path / "new" / "gradients").iterdir()] == ["0.npy"]
    assert main([*gradient_command, f"out={tmp_path / 'new'}"]) == 0
    file = tmp_path / "new" / "gradient.json"
    again, numbers = without_floats(file.read_text(encoding="utf-8"))
    before, numbers_before = without_floats(json.dumps(results))
    assert again == before
    # Another run sums in single precision in another order: 6e-8 per addition, some hundred additions per number.
    assert numbers == pytest.approx(numbers_before, rel=1e-4, abs=1e-6)
    written = file.stat().st_mtime_ns
    assert main([*gradient_command, f"out={tmp_path / 'new'}"]) == 0
    assert file.stat().st_mtime_ns == written
