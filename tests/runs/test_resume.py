"""Stopping and resuming changes nothing: not a bit of a weight, not a row of the records."""

from __future__ import annotations

import functools
import json
import os
import resource
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from generator_cases import picture
from training_runs import (
    TWO_TEACHERS,
    FinishedRun,
    Train,
    actor_of,
    around,
    checked_config,
    differing,
    run,
    shared_pool,
    whole,
)

from cepo.config import load_config
from cepo.errors import CheckpointError
from cepo.train import build_trainer, main
from cepo.trainer.checkpoints import STATE_FILE
from cepo.trainer.loop import Trainer
from cepo.trainer.planning import ScoredBatch
from cepo.trainer.run_policy import RunFinishedError
from cepo.types import TokenSignal

pytestmark = pytest.mark.heavy

FOUR_STEPS = [
    *TWO_TEACHERS,
    "algorithm.weight.lambda_decay_steps=5",
    "trainer.max_steps=4",
    "trainer.save_freq=1",
    "worker.actor.optim.lr_scheduler_type=cosine",
    "worker.actor.optim.lr_warmup_steps=1",
]
LORA = ["worker.actor.model.lora.rank=4", "worker.actor.model.lora.alpha=8"]
AVERAGE = ["algorithm.teacher.source=ema", "algorithm.teacher.ema_decay=0.7"]
SNAPSHOT = ["algorithm.teacher.source=snapshot", "algorithm.teacher.sync_every=3"]


@pytest.fixture(scope="module")
def uninterrupted(tiny_run: list[str], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., FinishedRun]:
    """Runs of four steps, each trained once."""

    @functools.cache
    def trained(*options: str) -> FinishedRun:
        return run(tiny_run, *FOUR_STEPS, *options, folder=tmp_path_factory.mktemp("whole"))

    return trained


def stopped_and_resumed(train: Train, *overrides: str, step: int) -> FinishedRun:
    """Ctrl-C in the 1-based `step`, when its weights have moved and its row is written but no checkpoint is."""

    def interrupted(_: Trainer, train_step: Any, index: int) -> None:
        train_step(index)
        if index + 1 == step:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(*FOUR_STEPS, *overrides, prepare=around("train_step", interrupted))
    resumed = train(*FOUR_STEPS, *overrides)
    assert resumed.first_step == step - 1
    return resumed


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
    uninterrupted: Callable[..., FinishedRun], train: Train, options: list[str]
) -> None:
    assert_same_run(uninterrupted(*options), stopped_and_resumed(train, *options, step=3))


@pytest.mark.parametrize(
    "batches",
    ["text alone", pytest.param("pictures, then text", marks=pytest.mark.nightly("two runs of four steps more"))],
)
def test_resuming_before_an_imageless_batch_gives_the_same_bits(
    uninterrupted: Callable[..., FinishedRun], train: Train, tmp_path: Path, batches: str
) -> None:
    from datasets import Dataset, Features, Image, List, Value

    illustrated = [batches != "text alone"] * 4 + [False] * 4
    columns = {
        "images": [[picture(number)] if with_picture else [] for number, with_picture in enumerate(illustrated)],
        "problem": ["<image>" * with_picture + f"What is {n}?" for n, with_picture in enumerate(illustrated)],
        "answer": [str(number) for number in range(8)],
    }
    features = Features({"images": List(Image()), "problem": Value("string"), "answer": Value("string")})
    Dataset.from_dict(columns, features=features).to_parquet(str(tmp_path / "mixed.parquet"))
    options = [f"data.train_files={tmp_path / 'mixed.parquet'}", "data.shuffle=false"]
    assert_same_run(uninterrupted(*options), stopped_and_resumed(train, *options, step=2))


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
    uninterrupted: Callable[..., FinishedRun],
    tiny_run: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Although checkpoints are written only at the end, no step is lost and no bit changes."""
    arguments = [*tiny_run, *FOUR_STEPS, *AVERAGE, "trainer.save_freq=-1"]
    assert interrupted_in(monkeypatch, arguments, signal.SIGTERM, step=2, folder=tmp_path) == 143
    assert "step 2 is finished and saved first (trainer.save_on_interrupt); a second one ends at once" in caplog.text
    assert f"{tmp_path}/global_step_2; the same command resumes from it" in caplog.text
    resumed = run(arguments, folder=tmp_path)
    assert resumed.first_step == 2
    assert_same_run(uninterrupted(*AVERAGE), resumed)


@pytest.mark.parametrize(
    ("signals", "option"),
    [([signal.SIGTERM] * 2, "trainer.save_freq=-1"), ([signal.SIGTERM], "trainer.save_on_interrupt=false")],
    ids=["a second signal", "not wanted"],
)
def test_nothing_is_saved_at_a_second_signal_or_if_not_wanted(
    tiny_run: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, signals: list[signal.Signals], option: str
) -> None:
    assert interrupted_in(monkeypatch, [*tiny_run, option], *signals, step=2, folder=tmp_path) == 143
    assert not list(tmp_path.glob("global_step_*"))


def test_a_run_interrupted_in_its_last_step_validates_if_asked(
    tiny_run: list[str], tmp_path: Path, problem_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = [*tiny_run, f"data.val_files={problem_file}", "trainer.val_freq=2", "trainer.leak_probe_size=0"]
    assert interrupted_in(monkeypatch, arguments, signal.SIGTERM, step=2, folder=tmp_path) == 143
    with pytest.raises(RunFinishedError):
        run(arguments, folder=tmp_path)
    again = run(arguments, "trainer.val_only=true", folder=tmp_path)
    assert [row["step"] for row in again.metrics if "val/reward" in row] == [2]


TWO_STEPS = ["trainer.max_steps=2", "trainer.save_freq=1"]


@pytest.fixture(scope="module")
def two_steps(tiny_run: list[str], tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    """A run that saved after each of its two steps. Read only."""
    return run(tiny_run, *TWO_STEPS, folder=tmp_path_factory.mktemp("two_steps"))


def damage(folder: Path) -> str:
    """Flips a bit of the last checkpoint, and returns what a message says of it."""
    shard = next((folder / "global_step_2" / "actor" / "distributed").glob("*.safetensors"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    return f"{shard.name}: other bytes than were written"


def leave_behind(folder: Path) -> str:
    """What an interrupted write leaves."""
    (folder / "global_step_2" / STATE_FILE).unlink()
    (folder / ".global_step_3.partial" / "actor").mkdir(parents=True)
    (folder / "global_step_7" / "actor").mkdir(parents=True)
    (folder / "global_step_bak").mkdir()
    return ""


@pytest.mark.parametrize("spoil", [leave_behind, damage])
def test_a_spoilt_checkpoint_is_passed_over_for_the_last_good(
    train: Train, two_steps: FinishedRun, tmp_path: Path, caplog: pytest.LogCaptureFixture, spoil: Callable[[Path], str]
) -> None:
    shutil.copytree(two_steps.folder, tmp_path / "run")
    said = spoil(tmp_path / "run")
    second = train(*TWO_STEPS)
    assert second.first_step == 1
    assert differing(two_steps.parameters, second.parameters) == []
    assert json.loads((tmp_path / "run" / "global_step_2" / STATE_FILE).read_text())["global_step"] == 2
    assert said in caplog.text


def test_a_damaged_checkpoint_that_is_named_is_refused(train: Train, two_steps: FinishedRun, tmp_path: Path) -> None:
    shutil.copytree(two_steps.folder, tmp_path / "copy")
    damage(tmp_path / "copy")
    with pytest.raises(CheckpointError, match=r"is damaged \(.*bytes|is damaged \(.*were written"):
        train(*TWO_STEPS, f"trainer.load_checkpoint_path={tmp_path}/copy/global_step_2")


def test_a_new_start_never_resumes_from_an_older_run(train: Train, tmp_path: Path) -> None:
    options = ["trainer.save_freq=1", "trainer.save_limit=1"]
    train(*options, "trainer.max_steps=3")
    train(*options, "trainer.max_steps=1", "trainer.find_last_checkpoint=false")
    resumed = train(*options, "trainer.max_steps=2")
    assert resumed.first_step == 1
    assert [row["step"] for row in resumed.metrics] == [1, 2]
    old = tmp_path / "run" / "earlier_run_1" / "global_step_3" / STATE_FILE
    assert old.is_file()  # nothing of the user's is deleted


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("algorithm.adv_estimator=rlsd", "adv_estimator=grpo"),
        (
            "worker.actor.model.lora.rank=4 trainer.load_checkpoint_path={folder}/global_step_1",
            "lora_rank=0, but this run has 4; .* leave out trainer.load_checkpoint_path .* `cepo merge`",
        ),
        ("trainer.load_checkpoint_path={folder}/global_step_9", "global_step_9"),
        ("trainer.save_checkpoint_path={folder}/metrics.jsonl", "cannot be written"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused_early(
    tiny_run: list[str], two_steps: FinishedRun, monkeypatch: pytest.MonkeyPatch, override: str, words: str
) -> None:
    def not_reached(*_: Any) -> Any:
        raise AssertionError("models were loaded")

    monkeypatch.setattr("cepo.train.build_backend", not_reached)
    monkeypatch.setattr("cepo.rewards.pool.RewardPool", shared_pool)
    config = checked_config if "global_step_9" not in override else load_config  # the check itself would refuse it
    settings = [*tiny_run, f"trainer.save_checkpoint_path={two_steps.folder}", "trainer.max_steps=3"]
    with ExitStack() as stack, pytest.raises(CheckpointError, match=words):
        build_trainer(config([*settings, *override.format(folder=two_steps.folder).split()]), stack)


def test_a_resumed_run_takes_moments_but_its_own_settings(train: Train) -> None:
    train("trainer.max_steps=1")
    changed = ["worker.actor.optim.weight_decay=0.25", "worker.actor.optim.betas=[0.8,0.95]"]
    seen: dict[str, Any] = {}

    def look(trainer: Trainer) -> None:
        optimizer = actor_of(trainer).optimizer
        seen["groups"] = [(group["weight_decay"], tuple(group["betas"])) for group in optimizer.param_groups]
        seen["steps"] = {float(whole(state["step"])) for state in optimizer.state.values()}
        seen["moments"] = sum(float(whole(state["exp_avg_sq"]).sum()) for state in optimizer.state.values())

    resumed = train("trainer.max_steps=2", *changed, "trainer.accept_changes=true", prepare=look)
    assert resumed.first_step == 1
    assert seen.pop("moments") > 0
    assert seen == {"groups": [(0.25, (0.8, 0.95))], "steps": {2.0}}  # two optimizer steps per training step


def test_a_checkpoint_by_path_starts_a_run_in_another_folder(train: Train, two_steps: FinishedRun) -> None:
    second = train(*TWO_STEPS, f"trainer.load_checkpoint_path={two_steps.folder / 'global_step_1'}")
    assert second.first_step == 1
    assert differing(two_steps.parameters, second.parameters) == []


@contextmanager
def full_disk_in(*steps: int) -> Iterator[Callable[[Trainer], None]]:
    """Files above 100 kB are refused by the system from the end of these 1-based steps to that of the next."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limited(_: Trainer, train_step: Any, index: int) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000 if index + 1 in steps else before[0], before[1]))
        train_step(index)

    try:
        yield around("train_step", limited)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_checkpoint_without_room_is_tried_again(train: Train, caplog: pytest.LogCaptureFixture) -> None:
    with full_disk_in(2) as prepare:
        finished = train("trainer.max_steps=4", "trainer.save_freq=2", prepare=prepare)
    assert "the checkpoint of step 2 cannot be written" in caplog.text
    assert "is the disk full?" in caplog.text
    assert sorted(path.name for path in finished.folder.glob("*global_step_*")) == ["global_step_3", "global_step_4"]
    assert [row["step"] for row in finished.metrics] == [1, 2, 3, 4]


def test_a_last_checkpoint_without_room_ends_the_run(train: Train) -> None:
    train("trainer.max_steps=1")
    with full_disk_in(2) as prepare, pytest.raises(CheckpointError, match="the checkpoint of step 2 cannot be written"):
        train("trainer.max_steps=2", prepare=prepare)
    assert train("trainer.max_steps=2").first_step == 1
