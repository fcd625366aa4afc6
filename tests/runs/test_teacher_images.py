from __future__ import annotations

from contextlib import ExitStack
from io import BytesIO
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import torch
from PIL import Image
from rounding import LOG_PROBS
from training_runs import checked_config, trainer_of

from cepo.data.dataset import ProblemSet
from cepo.errors import ConfigError, DataError
from cepo.trainer.planning import ScoredBatch


@pytest.fixture
def rows(problem_file: Path) -> list[dict[str, Any]]:
    """The problems with two further columns: `same` has the row's own images, `crop` the left half of it."""
    rows = pyarrow.parquet.read_table(problem_file).to_pylist()
    for row in rows:
        image, buffer = Image.open(BytesIO(row["images"][0]["bytes"])), BytesIO()
        image.crop((0, 0, image.width // 2, image.height)).save(buffer, format="PNG")
        row["same"], row["crop"] = row["images"], [{"bytes": buffer.getvalue(), "path": None}]
    return rows


def written(rows: list[dict[str, Any]], folder: Path) -> str:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "rows.parquet")
    return str(folder / "rows.parquet")


def scored(tiny_run: list[str], file: str, folder: Path, column: str) -> ScoredBatch:
    """The first step's batch of `rlsd`, whose teacher reads the answer."""
    arguments = [f"data.train_files={file}", "algorithm.adv_estimator=rlsd", f"data.teacher_image_key={column}"]
    with ExitStack() as stack:
        config = checked_config([*tiny_run, *arguments, f"trainer.save_checkpoint_path={folder}"])
        trainer = trainer_of(config, stack)
        return trainer.score(trainer.plan(trainer.ask(0)))


@pytest.mark.heavy
def test_only_the_teachers_log_probs_follow_its_images(
    tiny_run: list[str], rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    rows[0]["crop"] = []
    file = written(rows, tmp_path)
    none, same, crop = (scored(tiny_run, file, tmp_path / column, column) for column in ("null", "same", "crop"))
    assert torch.equal(same.old_log_probs, none.old_log_probs)
    # The teacher with other images shares no prefix with the student, so passes are packed otherwise and rounded otherwise.
    torch.testing.assert_close(crop.old_log_probs, none.old_log_probs, rtol=0, atol=LOG_PROBS)
    teachers = [each.teacher_log_probs["correct"] for each in (none, same, crop)]
    assert torch.equal(teachers[0], teachers[1])
    changed = ((teachers[0] - teachers[2]).abs() > 100 * LOG_PROBS).any(dim=1)
    asked = (teachers[0] != none.old_log_probs).any(dim=1)
    own = torch.tensor([problem.prompt_id == "0" for problem in none.rollouts.problems for _ in range(4)])
    assert changed.any()
    assert torch.equal(changed, asked & ~own)


def test_images_of_another_number_or_no_column_are_refused(
    tiny_run: list[str], rows: list[dict[str, Any]], tmp_path: Path, tiny_processing: Any
) -> None:
    rows[2]["crop"] = rows[2]["crop"] * 2
    settings = checked_config([*tiny_run, "data.teacher_image_key=crop"]).data
    with pytest.raises(DataError, match=r"row 2: column 'crop' has 2 images for the teacher, and the row has 1"):
        ProblemSet(written(rows, tmp_path), settings, tiny_processing)
    for row in rows:
        del row["crop"]
    problems = ProblemSet(written(rows, tmp_path), settings, tiny_processing)
    assert problems[0].teacher_images == ()
    with pytest.raises(ConfigError, match=r"data.teacher_image_key is 'crop', which .* does not have"):
        problems.require_column("teacher_image_key")
