"""Which checkpoints stay, and what the tracker file says of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from training_runs import Train

from cepo.metrics import mean_value
from cepo.trainer.loop import Trainer

pytestmark = pytest.mark.heavy


@pytest.fixture
def validated(train: Train, problem_file: Path) -> Train:
    """Runs with an adapter that save and validate after each step."""
    settings = [f"data.val_files={problem_file}", "worker.actor.model.lora.rank=2"]
    return partial(train, *settings, "trainer.save_freq=1", "trainer.val_freq=1")


def scoring(*scores: float) -> Callable[[Trainer], None]:
    """Validations with these mean rewards, in their order."""
    remaining = iter(scores)

    def prepare(trainer: Trainer) -> None:
        scripted: Any = SimpleNamespace(
            run=lambda _: ({"val/reward": mean_value(next(remaining))}, []), num_responses=1
        )
        trainer.validator = scripted

    return prepare


def steps(folder: Path) -> Sequence[str]:
    return sorted(path.name.removeprefix("global_step_") for path in folder.glob("global_step_*"))


def tracker(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "checkpoint_tracker.json").read_text())


def test_of_5_checkpoints_a_limit_of_3_keeps_the_best_and_last(validated: Train) -> None:
    options = ["trainer.max_steps=5", "trainer.save_limit=3"]
    folder = validated(*options, prepare=scoring(0.2, 0.71239, 0.4, 0.71239, 0.3)).folder
    assert steps(folder) == ["2", "4", "5"]
    assert tracker(folder) == {
        "best_global_step": 2,
        "best_val_reward_score": 0.7124,
        "last_global_step": 5,
        "last_actor_path": str(folder / "global_step_5" / "actor"),
    }


def test_a_limit_of_1_keeps_the_best_beside_the_last(validated: Train) -> None:
    kept: dict[int, Sequence[str]] = {}
    for last, scores in ((3, [0.8, 0.1, 0.2]), (4, [0.3]), (5, [0.9])):
        done = validated("trainer.save_limit=1", f"trainer.max_steps={last}", prepare=scoring(*scores))
        assert done.first_step == last - len(scores)
        kept[last] = steps(done.folder)
        best = 5 if last == 5 else 1
        found = tracker(done.folder)
        assert (found["best_global_step"], found["best_val_reward_score"]) == (best, {1: 0.8, 5: 0.9}[best])
    assert kept == {3: ["1", "3"], 4: ["1", "4"], 5: ["5"]}


def test_a_score_counts_for_the_weights_it_was_measured_on_only(validated: Train) -> None:
    """That of a checkpoint is the `val/reward` of its step; without one, no checkpoint is the best."""
    found = validated("trainer.val_freq=2", "trainer.max_steps=3", name="some")
    rewards = {row["step"]: row["val/reward"] for row in found.metrics if "val/reward" in row}
    best = max(sorted(rewards), key=lambda step: rewards[step])
    assert sorted(rewards) == [2, 3]
    assert tracker(found.folder)["best_global_step"] == best
    assert tracker(found.folder)["best_val_reward_score"] == pytest.approx(rewards[best], abs=5e-5)
    none = tracker(validated("trainer.val_freq=-1", "trainer.max_steps=2", name="none").folder)
    assert (none["best_global_step"], none["last_global_step"]) == (None, 2)
