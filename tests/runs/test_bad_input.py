"""Bad input ends a run before a model is loaded, with one message that names the culprit; bad rewards cost one sample."""

from __future__ import annotations

import io
import json
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from generator_cases import picture
from safetensors.torch import load_file
from training_runs import Train, checked_config, json_lines, shared_pool

import cepo.train
from cepo.data.dataset import ProblemSet
from cepo.models.processing import Processing
from cepo.trainer.checkpoints import written_files

Command = Callable[..., str]
pytestmark = pytest.mark.heavy  # each mistake is a run of its own

GOOD = {"images": ["good.png"], "problem": "<image>Find x.", "answer": "4"}


@pytest.fixture
def refused(
    tiny_run: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> Command:
    """Runs the command with overrides that must end it before a model is loaded; gives the one message."""

    def no_model(*_: object) -> None:
        raise AssertionError("a model was about to be loaded")

    def command(*overrides: str, arguments: Sequence[str] = tiny_run) -> str:
        monkeypatch.setattr(cepo.train, "build_backend", no_model)
        monkeypatch.setattr("cepo.rewards.pool.RewardPool", shared_pool)
        caplog.clear()
        code = cepo.train.main([*arguments, f"trainer.save_checkpoint_path={tmp_path / 'run'}", *overrides])
        ours = [record for record in caplog.records if record.name.startswith("cepo")]
        errors = [record.getMessage() for record in ours if record.levelname == "ERROR"]
        assert code == 2
        assert len(errors) == 1, errors
        assert not (tmp_path / "run").exists()
        return errors[0]

    return command


def write_rows(folder: Path, rows: Sequence[dict[str, Any]]) -> Path:
    """A data file of these rows beside pictures that are whole, cut short, thin and no pictures at all."""
    picture(1).save(folder / "good.png")
    picture(2, (400, 2)).resize((800, 2)).save(folder / "thin.png")
    (folder / "text.png").write_text("this is no picture")
    for name, image_format in (("cut.png", "PNG"), ("cut.jpg", "JPEG")):
        buffer = io.BytesIO()
        picture(3, (256, 256)).save(buffer, format=image_format)
        (folder / name).write_bytes(buffer.getvalue()[: len(buffer.getvalue()) // 2])
    file = folder / "problems.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"problem": "<image><image>Find x."}, ["2 '<image>'", "1 images"]),
        ({"images": ["text.png"]}, ["cannot be read", "text.png"]),
        ({"images": ["cut.png"]}, ["damaged"]),
        ({"images": ["thin.png"]}, ["800 x 2", "at most 200"]),
        ({"answer": None}, ["'answer' is empty"]),
        ({"problem": ""}, ["'problem' is empty"]),
    ],
)
def test_a_bad_row_ends_the_run_or_is_left_out(
    refused: Command, tmp_path: Path, tiny_run: list[str], change: dict[str, Any], words: list[str]
) -> None:
    file = write_rows(tmp_path, [GOOD, GOOD, GOOD | change, GOOD])
    options = [f"data.train_files={file}", f"data.image_dir={tmp_path}"]
    message = refused(*options)
    assert [word for word in [*words, str(file), "row 2", "data.skip_bad_rows=true"] if word not in message] == []
    config = checked_config([*tiny_run, *options, "data.skip_bad_rows=true"])
    problems = ProblemSet(str(file), config.data, Processing(config.worker.actor.model.model_path))
    assert problems.skipped == Counter(bad=1)
    assert [problem.prompt_id for problem in problems] == ["0", "1", "3"]


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_broken_weights_end_the_run_with_code_2(
    tiny_run: list[str], tiny_model_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_model_folder, model, ignore=shutil.ignore_patterns("*.safetensors"))
    if name.endswith(".bin"):
        torch.save(load_file(tiny_model_folder / "model.safetensors"), model / name)
    else:
        shutil.copyfile(tiny_model_folder / name, model / name)
    (model / name).write_bytes((model / name).read_bytes()[:-1000])
    run_folder = f"trainer.save_checkpoint_path={tmp_path / 'run'}"
    assert cepo.train.main([*tiny_run, f"worker.actor.model.model_path={model}", run_folder]) == 2
    (error,) = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert f"worker.actor.model.model_path '{model}': its weights cannot be loaded (" in error
    assert "download the folder again" in error


def test_a_reward_that_raises_or_hangs_costs_its_own_samples(train: Train, tmp_path: Path) -> None:
    reward = tmp_path / "reward.py"
    reward.write_text(
        "import time\n"
        "REWARD_TYPE = 'sequential'\n"
        "def score(sample):\n"
        "    if sample['id'] == 0:\n"
        "        raise RuntimeError('no score for problem 0')\n"
        "    if sample['id'] == 1:\n"
        "        time.sleep(600)\n"
        "    return {'overall': 1.0, 'accuracy': 1.0}\n"
    )
    options = [f"worker.reward.reward_function={reward}:score", "worker.reward.timeout_seconds=1", "worker.rollout.n=2"]
    finished = train(*options, "data.shuffle=false", "trainer.max_steps=1")
    metrics = finished.metrics[0]
    assert metrics["reward/num_raised"] == metrics["reward/num_timed_out"] == 2
    assert metrics["reward/mean"] == 0.5
    rewards = {group["prompt_id"]: [each["reward"] for each in group["rollouts"]] for group in finished.rollouts}
    assert rewards == {"0": [0, 0], "1": [0, 0], "2": [1, 1], "3": [1, 1]}


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def test_ctrl_c_during_a_checkpoint_interrupts_the_run(
    tiny_run: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cepo.workers.checkpoint.write_shards", interrupt)
    arguments = [*tiny_run, f"trainer.save_checkpoint_path={tmp_path}", "trainer.max_steps=2", "trainer.save_freq=1"]
    assert cepo.train.main(arguments) == 130
    assert [row["step"] for row in json_lines(tmp_path / "metrics.jsonl")] == [1]
    assert not list(tmp_path.glob("global_step_*"))


INTERRUPTED = {
    "trainer.save_freq=-1": [
        "no checkpoint was written yet", "starts from the beginning", "trainer.save_freq is -1"
    ],
    "trainer.find_last_checkpoint=true": ["global_step_5; the same command resumes from it"],
    "trainer.find_last_checkpoint=false": ["trainer.load_checkpoint_path={folder}/global_step_5"],
}  # fmt: skip


@pytest.mark.parametrize("override", INTERRUPTED)
def test_an_interrupted_run_says_how_to_resume(
    tiny_run: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, override: str
) -> None:  # fmt: skip
    monkeypatch.setattr(cepo.train, "build_trainer", interrupt)
    for step in () if "save_freq" in override else (4, 5):
        checkpoint = tmp_path / f"global_step_{step}"
        checkpoint.mkdir()
        (checkpoint / "trainer_state.json").write_text("{}")
        (checkpoint / "files.json").write_text(json.dumps(written_files(checkpoint)))
    assert cepo.train.main([*tiny_run, f"trainer.save_checkpoint_path={tmp_path}", override]) == 130
    message = caplog.records[-1].getMessage()
    assert [word for word in INTERRUPTED[override] if word.format(folder=tmp_path) not in message] == [], message


def test_missing_solutions_are_noticed_before_a_model_is_loaded(refused: Command, tmp_path: Path) -> None:
    rows = [{**GOOD, "problem": f"<image>Find x{number}."} for number in range(4)]
    shown = ["algorithm.adv_estimator=opsd", "algorithm.positive.source=solution", "data.shuffle=false"]
    file = write_rows(tmp_path, rows)
    files = [f"data.train_files={file}", f"data.image_dir={tmp_path}", "data.prompt_key=problem"]
    message = refused(*shown, *files)
    for words in ("algorithm.positive.source=solution", "no column 'solution'", "problem", "data.solution_key"):
        assert words in message
    solved = [{**row, "solution": text} for row, text in zip(rows, ["x = 4.", None, " ", "so 4"], strict=True)]
    message = refused(*shown, f"data.train_files={write_rows(tmp_path, solved)}", *files[1:])
    assert "2 of 4 rows" in message
    assert "row 1;" in message
