"""Defines, writes and reads the files of a run folder.

| file | content |
| --- | --- |
| `metrics.jsonl` | one object per step: `{"step": 1, "reward/mean": 0.5, ...}`; step 0 is before training |
| `rollouts/`, `images/` | recorded rollouts and their images, see `cepo.tracking.trace` |
| `generations.jsonl` | one object per recorded validation sample |
| `config.yaml` | the resolved configuration |
| `environment.json` | a list: versions, commit, devices and command of the start and of every resume |
| `trackers.json` | the identifiers that external trackers gave the run, for resuming |

Non-finite values are null in the files and NaN when read.
"""

from __future__ import annotations

import io
import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cepo.errors import CepoError, DataError
from cepo.tracking.lines import finite_or_none, read_objects, to_disk
from cepo.trees import is_dict, is_list

if TYPE_CHECKING:
    from PIL.Image import Image

RECORDS_FORMAT = 1
"""The version of the run folder's format; entries of `environment.json` without a version have 1."""
METRICS_FILE = "metrics.jsonl"
GENERATIONS_FILE = "generations.jsonl"
CONFIG_FILE = "config.yaml"
ENVIRONMENT_FILE = "environment.json"
TENSORBOARD_FOLDER = "tensorboard"
TRACKERS_FILE = "trackers.json"
MLFLOW_FOLDER = "mlflow"
SWANLAB_FOLDER = "swanlab"


@dataclass(frozen=True, kw_only=True)
class MetricsRow:
    """The metrics measured after the 1-based step `step`; 0 is before training."""

    step: int
    values: Mapping[str, float]


def png_bytes(image: Image) -> bytes:
    """Encodes an image for `GroupRecord.images`."""
    buffer = io.BytesIO()
    image.convert("RGB").save(buffer, format="PNG")
    return buffer.getvalue()


def metrics_object(row: MetricsRow) -> dict[str, Any]:
    """Returns a row as an object for `metrics.jsonl`."""
    return {"step": row.step} | {name: finite_or_none(value) for name, value in row.values.items()}


def metrics_row(line: Mapping[str, Any]) -> MetricsRow:
    """Reads what `metrics_object` wrote; raises `DataError` if there is no `step`."""
    if "step" not in line:
        raise DataError(f"a row of {METRICS_FILE} has no 'step'; it has {', '.join(line) or 'nothing'}")
    try:
        values = {name: math.nan if value is None else float(value) for name, value in line.items()}
        return MetricsRow(step=int(values.pop("step")), values=values)
    except (TypeError, ValueError, OverflowError) as error:
        raise DataError(f"a row of {METRICS_FILE} holds a value that is not a number: {error}") from error


def read_metrics(run_folder: Path) -> list[MetricsRow]:
    """Returns a run's metrics in order; raises `DataError` if the folder or file is missing or a line is broken."""
    return [metrics_row(line) for line in read_objects(_existing(run_folder, METRICS_FILE))]


def read_generations(run_folder: Path) -> Iterator[dict[str, Any]]:
    """Yields the recorded validation samples, each with its `step`.

    Raises:
        DataError: a sample lacks its step, prompt or accuracy.
    """
    path = run_folder / GENERATIONS_FILE
    fields = {"step": int, "prompt_id": str, "accuracy": int | float}
    for row in read_objects(path) if path.exists() else ():
        if wrong := [name for name, kind in fields.items() if not isinstance(row.get(name), kind)]:
            raise DataError(f"{path}: a sample has no valid {wrong[0]}. Remove the file to read the rest")
        yield row


def read_environment(run_folder: Path) -> list[dict[str, Any]]:
    """Returns the entries of `environment.json`, one per start or resume; none without that file.

    Raises:
        DataError: the file is damaged.
        CepoError: a later version of cepo wrote the records in another format.
    """
    path = run_folder / ENVIRONMENT_FILE
    if not path.exists():
        return []
    try:
        entries = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is damaged: {error}") from error
    if not is_list(entries):
        raise DataError(f"{path} is damaged: it does not hold a list")
    found = [entry.get("format", 1) for entry in entries if is_dict(entry)]
    newer = [number for number in found if not isinstance(number, int) or number > RECORDS_FORMAT]
    if newer:
        raise CepoError(
            f"the records in {run_folder} have format {newer[0]!r}, but this cepo reads formats up to {RECORDS_FORMAT}; "
            "use the version that wrote them"
        )
    return entries


def write_atomically(path: Path, text: str, *, private: bool = False) -> None:
    """Writes a new file and renames it to replace the old one, so that a reader never sees a partial file.

    The content is on the disk before the rename, and the rename is when this returns. With `private`, only the owner
    may read the file.
    """
    beside = path.with_name(path.name + ".new")
    beside.unlink(missing_ok=True)
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if private else 0o666)
    with open(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)
    to_disk(path.parent)


def _existing(run_folder: Path, name: str) -> Path:
    if not run_folder.is_dir():
        raise DataError(
            f"run folder {run_folder} does not exist; give the folder a training run wrote its records into"
        )
    path = run_folder / name
    if not path.is_file():
        raise DataError(f"{path} does not exist; a run writes it when trainer.logger contains 'file'")
    return path
