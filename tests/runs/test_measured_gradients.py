from __future__ import annotations

import json
from pathlib import Path

import pytest

from lab.gradient.__main__ import main

pytestmark = [pytest.mark.heavy, pytest.mark.nightly("a program of the lab")]

METHODS = "methods=grpo, rlsd(lambda_init=1)"


def test_a_group_mean_differs_from_leave_one_out_in_length_alone(tiny_run: list[str], tmp_path: Path) -> None:
    """`R - mean_g` of 4 rollouts is 3/4 of `R - mean of the others`: the same ratio and direction."""
    folder = tmp_path / "measured"
    assert main([*tiny_run, "data.rollout_batch_size=2", "batches=3", METHODS, f"out={folder}"]) == 0
    assert not (folder / "gradients").exists(), "vectors are of no use once their products are known"
    results = json.loads((folder / "gradient.json").read_text(encoding="utf-8"))
    uniform, group, other = results["gradient"]
    assert (uniform["name"], group["name"]) == ("uniform", "grpo")
    assert group["ratio"]["value"] == pytest.approx(1.0, abs=1e-4)
    assert group["length"]["value"] == pytest.approx(0.75, abs=1e-4)
    assert abs(other["ratio"]["value"] - 1.0) > 1e-3, "a method that weighs its tokens is another estimator"
    assert results["counts"]["largest_length_error"] < 1e-5
