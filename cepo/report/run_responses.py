"""Reads the recorded responses of a run of cepo, without the numbers of their tokens."""

# pyright: basic
# pyarrow has no types.
from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow
import pyarrow.compute

from cepo.errors import DataError
from cepo.files.safe_files import open_regular
from cepo.report.responses import RecordedResponse, ResponseGroup, groups_of
from cepo.run_folder.layout import IMAGES_FOLDER, ROLLOUTS_FOLDER
from cepo.run_folder.trace import read_parquet

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
    files = [file for file in sorted(folder.glob(STEP_FILES)) if file.stem.removeprefix("step_").isdecimal()]
    return groups_of(response for file in files for response in responses_of_step(file))


def responses_of_step(file: Path) -> Iterator[RecordedResponse]:
    """Yields what a step recorded; raises `DataError`: the file is damaged, or lacks columns."""
    try:
        with open_regular(file, within=file.parents[1]) as opened:
            table = read_parquet(opened, _COLUMNS)
        lengths = pyarrow.compute.call_function("list_value_length", [table.column(_LENGTHS)]).to_pylist()
        rows = table.drop_columns(_LENGTHS).to_pylist()
    except (pyarrow.ArrowException, OSError, KeyError, UnicodeDecodeError) as error:
        raise DataError(
            f"{file} cannot be read as rollouts ({type(error).__name__}). Remove it to read the rest"
        ) from error
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
