"""Which checkpoints stay, and what the tracker file says of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from training_runs import run

from cepo.metrics import mean_value
from cepo.trainer.loop import Trainer

pytestmark = pytest.mark.heavy

EVERY_STEP = ["trainer.save_freq=1", "trainer.val_freq=1"]


@pytest.fixture
def validated_run(tiny_run: list[str], problem_file: Path) -> list[str]:
    """The tiny run with an adapter and held-out problems."""
    return [*tiny_run, f"data.val_files={problem_file}", "worker.actor.model.lora.rank=2"]


def validated_at(scores: Sequence[float]) -> Callable[[Trainer], None]:
    """Validations with the mean rewards `scores`, in their order."""
    remaining = iter(scores)

    def prepare(trainer: Trainer) -> None:
        scripted: Any = SimpleNamespace(
            run=lambda _: ({"val/reward": mean_value(next(remaining))}, []), num_responses=1
        )
        trainer.validator = scripted

    return prepare


def steps(folder: Path) -> list[str]:
    return sorted(path.name.removeprefix("global_step_") for path in folder.glob("global_step_*"))


def tracker(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "checkpoint_tracker.json").read_text())


def test_of_5_checkpoints_a_limit_of_3_keeps_the_best_and_last(validated_run: list[str], tmp_path: Path) -> None:
    options = [*EVERY_STEP, "trainer.max_steps=5", "trainer.save_limit=3"]
    run(validated_run, *options, folder=tmp_path, prepare=validated_at([0.2, 0.71239, 0.4, 0.71239, 0.3]))
    assert steps(tmp_path) == ["2", "4", "5"]
    assert tracker(tmp_path) == {
        "best_global_step": 2,
        "best_val_reward_score": 0.7124,
        "last_global_step": 5,
        "last_actor_path": str(tmp_path / "global_step_5" / "actor"),
    }


def test_a_limit_of_1_keeps_the_best_beside_the_last(validated_run: list[str], tmp_path: Path) -> None:
    options = [*EVERY_STEP, "trainer.save_limit=1"]
    run(validated_run, *options, "trainer.max_steps=3", folder=tmp_path, prepare=validated_at([0.8, 0.1, 0.2]))
    assert steps(tmp_path) == ["1", "3"]
    resumed = run(validated_run, *options, "trainer.max_steps=4", folder=tmp_path, prepare=validated_at([0.3]))
    assert resumed.first_step == 3
    assert steps(tmp_path) == ["1", "4"]
    assert tracker(tmp_path)["best_global_step"] == 1
    better = run(validated_run, *options, "trainer.max_steps=5", folder=tmp_path, prepare=validated_at([0.9]))
    assert better.first_step == 4
    assert steps(tmp_path) == ["5"]
    assert (tracker(tmp_path)["best_global_step"], tracker(tmp_path)["best_val_reward_score"]) == (5, 0.9)


def test_a_score_counts_for_the_weights_it_was_measured_on_only(validated_run: list[str], tmp_path: Path) -> None:
    options = ["trainer.save_freq=1", "trainer.val_freq=2", "trainer.max_steps=3"]
    run(validated_run, *options, folder=tmp_path / "some", prepare=validated_at([0.5, 0.4]))
    assert tracker(tmp_path / "some")["best_global_step"] == 2
    run(validated_run, *options, "trainer.val_freq=-1", folder=tmp_path / "none")
    assert (tracker(tmp_path / "none")["best_global_step"], tracker(tmp_path / "none")["last_global_step"]) == (None, 3)


def test_the_best_score_is_the_highest_val_reward(validated_run: list[str], tmp_path: Path) -> None:
    finished = run(validated_run, *EVERY_STEP, "trainer.max_steps=3", folder=tmp_path)
    rewards = {row["step"]: row["val/reward"] for row in finished.metrics if "val/reward" in row}
    assert sorted(rewards) == [1, 2, 3]
    best = max(sorted(rewards), key=lambda step: rewards[step])
    assert tracker(tmp_path)["best_global_step"] == best
    assert tracker(tmp_path)["best_val_reward_score"] == pytest.approx(rewards[best], abs=5e-5)
