"""Reads the recorded responses of a run of cepo, without the numbers of their tokens."""

# pyright: basic
# pyarrow has no types.
from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow
import pyarrow.compute

from cepo.files.safe_files import damaged_as
from cepo.report.responses import RecordedResponse, ResponseGroup, groups_of
from cepo.run_folder.layout import IMAGES_FOLDER, ROLLOUTS_FOLDER
from cepo.run_folder.trace import read_step, recorded_steps, require_columns

STEP_FILES = f"{ROLLOUTS_FOLDER}/step_*.parquet"
_LENGTHS = "token_advantages"
_COLUMNS = [
    "step",
    "group",
    "problem",
    "ground_truth",
    "response",
    "finished",
    "reward",
    "accuracy",
    "images",
    _LENGTHS,
]


def groups_of_run(folder: Path) -> list[ResponseGroup]:
    """Returns the recorded groups of a run, oldest first; raises `DataError` as `responses_of_step`."""
    return groups_of(response for _, file in recorded_steps(folder) for response in responses_of_step(file))


def responses_of_step(file: Path) -> Iterator[RecordedResponse]:
    """Yields what a step recorded; raises `DataError`: the file is damaged, or its columns are not those of a trace."""
    table = read_step(file, _COLUMNS)
    require_columns(table, file, _COLUMNS)
    with damaged_as(file, "cannot be read as rollouts. Remove it to read the rest"):
        lengths = pyarrow.compute.call_function("list_value_length", [table.column(_LENGTHS)]).to_pylist()
        rows = table.drop_columns(_LENGTHS).to_pylist()
    images = file.parents[1] / IMAGES_FOLDER
    for row, length in zip(rows, lengths, strict=True):
        yield RecordedResponse(
            step=row["step"],
            group=str(row["group"]),
            prompt=row["problem"].replace("<image>", "").strip(),
            response=row["response"],
            reward=row["reward"],
            length=length,
            ground_truth=row["ground_truth"],
            right=row["accuracy"] >= 0.5,
            finished=row["finished"],
            images=[str(images / Path(name).name) for name in row["images"]],
        )
