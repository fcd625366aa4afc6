"""The study on a pretrained model: its plan resolves, its table is right by hand, and its control reads other answers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from factories import group, rollout

from cepo.algorithms import build_estimator, load_plugin
from cepo.config import check_config, load_config
from research.real_model import ARMS, PLAN, all_records, planned, run_all, table_of
from research.support.seeded_runs import train_once

REPOSITORY = Path(__file__).parents[2]


def test_every_arm_of_the_plan_resolves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    runs = [run for run in planned() if run.seed == PLAN["seeds"][0]]
    assert [run.arm.name for run in runs] == list(ARMS)
    for run in runs:
        plan = check_config(load_config(run.settings("microgeo:model")))
        assert f"length: {PLAN['steps']} steps" in plan


def test_differences_are_paired_by_seed() -> None:
    """cepo is 10 and 20 points above grpo over the rollouts of two seeds: +15 ± 5; p of t = 3 with 1 degree is 0.205."""
    records = [
        {"arm": arm, "seed": seed, "trained": [accuracy, accuracy], "held_out": {str(PLAN["steps"]): accuracy}}
        for arm, accuracies in {"grpo": (0.3, 0.5), "cepo": (0.4, 0.7)}.items()
        for seed, accuracy in zip((1, 2), accuracies, strict=True)
    ]
    lines = table_of(records).splitlines()
    [cepo_line] = [line for line in lines if line.startswith("| cepo |")]
    cells = [text.strip() for text in cepo_line.strip("|").split("|")]
    assert cells[:5] == ["cepo", "2 of 5", "55.0 ± 15.0", "+15.0 ± 5.0", "0.205"]
    [rlsd_line] = [line for line in lines if line.startswith("| rlsd |")]
    assert "not run" in rlsd_line


def test_recorded_runs_are_neither_trained_nor_forgotten(tmp_path: Path) -> None:
    """Records of one machine stay when another adds its own, in the plan's order."""
    results = tmp_path / "results.json"
    earlier = [{"arm": "cepo", "seed": 1}, {"arm": "grpo", "seed": 1}]
    results.write_text(json.dumps({"plan": PLAN, "runs": earlier}), encoding="utf-8")
    assert all_records(tmp_path / "no runs here", results) == [earlier[1], earlier[0]]
    everything = [{"arm": run.arm.name, "seed": run.seed} for run in planned()]
    results.write_text(json.dumps({"plan": PLAN, "runs": everything}), encoding="utf-8")
    assert run_all(tmp_path, "no model", seeds=PLAN["seeds"], most=1, results=results) == 0
    assert list(tmp_path.iterdir()) == [results], "a recorded run was trained"


def test_the_control_never_reads_the_true_answer() -> None:
    load_plugin(REPOSITORY / "research" / "support" / "permuted_references.py")
    method = build_estimator("permuted_references", {})
    read: set[str] = set()
    for step in range(50):
        right = rollout(0, 1.0, "14", correct=True)
        example = group(right, rollout(1, 0.0, "13"), ground_truth="14", step=step)
        [reference, same] = method.references(example)["correct"]
        assert reference == same
        assert reference is not None
        assert reference.text is not None
        read.add(reference.text)
    assert "14" not in read
    assert len(read) > 5


@pytest.mark.heavy
def test_a_run_that_is_done_is_not_trained_again(tmp_path: Path) -> None:
    """A step of 2 x 2 responses; the seed reaches weights, data and sampling."""
    settings = [
        "config=microgeo/base",
        "worker.rollout.name=transformers",
        "worker.rollout.n=2",
        "data.rollout_batch_size=2",
        "data.val_files=null",
        "trainer.val_before_train=false",
        "trainer.max_steps=1",
    ]
    folder = tmp_path / "run"
    assert train_once(settings, seed=7, folder=folder) == 0
    config = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    assert (config["trainer"]["seed"], config["data"]["seed"], config["worker"]["rollout"]["seed"]) == (7, 7, 7)
    metrics = (folder / "metrics.jsonl").read_bytes()
    assert train_once(["config=nothing"], seed=7, folder=folder) == 0
    assert (folder / "metrics.jsonl").read_bytes() == metrics
