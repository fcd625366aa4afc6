"""Resuming changes nothing, not a bit of a weight, not a row of the records, unless settings changed; and the best checkpoint."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from actors import differing
from generator_cases import picture
from json_files import read_lines
from training_runs import (
    ONE_STEP,
    TWO_TEACHERS,
    FinishedRun,
    Train,
    actor_of,
    around,
    checked_config,
    run,
    shared_pool,
    whole,
    write_pictured,
)

import cepo
from cepo.config import load_config
from cepo.errors import CepoError, CheckpointError
from cepo.metrics import mean_value
from cepo.microgeo.world import build_world, split_problems, write_problems
from cepo.run_folder.layout import STATE_FILE
from cepo.train import build_trainer, main
from cepo.trainer.batches import ScoredBatch
from cepo.trainer.loop import Trainer
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
TWO_STEPS = ["trainer.max_steps=2", "trainer.save_freq=1"]
SNAPSHOT = ["algorithm.teacher.source=snapshot", "algorithm.teacher.sync_every=2"]


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
    without: list[dict[str, Any]] = []
    for row in rows:
        without.append({key: value for key, value in row.items() if not key.startswith(("timing_s/", "perf/"))})
    return without


def assert_same_run(one: FinishedRun, other: FinishedRun) -> None:
    assert differing(one.parameters, other.parameters) == []
    assert differing(one.actor.teacher_weights.copies, other.actor.teacher_weights.copies) == []
    assert [row["step"] for row in other.metrics] == [1, 2, 3, 4]
    assert without_times(one.metrics) == without_times(other.metrics)
    assert one.rollouts == other.rollouts
    assert len(one.rollouts) == 4 * 4
    assert one.metrics[3]["work/teacher_rows"] > 0


def test_a_stopped_and_resumed_run_ends_with_the_same_bits(once: Train, train: Train) -> None:
    """That of full weights and an averaged teacher is stopped by a signal below."""
    options = [*LORA, *SNAPSHOT]
    assert_same_run(once(*FOUR_STEPS, *options), stopped_and_resumed(train, *options, step=3))


@pytest.mark.parametrize("num_pictures", [0, pytest.param(4, marks=pytest.mark.nightly("two runs of four steps more"))])
def test_resuming_before_an_imageless_batch_gives_the_same_bits(
    once: Train, train: Train, tmp_path: Path, num_pictures: int
) -> None:
    images_of_rows = [[picture(number)] if number < num_pictures else [] for number in range(8)]
    rows = [(images, f"What is {number}?", str(number)) for number, images in enumerate(images_of_rows)]
    options = [f"data.train_files={write_pictured(tmp_path / 'mixed.parquet', rows)}", "data.shuffle=false"]
    assert_same_run(once(*FOUR_STEPS, *options), stopped_and_resumed(train, *options, step=2))


Interrupted = Callable[..., int]


@pytest.fixture
def interrupted(tiny_run: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Interrupted:
    """The exit code of a run in `tmp_path` that hears SIGTERM so many times while it estimates in its second step."""

    def interrupted(*overrides: str, times: int = 1) -> int:
        estimate = Trainer.estimate

        def disturbed(trainer: Trainer, batch: ScoredBatch) -> TokenSignal:
            for _ in range(times if batch.rollouts.step == 1 else 0):
                os.kill(os.getpid(), signal.SIGTERM)
            return estimate(trainer, batch)

        with monkeypatch.context() as patch:
            patch.setattr(Trainer, "estimate", disturbed)
            return main([*tiny_run, *overrides, f"trainer.save_checkpoint_path={tmp_path}"])

    return interrupted


def test_a_signal_saves_the_finished_step_to_go_on_from(
    once: Train, interrupted: Interrupted, tiny_run: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Although checkpoints are written only at the end, no step is lost and no bit changes."""
    options = [*FOUR_STEPS, *AVERAGE, "trainer.save_freq=-1"]
    assert interrupted(*options) == 143
    assert "step 2 is finished and saved first (trainer.save_on_interrupt); a second one ends at once" in caplog.text
    assert f"{tmp_path}/global_step_2; the same command resumes from it" in caplog.text
    resumed = run(tiny_run, *options, folder=tmp_path)
    assert resumed.first_step == 2
    assert_same_run(once(*FOUR_STEPS, *AVERAGE), resumed)


NONE_YET = ["no checkpoint was written yet", "starts from the beginning"]


@pytest.mark.parametrize(
    ("times", "option", "words", "saved"),
    [
        (2, "trainer.save_freq=-1", [*NONE_YET, "trainer.save_freq is -1"], []),
        (1, "trainer.save_on_interrupt=false", NONE_YET, []),
        (1, "trainer.find_last_checkpoint=false", ["trainer.load_checkpoint_path={folder}/global_step_2"], ["global_step_2"]),
    ],
    ids=["a second signal", "not wanted", "not looked for"],
)  # fmt: skip
def test_an_interrupted_run_says_whether_and_how_to_resume(
    interrupted: Interrupted,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    times: int,
    option: str,
    words: list[str],
    saved: list[str],
) -> None:
    """Nothing is saved at a second signal, or if that is not wanted."""
    assert interrupted(option, times=times) == 143
    assert [path.name for path in tmp_path.glob("global_step_*")] == saved
    message = caplog.records[-1].getMessage()
    assert [word for word in words if word.format(folder=tmp_path) not in message] == [], message


def test_ctrl_c_during_a_checkpoint_interrupts_the_run(
    tiny_run: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("cepo.workers.checkpoint.write_shards", interrupt)
    assert main([*tiny_run, *TWO_STEPS, f"trainer.save_checkpoint_path={tmp_path}"]) == 130
    assert [row["step"] for row in read_lines(tmp_path / "metrics.jsonl")] == [1]
    assert not list(tmp_path.glob("global_step_*"))


@pytest.mark.parametrize("val_freq", [2, 5])
def test_a_run_stopped_before_its_last_validation_makes_it(
    interrupted: Interrupted, tiny_run: list[str], tmp_path: Path, problem_file: Path, val_freq: int
) -> None:
    """A run validates at its end, whether its last step is a multiple of `val_freq` or not; then it is finished."""
    options = [f"data.val_files={problem_file}", f"trainer.val_freq={val_freq}", "trainer.leak_probe_size=0"]
    assert interrupted(*options) == 143
    again = run(tiny_run, *options, folder=tmp_path)
    assert [row["step"] for row in again.metrics if "val/reward" in row] == [2]
    with pytest.raises(RunFinishedError, match="all 2 steps of this run are done; raise"):
        run(tiny_run, *options, folder=tmp_path)


def test_a_run_stopped_before_a_validation_resumes_with_it(
    interrupted: Interrupted, tiny_run: list[str], tmp_path: Path, problem_file: Path
) -> None:
    validated = [f"data.val_files={problem_file}", "trainer.val_freq=2", "trainer.leak_probe_size=0"]
    options = [*FOUR_STEPS, *validated, "trainer.save_freq=-1"]
    assert interrupted(*options) == 143
    resumed = run(tiny_run, *options, folder=tmp_path)
    assert [row["step"] for row in resumed.metrics if "val/reward" in row] == [2, 4]


def damage(folder: Path) -> str:
    """Flips a bit of the last checkpoint; returns what the log says of it."""
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


@pytest.mark.parametrize(
    ("spoil", "refusal"),
    [
        (leave_behind, "is not a complete checkpoint: it has no trainer_state.json"),
        (damage, r"is damaged \(.*bytes|is damaged \(.*were written"),
    ],
)
def test_a_spoilt_checkpoint_is_passed_over_or_refused_by_name(
    once: Train,
    train: Train,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    spoil: Callable[[Path], str],
    refusal: str,
) -> None:
    two_steps = once(*TWO_STEPS)
    shutil.copytree(two_steps.folder, tmp_path / "run")
    said = spoil(tmp_path / "run")
    with pytest.raises(CepoError, match=refusal):
        train(*TWO_STEPS, f"trainer.load_checkpoint_path={tmp_path}/run/global_step_2", name="other")
    second = train(*TWO_STEPS)
    assert second.first_step == 1
    assert differing(two_steps.parameters, second.parameters) == []
    assert json.loads((tmp_path / "run" / "global_step_2" / STATE_FILE).read_text())["global_step"] == 2
    assert said in caplog.text


def test_a_new_start_never_resumes_from_an_older_run(train: Train, tmp_path: Path) -> None:
    options = ["trainer.save_freq=1", "trainer.save_limit=1"]
    train(*options, "trainer.max_steps=2")
    train(*options, ONE_STEP, "trainer.find_last_checkpoint=false")
    resumed = train(*options, "trainer.max_steps=2")
    assert resumed.first_step == 1
    assert [row["step"] for row in resumed.metrics] == [1, 2]
    old = tmp_path / "run" / "earlier_run_1" / "global_step_2" / STATE_FILE
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
    tiny_run: list[str], once: Train, no_model: None, monkeypatch: pytest.MonkeyPatch, override: str, words: str
) -> None:
    folder = once(*TWO_STEPS).folder
    monkeypatch.setattr("cepo.rewards.pool.RewardPool", shared_pool)
    config = checked_config if "global_step_9" not in override else load_config  # the check itself would refuse it
    settings = [*tiny_run, f"trainer.save_checkpoint_path={folder}", "trainer.max_steps=3"]
    with ExitStack() as stack, pytest.raises(CheckpointError, match=words):
        build_trainer(config([*settings, *override.format(folder=folder).split()]), stack)


@contextmanager
def full_disk_in(*steps: int) -> Iterator[Callable[[Trainer], None]]:
    """Files above 100 kB are refused by the system from the end of these 1-based steps to that of the next."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limited(_: Trainer, train_step: Any, index: int) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000 if index + 1 in steps else limits[0], limits[1]))
        train_step(index)

    try:
        yield around("train_step", limited)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_checkpoint_without_room_is_tried_again_or_ends_it(train: Train, caplog: pytest.LogCaptureFixture) -> None:
    """Of step 2 it is written a step later; the last one's ends the run, which resumes from the one before."""
    options = ["trainer.max_steps=4", "trainer.save_freq=2"]
    last = "the checkpoint of step 4 cannot be written"
    with full_disk_in(2, 4) as prepare, pytest.raises(CheckpointError, match=last):
        train(*options, prepare=prepare)
    assert "the checkpoint of step 2 cannot be written" in caplog.text
    assert "is the disk full?" in caplog.text
    resumed = train(*options)
    assert resumed.first_step == 3
    assert sorted(path.name for path in resumed.folder.glob("*global_step_*")) == ["global_step_3", "global_step_4"]
    assert [row["step"] for row in resumed.metrics] == [1, 2, 3, 4]


CHANGED = ["worker.actor.optim.lr=5e-4", "worker.actor.optim.weight_decay=0.25", "worker.actor.optim.betas=[0.8,0.95]"]


@pytest.fixture
def own_data(problem_file: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(problem_file, tmp_path))


@pytest.fixture
def folder(once: Train, tmp_path: Path) -> Path:
    """A copy of a run folder after 1 step."""
    return Path(shutil.copytree(once(ONE_STEP).folder, tmp_path / "run"))


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
    for name, rate in (("config_until_step_1.yaml", 1e-3), ("config.yaml", 5e-4)):
        assert yaml.safe_load((folder / name).read_text())["worker"]["actor"]["optim"]["lr"] == rate
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
    message = r"\n  data: was \"8 rows, CRC-32 \w{8}\", is \"8 rows, CRC-32 \w{8}\"\n"
    with pytest.raises(CheckpointError, match=message):
        going_on()


@pytest.mark.usefixtures("no_model")
def test_a_finished_run_says_so_before_any_engine_starts(
    going_on: Train, tiny_run: list[str], folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With the same settings it ends well; with others it is an error, and the record of the settings stays."""
    arguments = [ONE_STEP, f"trainer.save_checkpoint_path={folder}"]
    contents = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert main([*tiny_run, *arguments]) == 0
    assert f"{folder}/global_step_1: all 1 steps of this run are done" in caplog.text
    more = r"all 1 steps of this run are done; raise trainer\.max_steps to add steps$"
    with pytest.raises(RunFinishedError, match=more):
        going_on(ONE_STEP)
    caplog.clear()
    for consent in ([], ["trainer.accept_changes=true"]):
        assert main([*tiny_run, *arguments, CHANGED[0], *consent]) == 2
        assert "so these changes would train nothing:\n  worker.actor.optim.lr: was 0.001, is 0.0005" in caplog.text
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == contents


def test_a_record_of_the_toy_task_runs_again_and_is_merged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It names the task, here one of eight problems, and not where this machine has built it."""
    small_world = partial(build_world, num_train=8, num_validation=8)
    monkeypatch.setattr("cepo.microgeo.world.build_world", small_world)
    run_folder = tmp_path / "run"
    arguments = [
        "config=microgeo/base",
        "data.val_files=null",
        "data.rollout_batch_size=1",
        "data.max_response_length=4",
        "worker.actor.global_batch_size=1",
        "worker.rollout.n=2",
        "trainer.val_before_train=false",
        "trainer.val_freq=-1",
        "trainer.save_freq=1",
        "trainer.logger=[file]",
        f"trainer.save_checkpoint_path={run_folder}",
    ]
    assert main([*arguments, ONE_STEP]) == 0
    record = run_folder / "config.yaml"
    settings = yaml.safe_load(record.read_text(encoding="utf-8"))
    assert settings["data"]["train_files"] == "microgeo:train"
    assert settings["worker"]["actor"]["model"]["model_path"] == "microgeo:model"
    assert main([f"config={record}", "trainer.max_steps=2"]) == 0
    merged = cepo.merge(run_folder / "global_step_2", tmp_path / "merged")
    assert (merged / "model.safetensors").is_file()


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
    for last, scores, steps, best in runs:
        overrides = ["trainer.val_freq=1", "trainer.save_limit=1", *options, f"trainer.max_steps={last}"]
        done = train(*settings, *overrides, prepare=scoring(*scores))
        assert done.first_step == first
        assert sorted(path.name[-1] for path in done.folder.glob("global_step_*")) == list(steps)
        assert json.loads((done.folder / "checkpoint_tracker.json").read_text()) == {
            "best_global_step": best[0],
            "best_val_reward_score": best[1],
            "last_global_step": last,
            "last_actor_path": str(done.folder / f"global_step_{last}" / "actor"),
        }
        first = last
