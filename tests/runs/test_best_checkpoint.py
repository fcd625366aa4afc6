from __future__ import annotations

import json
from collections.abc import Callable
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


def tracker(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "checkpoint_tracker.json").read_text())


@pytest.mark.parametrize(
    ("limit", "runs"),
    [
        (3, [(5, [0.2, 0.71239, 0.4, 0.71239, 0.3], "245", (2, 0.7124))]),
        (1, [(3, [0.8, 0.1, 0.2], "13", (1, 0.8)), (4, [0.3], "14", (1, 0.8)), (5, [0.9], "5", (5, 0.9))]),
    ],
)
def test_the_best_checkpoint_stays_beside_the_last(
    validated: Train, limit: int, runs: list[tuple[int, list[float], str, tuple[int, float]]]
) -> None:
    """Each run goes on to the given step, with the given scores; the first of equal ones is the best."""
    for last, scores, kept, best in runs:
        done = validated(f"trainer.save_limit={limit}", f"trainer.max_steps={last}", prepare=scoring(*scores))
        assert done.first_step == last - len(scores)
        assert sorted(path.name[-1] for path in done.folder.glob("global_step_*")) == list(kept)
        assert tracker(done.folder) == {
            "best_global_step": best[0],
            "best_val_reward_score": best[1],
            "last_global_step": last,
            "last_actor_path": str(done.folder / f"global_step_{last}" / "actor"),
        }


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
