"""Stopping and resuming changes nothing: not a bit of a weight, not a row of the records."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from training_runs import (
    EVERY_WRONG_ROLLOUT_TEACHES,
    FinishedRun,
    actor_of,
    checked_config,
    differing,
    json_lines,
    run,
    shared_pool,
    whole,
)

from cepo.config import load_config
from cepo.errors import CheckpointError
from cepo.rewards.pool import RewardPool
from cepo.train import build_trainer, main
from cepo.trainer.checkpoints import FILES_FILE, STATE_FILE, written_files
from cepo.trainer.loop import Trainer
from cepo.trainer.run_policy import RunFinishedError
from cepo.trainer.scoring import ScoredBatch
from cepo.types import TokenSignal

pytestmark = pytest.mark.heavy

FOUR_STEPS = [
    "algorithm.adv_estimator=cepo",
    EVERY_WRONG_ROLLOUT_TEACHES,
    "algorithm.weight.lambda_decay_steps=5",
    "trainer.max_steps=4",
    "trainer.save_freq=1",
    "worker.actor.optim.lr_scheduler_type=cosine",
    "worker.actor.optim.lr_warmup_steps=1",
]
LORA = ["worker.actor.model.lora.rank=4", "worker.actor.model.lora.alpha=8"]
AVERAGE = ["algorithm.teacher.source=ema", "algorithm.teacher.ema_decay=0.7"]
SNAPSHOT = ["algorithm.teacher.source=snapshot", "algorithm.teacher.sync_every=3"]


def stop_within(step: int) -> Any:
    """Ctrl-C in the 1-based `step`, when its weights have moved and its row is written but no checkpoint is."""

    def prepare(trainer: Trainer) -> None:
        train_step = trainer.train_step

        def interrupted(index: int) -> None:
            train_step(index)
            if index + 1 == step:
                raise KeyboardInterrupt

        trainer.train_step = interrupted  # type: ignore[method-assign]

    return prepare


def stopped_and_resumed(arguments: list[str], *overrides: str, folder: Path, step: int) -> FinishedRun:
    with pytest.raises(KeyboardInterrupt):
        run(arguments, *overrides, folder=folder, prepare=stop_within(step))
    assert max(map(int, (path.name[12:] for path in folder.glob("global_step_*"))), default=0) == step - 1
    return run(arguments, *overrides, folder=folder)


def without_times(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if not key.startswith(("timing_s/", "perf/"))} for row in rows]


def assert_same_run(one: FinishedRun, other: FinishedRun) -> None:
    assert differing(one.parameters, other.parameters) == []
    assert differing(one.actor.teacher_weights.state_dict(), other.actor.teacher_weights.state_dict()) == []
    assert [row["step"] for row in other.metrics] == [1, 2, 3, 4]
    assert without_times(one.metrics) == without_times(other.metrics)
    assert one.rollouts == other.rollouts
    assert len(one.rollouts) == 4 * 4
    assert one.metrics[3]["work/teacher_rows"] > 0


@pytest.mark.parametrize("options", [AVERAGE, [*LORA, *SNAPSHOT]], ids=["full, ema", "lora, snapshot"])
def test_a_stopped_and_resumed_run_ends_with_the_same_bits(
    tiny_run: list[str], tmp_path: Path, options: list[str]
) -> None:
    """The run is stopped in step 3."""
    whole = run(tiny_run, *FOUR_STEPS, *options, folder=tmp_path / "whole")
    resumed = stopped_and_resumed(tiny_run, *FOUR_STEPS, *options, folder=tmp_path / "stopped", step=3)
    assert resumed.first_step == 2
    assert_same_run(whole, resumed)


@pytest.mark.parametrize(
    "batches",
    ["text alone", pytest.param("pictures, then text", marks=pytest.mark.nightly("two runs of four steps more"))],
)
def test_resuming_before_an_imageless_batch_gives_the_same_bits(
    tiny_run: list[str], tmp_path: Path, batches: str
) -> None:
    from datasets import Dataset, Features, Image, List, Value
    from training_runs import picture

    illustrated = [batches != "text alone"] * 4 + [False] * 4
    columns = {
        "images": [[picture(number)] if with_picture else [] for number, with_picture in enumerate(illustrated)],
        "problem": ["<image>" * with_picture + f"What is {n}?" for n, with_picture in enumerate(illustrated)],
        "answer": [str(number) for number in range(8)],
    }
    features = Features({"images": List(Image()), "problem": Value("string"), "answer": Value("string")})
    Dataset.from_dict(columns, features=features).to_parquet(str(tmp_path / "mixed.parquet"))
    options = [*FOUR_STEPS, f"data.train_files={tmp_path / 'mixed.parquet'}", "data.shuffle=false"]
    whole = run(tiny_run, *options, folder=tmp_path / "whole")
    assert_same_run(whole, stopped_and_resumed(tiny_run, *options, folder=tmp_path / "stopped", step=2))


def interrupted_in(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], *signals: signal.Signals, step: int, folder: Path
) -> int:
    """The exit code of a run that hears `signals` while it estimates in the 1-based `step`."""
    estimate = Trainer.estimate

    def disturbed(trainer: Trainer, batch: ScoredBatch) -> TokenSignal:
        for number in signals if batch.rollouts.step + 1 == step else ():
            os.kill(os.getpid(), number)
        return estimate(trainer, batch)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "estimate", disturbed)
        return main([*arguments, f"trainer.save_checkpoint_path={folder}"])


def test_a_signal_saves_the_finished_step_to_go_on_from(
    tiny_run: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Although checkpoints are written only at the end, no step is lost and no bit changes."""
    arguments = [*tiny_run, *FOUR_STEPS, "trainer.save_freq=-1"]
    assert interrupted_in(monkeypatch, arguments, signal.SIGTERM, step=2, folder=tmp_path / "stopped") == 143
    assert "step 2 is finished and saved first (trainer.save_on_interrupt); a second one ends at once" in caplog.text
    assert f"{tmp_path}/stopped/global_step_2; the same command resumes from it" in caplog.text
    resumed = run(arguments, folder=tmp_path / "stopped")
    assert resumed.first_step == 2
    assert_same_run(run(arguments, folder=tmp_path / "whole"), resumed)


@pytest.mark.parametrize(
    ("signals", "option"),
    [([signal.SIGTERM] * 2, "trainer.save_freq=-1"), ([signal.SIGTERM], "trainer.save_on_interrupt=false")],
    ids=["a second signal", "not wanted"],
)
def test_nothing_is_saved_at_a_second_signal_or_if_not_wanted(
    tiny_run: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    signals: list[signal.Signals],
    option: str,
) -> None:
    assert interrupted_in(monkeypatch, [*tiny_run, option], *signals, step=2, folder=tmp_path) == 143
    assert not list(tmp_path.glob("global_step_*"))


def test_a_run_interrupted_in_its_last_step_still_validates(
    tiny_run: list[str], tmp_path: Path, problem_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = [*tiny_run, f"data.val_files={problem_file}", "trainer.val_freq=2", "trainer.leak_probe_size=0"]
    assert interrupted_in(monkeypatch, arguments, signal.SIGTERM, step=2, folder=tmp_path) == 143
    assert not [row for row in json_lines(tmp_path / "metrics.jsonl") if "val/reward" in row]
    again = run(arguments, folder=tmp_path)
    assert again.first_step == 2
    assert [row["step"] for row in again.metrics if "val/reward" in row] == [2]
    with pytest.raises(RunFinishedError):
        run(arguments, folder=tmp_path)


TWO_STEPS = ["trainer.max_steps=2", "trainer.save_freq=1"]


@pytest.fixture(scope="module")
def two_steps(tiny_run: list[str], tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    """A run that saved after each of its two steps. Read only."""
    return run(tiny_run, *TWO_STEPS, folder=tmp_path_factory.mktemp("two steps"))


def test_what_an_interrupted_write_leaves_behind_is_passed_over(
    tiny_run: list[str], two_steps: FinishedRun, tmp_path: Path
) -> None:
    shutil.copytree(two_steps.folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "global_step_2" / STATE_FILE).unlink()
    (tmp_path / ".global_step_3.partial" / "actor").mkdir(parents=True)
    (tmp_path / "global_step_7" / "actor").mkdir(parents=True)
    (tmp_path / "global_step_bak").mkdir()
    second = run(tiny_run, *TWO_STEPS, folder=tmp_path)
    assert second.first_step == 1
    assert differing(two_steps.parameters, second.parameters) == []
    assert json.loads((tmp_path / "global_step_2" / STATE_FILE).read_text())["global_step"] == 2


def test_a_new_start_never_resumes_from_an_older_run(tiny_run: list[str], tmp_path: Path) -> None:
    options = ["trainer.save_freq=1", "trainer.save_limit=1"]
    run(tiny_run, *options, "trainer.max_steps=3", folder=tmp_path)
    run(tiny_run, *options, "trainer.max_steps=1", "trainer.find_last_checkpoint=false", folder=tmp_path)
    resumed = run(tiny_run, *options, "trainer.max_steps=2", folder=tmp_path)
    assert resumed.first_step == 1
    assert [row["step"] for row in resumed.metrics] == [1, 2]
    assert (tmp_path / "earlier_run_1" / "global_step_3" / STATE_FILE).is_file()  # nothing of the user's is deleted


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("worker.actor.model.lora.rank=4", "lora_rank=0"),
        ("algorithm.adv_estimator=rlsd", "adv_estimator=grpo"),
        (
            "worker.actor.model.lora.rank=4 trainer.load_checkpoint_path={folder}/global_step_1",
            "lora_rank=0, but this run has 4; .* leave out trainer.load_checkpoint_path .* `cepo merge`",
        ),
        ("trainer.load_checkpoint_path={folder}/global_step_9", "global_step_9"),
        ("trainer.load_checkpoint_path={folder}/actorless", "no folder actor"),
        ("trainer.load_checkpoint_path={folder}/stateless", "has no valid trainer state"),
        ("trainer.save_checkpoint_path={folder}/metrics.jsonl", "cannot be written"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused_early(
    tiny_run: list[str],
    finished_step: Path,
    monkeypatch: pytest.MonkeyPatch,
    override: str,
    words: str,
) -> None:

    def not_reached(*_: Any) -> Any:
        raise AssertionError("models were loaded")

    monkeypatch.setattr("cepo.train.build_backend", not_reached)
    monkeypatch.setattr(RewardPool, "of", shared_pool)
    config = checked_config if "global_step_9" not in override else load_config  # the check itself would refuse it
    settings = [*tiny_run, f"trainer.save_checkpoint_path={finished_step}", "trainer.max_steps=2"]
    with ExitStack() as stack, pytest.raises(CheckpointError, match=words):
        build_trainer(config([*settings, *override.format(folder=finished_step).split()]), stack)


@pytest.fixture(scope="module")
def finished_step(tiny_run: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one step, and beside its checkpoint two broken ones."""
    folder = tmp_path_factory.mktemp("finished")
    run(tiny_run, "trainer.max_steps=1", folder=folder)
    state = json.loads((folder / "global_step_1" / STATE_FILE).read_text())
    (folder / "actorless").mkdir()
    (folder / "actorless" / STATE_FILE).write_text(json.dumps(state))
    (folder / "stateless" / "actor").mkdir(parents=True)
    (folder / "stateless" / STATE_FILE).write_text(json.dumps(state | {"state": {"stage": 1}}))
    for broken in (folder / "actorless", folder / "stateless"):
        (broken / FILES_FILE).write_text(json.dumps(written_files(broken)))
    return folder


def test_a_resumed_run_takes_moments_but_its_own_settings(tiny_run: list[str], tmp_path: Path) -> None:
    run(tiny_run, "trainer.max_steps=1", folder=tmp_path)
    changed = ["worker.actor.optim.weight_decay=0.25", "worker.actor.optim.betas=[0.8,0.95]"]
    seen: dict[str, Any] = {}

    def look(trainer: Trainer) -> None:
        optimizer = actor_of(trainer).optimizer
        seen["groups"] = [(group["weight_decay"], tuple(group["betas"])) for group in optimizer.param_groups]
        seen["steps"] = {float(whole(state["step"])) for state in optimizer.state.values()}
        seen["moments"] = sum(float(whole(state["exp_avg_sq"]).sum()) for state in optimizer.state.values())

    changed.append("trainer.accept_changes=true")
    resumed = run(tiny_run, "trainer.max_steps=2", *changed, folder=tmp_path, prepare=look)
    assert resumed.first_step == 1
    assert seen["groups"] == [(0.25, (0.8, 0.95))]
    assert seen["steps"] == {2.0}  # two optimizer steps per training step
    assert seen["moments"] > 0


def test_a_checkpoint_by_path_starts_a_run_in_another_folder(
    tiny_run: list[str], two_steps: FinishedRun, tmp_path: Path
) -> None:
    path = f"trainer.load_checkpoint_path={two_steps.folder / 'global_step_1'}"
    second = run(tiny_run, *TWO_STEPS, path, folder=tmp_path)
    assert second.first_step == 1
    assert differing(two_steps.parameters, second.parameters) == []


def test_a_damaged_checkpoint_is_passed_over_for_the_last_good(
    tiny_run: list[str], two_steps: FinishedRun, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(two_steps.folder, tmp_path, dirs_exist_ok=True)
    shard = next((tmp_path / "global_step_2" / "actor" / "distributed").glob("*.safetensors"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    second = run(tiny_run, *TWO_STEPS, folder=tmp_path)
    assert second.first_step == 1
    assert differing(two_steps.parameters, second.parameters) == []
    assert f"{shard.name}: other bytes than were written" in caplog.text
    shard = next((tmp_path / "global_step_2" / "actor" / "distributed").glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"is damaged \(.*bytes|is damaged \(.*were written"):
        run(tiny_run, *TWO_STEPS, f"trainer.load_checkpoint_path={tmp_path}/global_step_2", folder=tmp_path / "other")


def test_a_checkpoint_without_room_is_tried_again(
    tiny_run: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Files above 100 kB are refused by the system from step 2 to step 3, as on a full disk."""
    options = ["trainer.max_steps=4", "trainer.save_freq=2"]
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limited(trainer: Trainer) -> None:
        train_step = trainer.train_step

        def step_on_a_full_disk(index: int) -> None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000 if index == 1 else before[0], before[1]))
            train_step(index)

        trainer.train_step = step_on_a_full_disk  # type: ignore[method-assign]

    try:
        finished = run(tiny_run, *options, folder=tmp_path, prepare=limited)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "the checkpoint of step 2 cannot be written" in caplog.text
    assert "is the disk full?" in caplog.text
    assert sorted(path.name for path in tmp_path.glob("*global_step_*")) == ["global_step_3", "global_step_4"]
    assert [row["step"] for row in finished.metrics] == [1, 2, 3, 4]


def test_a_last_checkpoint_without_room_ends_the_run(tiny_run: list[str], tmp_path: Path) -> None:
    run(tiny_run, "trainer.max_steps=1", folder=tmp_path)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limited(trainer: Trainer) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))

    try:
        with pytest.raises(CheckpointError, match="the checkpoint of step 2 cannot be written"):
            run(tiny_run, "trainer.max_steps=2", folder=tmp_path, prepare=limited)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert run(tiny_run, "trainer.max_steps=2", folder=tmp_path).first_step == 1
