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
from training_runs import Train, actor_of, whole

from cepo.errors import CheckpointError
from cepo.metrics import mean_value
from cepo.microgeo.world import split_problems, write_problems
from cepo.train import main
from cepo.trainer.loop import Trainer
from cepo.trainer.run_policy import RunFinishedError

pytestmark = pytest.mark.heavy

CHANGED = [f"worker.actor.optim.{each}" for each in ("lr=5e-4", "weight_decay=0.25", "betas=[0.8,0.95]")]


@pytest.fixture
def own_data(problem_file: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(problem_file, tmp_path))


@pytest.fixture
def folder(once: Train, tmp_path: Path) -> Path:
    """A copy of a run folder after 1 step."""
    return Path(shutil.copytree(once("trainer.max_steps=1").folder, tmp_path / "run"))


@pytest.fixture
def going_on(train: Train, own_data: Path, folder: Path) -> Train:
    """Continues that run to 2 steps."""
    return partial(train, f"data.train_files={own_data}", "trainer.max_steps=2")


def test_changed_settings_need_a_word_and_the_record_keeps_both(
    going_on: Train, tiny_run: list[str], own_data: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The optimizer has its old moments and the new settings. Those that decide nothing, and other paths, need none."""
    with monkeypatch.context() as patch:
        patch.setattr("cepo.train.build_backend", None)  # no model is loaded
        with pytest.raises(CheckpointError) as refused:
            going_on(*CHANGED)
    assert str(refused.value).splitlines() == [
        f"settings that decide what is trained have changed since {folder}/global_step_1:",
        "  worker.actor.optim.lr: was 0.001, is 0.0005",
        "  worker.actor.optim.betas: was [0.9, 0.99], is [0.8, 0.95]",
        "  worker.actor.optim.weight_decay: was 0.01, is 0.25",
        "trainer.accept_changes=true continues with them; trainer.experiment_name=<another> or "
        "trainer.find_last_checkpoint=false starts a new run",
    ]
    seen: dict[str, Any] = {}

    def look(trainer: Trainer) -> None:
        optimizer = actor_of(trainer).optimizer
        seen["groups"] = [(group["weight_decay"], tuple(group["betas"])) for group in optimizer.param_groups]
        seen["steps"] = {float(whole(state["step"])) for state in optimizer.state.values()}
        seen["moments"] = sum(float(whole(state["exp_avg_sq"]).sum()) for state in optimizer.state.values())

    done = going_on(*CHANGED, "trainer.accept_changes=true", prepare=look)
    assert seen.pop("moments") > 0
    assert seen == {"groups": [(0.25, (0.8, 0.95))], "steps": {2.0}}  # two optimizer steps per training step
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


@pytest.mark.usefixtures("no_model")
def test_other_rows_under_the_same_name_are_noticed(going_on: Train, own_data: Path) -> None:
    write_problems(own_data, split_problems(5, 8, 1)[0])
    other = r"\n  data: was \"8 rows, CRC-32 \w{8}\", is \"8 rows, CRC-32 \w{8}\"\n"
    with pytest.raises(CheckpointError, match=other):
        going_on()


@pytest.mark.usefixtures("no_model")
def test_a_finished_run_says_so_before_any_engine_starts(
    going_on: Train, tiny_run: list[str], folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With the same settings it ends well; with others it is an error, and the record of the settings stays."""
    own = ["trainer.max_steps=1", f"trainer.save_checkpoint_path={folder}"]
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


def scoring(*scores: float) -> Callable[[Trainer], None]:
    """Validations with these mean rewards, in their order."""
    remaining = iter(scores)

    def prepare(trainer: Trainer) -> None:
        scripted: Any = SimpleNamespace(
            run=lambda _: ({"val/reward": mean_value(next(remaining))}, []), num_responses=1
        )
        trainer.validator = scripted

    return prepare


@pytest.mark.parametrize(
    ("options", "runs"),
    [
        (["trainer.save_limit=3"], [(5, [0.2, 0.71239, 0.4, 0.71239, 0.3], "245", (2, 0.7124))]),
        (
            ["trainer.save_limit=1"],
            [(3, [0.8, 0.1, 0.2], "13", (1, 0.8)), (4, [0.3], "14", (1, 0.8)), (5, [0.9], "5", (5, 0.9))],
        ),
        (["trainer.val_freq=2"], [(3, [0.9, 0.1], "23", (2, 0.9))]),
        (["trainer.val_freq=-1"], [(2, [], "2", (None, None))]),
    ],
    ids=["one of equals", "across runs", "every second step", "no validation"],
)
def test_the_best_checkpoint_stays_beside_the_last(
    train: Train, problem_file: Path, options: list[str], runs: list[tuple[int, list[float], str, tuple[Any, Any]]]
) -> None:
    """Each run goes on to the given step. A score counts for the weights it was measured on only."""
    settings = [f"data.val_files={problem_file}", "worker.actor.model.lora.rank=2", "trainer.save_freq=1"]
    first = 0
    for last, scores, kept, best in runs:
        overrides = ["trainer.val_freq=1", "trainer.save_limit=1", *options, f"trainer.max_steps={last}"]
        done = train(*settings, *overrides, prepare=scoring(*scores))
        assert done.first_step == first
        assert sorted(path.name[-1] for path in done.folder.glob("global_step_*")) == list(kept)
        assert json.loads((done.folder / "checkpoint_tracker.json").read_text()) == {
            "best_global_step": best[0],
            "best_val_reward_score": best[1],
            "last_global_step": last,
            "last_actor_path": str(done.folder / f"global_step_{last}" / "actor"),
        }
        first = last
