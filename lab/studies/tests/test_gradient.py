"""The program that measures gradients, on an untrained model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from isolation import own_caches

from cepo.microgeo.world import split_problems, write_problems
from lab.studies.gradient.__main__ import main as measure_gradients
from lab.support.machine import ROOT
from lab.worlds.model import build_untrained_model


def test_a_group_mean_differs_from_leave_one_out_in_length_alone(tmp_path: Path) -> None:
    """`R - mean_g` of 4 rollouts is 3/4 of `R - mean of the others`: the same ratio and direction."""
    train, _ = split_problems(0, 8, 1)
    write_problems(tmp_path / "train.parquet", train)
    run = [
        f"config={ROOT}/configs/microgeo/base.yaml",
        f"data.train_files={tmp_path}/train.parquet",
        "data.val_files=null",
        "data.max_response_length=10",
        f"worker.actor.model.model_path={build_untrained_model(tmp_path / 'model')}",
        "worker.actor.global_batch_size=2",
        "worker.rollout.name=transformers",
        "worker.rollout.n=4",
        f"worker.reward.reward_function={ROOT}/tests/reward_functions.py:parity",
    ]
    folder = tmp_path / "measured"
    options = ["data.rollout_batch_size=2", "batches=3", "methods=grpo, rlsd(lambda_init=1)", f"out={folder}"]
    with own_caches(tmp_path / "caches"):
        assert measure_gradients([*run, *options]) == 0
    assert not (folder / "gradients").exists(), "vectors are of no use once their products are known"
    results = json.loads((folder / "gradient.json").read_text(encoding="utf-8"))
    uniform, group, other = results["gradient"]
    assert (uniform["name"], group["name"]) == ("uniform", "grpo")
    assert group["ratio"]["value"] == pytest.approx(1.0, abs=1e-4)
    assert group["length"]["value"] == pytest.approx(0.75, abs=1e-4)
    assert abs(other["ratio"]["value"] - 1.0) > 1e-3, "a method that weighs its tokens is another estimator"
    assert results["counts"]["largest_length_error"] < 1e-5
