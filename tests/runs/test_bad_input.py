"""Bad input ends a run before a model is loaded, with one message that names the culprit; bad rewards cost one sample."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from generator_cases import picture
from safetensors.torch import load_file
from training_runs import Train, checked_config

import cepo.train
from cepo.data.dataset import ProblemSet
from cepo.errors import ConfigError, DataError
from cepo.models.processing import Processing

pytestmark = pytest.mark.heavy  # each mistake is a run of its own

GOOD = {"images": ["good.png"], "problem": "<image>Find x.", "answer": "4"}


def write_rows(folder: Path, *changes: dict[str, Any]) -> Path:
    """A data file of good rows with these changes, beside pictures that are whole, cut short, thin and no pictures at all."""
    picture(1).save(folder / "good.png")
    picture(2, (400, 2)).resize((800, 2)).save(folder / "thin.png")
    (folder / "text.png").write_text("this is no picture")
    (folder / "cut.png").write_bytes((folder / "good.png").read_bytes()[:6000])
    file = folder / "problems.jsonl"
    file.write_text("".join(json.dumps(GOOD | change) + "\n" for change in changes))
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
def test_a_bad_row_is_named_or_left_out(
    tiny_run: list[str], tiny_processing: Processing, tmp_path: Path, change: dict[str, Any], words: list[str]
) -> None:
    file = write_rows(tmp_path, {}, {}, change, {})
    options = [*tiny_run, f"data.train_files={file}", f"data.image_dir={tmp_path}"]
    with pytest.raises(DataError) as refused:
        ProblemSet(str(file), checked_config(options).data, tiny_processing)
    for each in [*words, str(file), "row 2", "data.skip_bad_rows=true"]:
        assert each in str(refused.value)
    problems = ProblemSet(str(file), checked_config([*options, "data.skip_bad_rows=true"]).data, tiny_processing)
    assert problems.skipped == Counter(bad=1)
    assert [problem.prompt_id for problem in problems] == ["0", "1", "3"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ([{}] * 4, ["algorithm.positive.source=solution", "no column 'solution'", "problem", "data.solution_key"]),
        ([{"solution": text} for text in ("x = 4.", None, " ", "so 4")], ["2 of 4 rows", "row 1;"]),
    ],
)
def test_missing_solutions_are_noticed_before_a_model_is_loaded(
    train: Train, no_model: None, tmp_path: Path, changes: list[dict[str, Any]], words: list[str]
) -> None:
    shown = ["algorithm.adv_estimator=opsd", "algorithm.positive.source=solution", "data.prompt_key=problem"]
    with pytest.raises(ConfigError) as refused:
        train(*shown, f"data.train_files={write_rows(tmp_path, *changes)}", f"data.image_dir={tmp_path}")
    assert [word for word in words if word not in str(refused.value)] == []
    assert not (tmp_path / "run").exists()


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
