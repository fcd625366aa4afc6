"""What reaches a reward function under a name of the trainer's is never a column of data."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
from PIL import Image

from cepo.config import load_config
from cepo.config.schema import DataConfig
from cepo.data.prompts import Problem
from cepo.data.row_settings import CellRules
from cepo.data.training_set import read_training_sets
from cepo.errors import ConfigError
from cepo.evaluation.benchmark_names import NamedSource
from cepo.evaluation.protocols import Rules
from cepo.evaluation.tasks import read_task
from cepo.models.interface import Video
from cepo.models.processing import Processing
from cepo.rewards.math import compute_score
from cepo.rewards.samples import TRAINERS_NAMES, require_free_names
from cepo.train import _problem_sets
from cepo.trainer.sampling import reward_input

COLUMNS: dict[str, Any] = dict.fromkeys(TRAINERS_NAMES, "from the data") | {"level": 3}


def problem_of(columns: dict[str, Any]) -> Problem:
    frames = numpy.zeros((4, 2, 2, 3), dtype=numpy.uint8)
    video = Video(frames=frames, frame_numbers=(0, 1, 2, 3), source_fps=1.0, num_source_frames=4)
    return Problem(
        prompt_id="0", text="<image>?", images=(Image.new("RGB", (7, 5)),), videos=(video,), ground_truth="7",
        solution=None, columns=columns,
    )  # fmt: skip


def test_every_name_of_the_trainer_is_in_the_one_list() -> None:
    """All of `reward_input` with images, and `extracted_answer`, which a worker with an answer function adds."""
    assert {*reward_input(problem_of({}), "3", 1, True), "extracted_answer"} == TRAINERS_NAMES


@pytest.mark.parametrize("with_images", [False, True])
def test_a_column_never_takes_a_name_of_the_trainer(with_images: bool) -> None:
    seen = reward_input(problem_of(COLUMNS), "3", 1, with_images)
    assert "from the data" not in [value for value in seen.values() if isinstance(value, str)]
    assert seen["level"] == 3
    assert seen["response"] == "3"
    assert seen["ground_truth"] == "7"
    assert seen["prompt"] == "<image>?"
    assert ("images" in seen) == with_images
    assert "extracted_answer" not in seen


def test_an_extracted_answer_in_the_data_makes_no_response_right() -> None:
    """The answer 3 to a problem whose answer is 7, and whose row says that 7 was extracted."""
    sample = reward_input(problem_of({"extracted_answer": "7"}), r"so \boxed{3}", 5)
    assert compute_score([sample])[0]["accuracy"] == 0.0


def rows_with(folder: Path, name: str, value: object, **usual: object) -> str:
    file = folder / "rows.jsonl"
    row = {"question": "What is 3 + 4?", "gold": "7", "level": 3, **usual, name: value}
    file.write_text(f"{json.dumps(row)}\n" * 2, encoding="utf-8")
    return str(file)


def settings(file: str, **further: Any) -> DataConfig:
    keys = {"prompt_key": "question", "answer_key": "gold", "rollout_batch_size": 2}
    return DataConfig(train_files=file, **(keys | further))


@pytest.mark.parametrize("name", sorted(TRAINERS_NAMES))
def test_a_column_of_a_taken_name_is_refused_at_the_start(
    name: str, tmp_path: Path, tiny_processing: Processing
) -> None:
    """For training, for validation and for an evaluation; the error names the column and says to rename it."""
    value = [] if name in ("images", "videos") else "7"
    bad = rows_with(tmp_path, name, value)
    (tmp_path / "good").mkdir()
    good = rows_with(tmp_path / "good", "level", 4)
    further = {"image_key": "figure", "video_key": "clip"}
    config = replace(load_config(["config=microgeo/grpo"]), data=settings(bad, **further))
    said = rf"column '{name}'.*Rename the column.*extracted_answer, ground_truth, images, prompt, response"
    with pytest.raises(ConfigError, match=said):
        read_training_sets(settings(bad, **further), tiny_processing)
    with pytest.raises(ConfigError, match=said):
        _problem_sets(settings(good, val_files=bad, **further), tiny_processing, with_solutions=False)
    with pytest.raises(ConfigError, match=said):
        read_task(NamedSource(name=None, source=bad), config, tiny_processing, Rules())


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("prompt", "prompt_key", "What is 3 + 4?"),
        ("ground_truth", "answer_key", "7"),
        ("response", "solution_key", "3 + 4 is 7."),
        ("images", "image_key", []),
        ("images", "teacher_image_key", []),
        ("videos", "video_key", []),
    ],
)
def test_a_column_that_a_setting_reads_may_have_any_name(
    name: str, key: str, value: object, tmp_path: Path, tiny_processing: Processing
) -> None:
    """It is read as what the setting says, and the reward function gets the trainer's value under the name."""
    file = rows_with(tmp_path, name, value)
    problem = read_training_sets(settings(file, **{"image_key": "figure", key: name}), tiny_processing)[0]
    seen = reward_input(problem, "3", 1)
    assert seen["prompt"] == "What is 3 + 4?"
    assert seen["ground_truth"] == "7"
    assert seen["response"] == "3"
    assert problem.solution == ("3 + 4 is 7." if key == "solution_key" else None)


@pytest.mark.parametrize(
    ("columns", "keys"),
    [
        (["images", "problem", "answer"], {"prompt_key": "problem"}),
        (
            ["data_source", "prompt", "images", "ability", "reward_model", "extra_info"],
            {"answer_key": "reward_model.ground_truth"},
        ),
        (["prompt", "answer", "images", "videos", "solution"], {}),
        (["ground_truth"], {"answer_key": "ground_truth.target"}),
    ],
)
def test_the_columns_of_public_sets_are_read(columns: list[str], keys: dict[str, Any]) -> None:
    """EasyR1's Geometry3K, verl's files with a key into a column, this project's own names, a key into a taken name."""
    require_free_names("rows", columns, CellRules(**keys).columns)
