from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from training_runs import Train, run

from cepo.errors import CheckpointError
from cepo.metrics import mean_value
from cepo.microgeo.world import split_problems, write_problems
from cepo.train import main
from cepo.trainer.loop import Trainer
from cepo.trainer.run_policy import RunFinishedError

pytestmark = pytest.mark.heavy

CHANGED = ["worker.actor.optim.lr=5e-4", "data.rollout_batch_size=2"]


@pytest.fixture(scope="module")
def own_data(problem_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(shutil.copy(problem_file, tmp_path_factory.mktemp("data")))


@pytest.fixture(scope="module")
def one_step(tiny_run: list[str], own_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("one")
    run(tiny_run, f"data.train_files={own_data}", "trainer.max_steps=1", folder=folder)
    return folder


@pytest.fixture
def folder(one_step: Path, tmp_path: Path) -> Path:
    """A copy of a run folder after 1 step."""
    return Path(shutil.copytree(one_step, tmp_path / "run"))


@pytest.fixture
def going_on(train: Train, own_data: Path, folder: Path) -> Train:
    """Continues that run to 2 steps."""
    return partial(train, f"data.train_files={own_data}", "trainer.max_steps=2")


def not_reached(*_: Any) -> Any:
    raise AssertionError("models were loaded")


@pytest.fixture
def without_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cepo.train.build_backend", not_reached)


def test_changed_settings_need_a_word_and_the_record_keeps_both(
    going_on: Train, tiny_run: list[str], own_data: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Settings that decide nothing, and another path of the same files, need none."""
    with monkeypatch.context() as patch:
        patch.setattr("cepo.train.build_backend", not_reached)
        with pytest.raises(CheckpointError) as refused:
            going_on(*CHANGED)
    assert str(refused.value).splitlines() == [
        f"settings that decide what is trained have changed since {folder}/global_step_1:",
        "  data.rollout_batch_size: was 4, is 2",
        "  worker.actor.optim.lr: was 0.001, is 0.0005",
        "trainer.accept_changes=true continues with them; trainer.experiment_name=<another> or "
        "trainer.find_last_checkpoint=false starts a new run",
    ]
    done = going_on(*CHANGED, "trainer.accept_changes=true")
    rates = {
        name: yaml.safe_load((folder / name).read_text())["worker"]["actor"]["optim"]["lr"]
        for name in ("config_until_step_1.yaml", "config.yaml")
    }
    assert rates == {"config_until_step_1.yaml": 1e-3, "config.yaml": 5e-4}
    assert [row["actor/lr"] for row in done.metrics] == [1e-3, 5e-4]
    monkeypatch.chdir(own_data.parent)
    (reward,) = [word for word in tiny_run if word.startswith("worker.reward.reward_function=")]
    path = os.path.relpath(reward.partition("=")[2], own_data.parent)
    same = [f"data.train_files={own_data.name}", f"worker.reward.reward_function={path}"]
    free = ["worker.actor.micro_batch_size_per_device_for_update=4", "trainer.rollouts_to_log=0", "trainer.max_steps=3"]
    assert going_on(*CHANGED, *same, *free).first_step == 2


@pytest.mark.usefixtures("without_engines")
def test_other_rows_under_the_same_name_are_noticed(going_on: Train, own_data: Path) -> None:
    before = own_data.read_bytes()
    other = r"\n  data: was \"8 rows, CRC-32 \w{8}\", is \"8 rows, CRC-32 \w{8}\"\n"
    try:
        write_problems(own_data, split_problems(5, 8, 1)[0])
        with pytest.raises(CheckpointError, match=other):
            going_on()
    finally:
        own_data.write_bytes(before)


@pytest.mark.usefixtures("without_engines")
def test_a_finished_run_says_so_before_any_engine_starts(
    going_on: Train, tiny_run: list[str], own_data: Path, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With the same settings it ends well; with others it is an error, and the record of the settings stays."""
    own = [f"data.train_files={own_data}", "trainer.max_steps=1", f"trainer.save_checkpoint_path={folder}"]
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert main([*tiny_run, *own]) == 0
    assert f"{folder}/global_step_1: all 1 steps of this run are done" in caplog.text
    more = r"all 1 steps of this run are done; raise trainer\.max_steps to add steps"
    with pytest.raises(RunFinishedError, match=more):
        going_on("trainer.max_steps=1")
    caplog.clear()
    for consent in ([], ["trainer.accept_changes=true"]):
        assert main([*tiny_run, *own, CHANGED[0], *consent]) == 2
        assert "so these changes would train nothing:\n  worker.actor.optim.lr: was 0.001, is 0.0005" in caplog.text
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


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
