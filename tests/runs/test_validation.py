"""When validation runs, how it samples, and what of it is recorded."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from training_runs import json_lines, recorded_groups, run

pytestmark = pytest.mark.heavy


@pytest.fixture(scope="module")
def validated_run(tiny_run: list[str], problem_file: Path) -> list[str]:
    """2 training steps, and validation on 5 held-out problems."""
    return [
        *tiny_run,
        f"data.val_files={problem_file}@train[3:]",
        "trainer.val_before_train=true",
        "trainer.val_freq=1",
        "trainer.val_generations_to_log=2",
        "trainer.leak_probe_size=0",
    ]


def test_validation_asks_2_greedy_samples_of_5_problems(validated_run: list[str], tmp_path: Path) -> None:
    """It runs before training and at each step. 2 problems are recorded, also after a resume."""
    greedy = ["worker.rollout.val_override_config.n=2", "worker.rollout.val_override_config.temperature=0"]
    run(validated_run, *greedy, "trainer.max_steps=1", folder=tmp_path)
    resumed = run(validated_run, *greedy, folder=tmp_path)
    assert resumed.first_step == 1
    validated = [row for row in resumed.metrics if "val/reward" in row]
    assert [row["step"] for row in validated] == [0, 1, 2]
    assert {row["val/num_samples"] for row in validated} == {10}
    assert all(0.1 < row["perf/cpu_memory_used_gb"] < 100 for row in resumed.metrics if "actor/pg_loss" in row)
    recorded = json_lines(tmp_path / "generations.jsonl")
    asked = Counter((row["step"], row["prompt_id"]) for row in recorded)
    problems = {prompt for _, prompt in asked}
    assert len(problems) == 2
    assert asked == {(step, prompt): 2 for step in (0, 1, 2) for prompt in problems}  # nothing lost at the resume
    for key in asked:
        pair = [row["response"] for row in recorded if (row["step"], row["prompt_id"]) == key]
        assert pair[0] == pair[1], "greedy samples of one prompt are equal"
    assert {row["step"] for row in recorded_groups(tmp_path)} == {1, 2}


def test_validation_in_batches_measures_what_one_batch_does(validated_run: list[str], tmp_path: Path) -> None:
    """The batches have 2 problems."""
    only = ["trainer.val_only=true", "worker.rollout.val_override_config.n=3"]
    whole = run(validated_run, *only, folder=tmp_path / "whole")
    parts = run(validated_run, *only, "data.val_batch_size=2", folder=tmp_path / "parts")
    [one], [other] = whole.metrics, parts.metrics
    kept = {name for name in one if name.startswith("val/")}
    assert one["val/num_samples"] == 15
    assert {name: one[name] for name in kept} == pytest.approx({name: other[name] for name in kept}, abs=1e-6)
    assert json_lines(whole.folder / "generations.jsonl") == json_lines(parts.folder / "generations.jsonl")


def test_greedy_accuracy_stands_beside_the_sampled_one(validated_run: list[str], tmp_path: Path) -> None:
    """It is what a validation at temperature 0 finds, one response to each of 5 problems, and changes nothing else."""
    only = ["trainer.val_only=true", "worker.rollout.val_override_config.n=3", "trainer.val_generations_to_log=5"]
    [plain] = run(validated_run, *only, folder=tmp_path / "plain").metrics
    [both] = run(validated_run, *only, "trainer.val_greedy=true", folder=tmp_path / "both").metrics
    alone = ["trainer.val_only=true", "worker.rollout.val_override_config.temperature=0"]
    [greedy] = run(validated_run, *alone, "worker.rollout.val_override_config.n=1", folder=tmp_path / "greedy").metrics
    assert both["val/greedy_accuracy"] == greedy["val/accuracy"]
    assert both["val/num_greedy_samples"] == 5
    verdicts = {row["prompt_id"]: row["greedy_accuracy"] for row in json_lines(tmp_path / "both" / "generations.jsonl")}
    assert sum(verdicts.values()) / len(verdicts) == both["val/greedy_accuracy"]
    names = {name for name in plain if name.startswith("val/")}
    assert {name: both[name] for name in names} == {name: plain[name] for name in names}
    assert "val/greedy_accuracy" not in plain


def test_validation_alone_trains_nothing(validated_run: list[str], tmp_path: Path) -> None:
    finished = run(
        validated_run, "trainer.val_only=true", "trainer.val_before_train=false", "trainer.save_freq=1", folder=tmp_path
    )
    assert [row["step"] for row in finished.metrics] == [0]
    assert not {name for name in finished.metrics[0] if name.startswith(("actor/", "reward/"))}
    assert list(tmp_path.glob("global_step_*")) == []
    assert recorded_groups(tmp_path) == []
