"""Writes and reads the trace of a run: its recorded rollouts, as one Parquet file per step, and their images.

`pandas.read_parquet("RUN/rollouts")` reads the whole trace, with one row per rollout. Equal images are stored once.
`docs/tracking.md` describes the columns.
"""

# pyright: basic
# pyarrow has no types.
from __future__ import annotations

import hashlib
import io
import itertools
import logging
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from cepo.errors import DataError
from cepo.files.safe_files import LARGEST_IMAGE, damaged_as, open_regular, read_bytes
from cepo.files.trees import Fields, Tree
from cepo.run_folder.layout import IMAGES_FOLDER, ROLLOUTS_FOLDER
from cepo.run_folder.records import LARGEST_NUMBER
from cepo.run_folder.writing import write_atomically

logger = logging.getLogger(__name__)
STUDENT = "student"
"""The name of the student's own view in `RolloutRecord.log_probs`."""
TRACE_VERSION = 1
_VERSION_KEY = b"cepo_trace_version"
_REFERENCE = "reference_"
_LOG_PROBS = "log_probs_"
_INDEX = pyarrow.int32()
_TEXT = pyarrow.string()
_SCORE = pyarrow.float64()
_NUMBERS = pyarrow.list_(pyarrow.float32())
_OF_PROMPT = ("prompt_id", "problem", "ground_truth")
_OF_ROLLOUT = {
    "response": _TEXT,
    "finished": pyarrow.bool_(),
    "reward": _SCORE,
    "accuracy": _SCORE,
    "token_ids": pyarrow.list_(_INDEX),
    "tokens": pyarrow.list_(_TEXT),
    "token_advantages": _NUMBERS,
    "delta": _NUMBERS,
    "weight": _NUMBERS,
    "is_scored": pyarrow.bool_(),
}
_COLUMNS = {
    "step": _INDEX,
    "group": _INDEX,
    "rollout": _INDEX,
    **dict.fromkeys(_OF_PROMPT, _TEXT),
    "images": pyarrow.list_(_TEXT),
    **_OF_ROLLOUT,
}
"""The columns of every trace; those of views begin with `_LOG_PROBS` or `_REFERENCE`."""
_MAY_BE_NULL = ("token_ids", "delta", "weight", _LOG_PROBS, _REFERENCE)
"""The beginnings of the names of columns that may be null."""


@dataclass(frozen=True, kw_only=True)
class RolloutRecord:
    """The record of one rollout, as `docs/tracking.md` describes it; the per-token lists have one entry per token.

    `log_probs` and `references` are by view, and None where the view is the student's own or was not scored.
    """

    response: str
    tokens: Sequence[str]
    reward: float
    accuracy: float
    token_advantages: Sequence[float]
    token_ids: Sequence[int] | None = None
    delta: Sequence[float] | None = None
    weight: Sequence[float] | None = None
    log_probs: Mapping[str, Sequence[float] | None] = field(default_factory=dict[str, "Sequence[float] | None"])
    is_scored: bool = True
    references: Mapping[str, str | None] = field(default_factory=dict[str, "str | None"])
    finished: bool = True

    def __post_init__(self) -> None:
        per_token = {
            "token_ids": self.token_ids,
            "token_advantages": self.token_advantages,
            "delta": self.delta,
            "weight": self.weight,
            **self.log_probs,
        }
        for name, values in per_token.items():
            if values is not None and len(values) != len(self.tokens):
                raise DataError(f"rollout record: {name} has {len(values)} entries for {len(self.tokens)} tokens")

    @property
    def right(self) -> bool:
        return self.accuracy >= 0.5


@dataclass(frozen=True, kw_only=True)
class GroupRecord:
    """The record of all rollouts of the prompt `number` of a step, with its images, as PNG bytes."""

    step: int
    number: int = 0
    prompt_id: str
    problem: str
    ground_truth: str
    images: Sequence[bytes] = ()
    rollouts: Sequence[RolloutRecord] = field(repr=False)


class Trace:
    """Writes a run's trace, and bounds its size by recording fewer steps.

    Every recorded step k has `(k - 1) % stride == 0`. If files and images exceed `max_bytes`, the stride doubles and
    the files of other steps are removed, so that the recorded steps remain evenly spread over the run. A run that
    resumes from `last_step` removes the files of later steps.
    """

    def __init__(self, run_folder: Path, *, max_bytes: int, last_step: int | None = None) -> None:
        self._files = run_folder / ROLLOUTS_FOLDER
        self._images = run_folder / IMAGES_FOLDER
        self._max_bytes = max_bytes
        for step, file in recorded_steps(run_folder):
            if last_step is not None and step > last_step:
                file.unlink()
        self._stride = math.gcd(*(step - 1 for step, _ in recorded_steps(run_folder))) or 1
        self._size = self._measured()

    def write(self, groups: Sequence[GroupRecord]) -> None:
        if not groups or (groups[0].step - 1) % self._stride:
            return
        rows: list[Tree] = []
        for group in groups:
            rows += self._rows(group)
        first_rollout = groups[0].rollouts[0]
        table = pyarrow.Table.from_pylist(rows, schema=_schema(first_rollout.log_probs))
        content = io.BytesIO()
        pyarrow.parquet.write_table(table, content, compression="zstd")
        self._store(self._files / f"step_{groups[0].step:08d}.parquet", content.getvalue())
        self._thin()

    def _stored(self, image: bytes) -> str:
        name = _image_name(image)
        if not (self._images / name).exists():
            self._store(self._images / name, image)
        return name

    def _store(self, path: Path, content: bytes) -> None:
        path.parent.mkdir(exist_ok=True)
        write_atomically(path, content)
        self._size += len(content)

    def _rows(self, group: GroupRecord) -> Iterator[Tree]:
        prompt: Tree = {
            "step": group.step,
            "group": group.number,
            "images": [self._stored(image) for image in group.images],
        }
        for name in _OF_PROMPT:
            prompt[name] = _utf8(getattr(group, name))
        for index, rollout in enumerate(group.rollouts):
            row = prompt | {"rollout": index}
            for name in _OF_ROLLOUT:
                row[name] = getattr(rollout, name)
            row["response"] = _utf8(rollout.response)
            row["tokens"] = [_utf8(token) for token in rollout.tokens]
            for view, log_probs in rollout.log_probs.items():
                row[_LOG_PROBS + view] = log_probs
            for view, text in rollout.references.items():
                row[_REFERENCE + view] = None if text is None else _utf8(text)
            yield row

    def _thin(self) -> None:
        while self._size > self._max_bytes and self._num_kept() > 1:
            self._stride *= 2
            for step, file in recorded_steps(self._files.parent):
                if (step - 1) % self._stride:
                    _delete(file)
            used_images: set[str] = set()
            for _, file in recorded_steps(self._files.parent):
                for row in read_parquet(file, ["images"]).to_pylist():
                    used_images.update(row["images"])
            for path in self._images.glob("*.png"):
                if path.name not in used_images:
                    _delete(path)
            self._size = self._measured()

    def _num_kept(self) -> int:
        return sum((step - 1) % self._stride == 0 for step, _ in recorded_steps(self._files.parent))

    def _measured(self) -> int:
        files = [*self._files.glob("*.p*"), *self._images.glob("*.p*")]
        return sum(file.stat().st_size for file in files)


def read_rollouts(run_folder: Path) -> Iterator[GroupRecord]:
    """Yields the recorded groups of a run, oldest first.

    Raises `DataError`: a file or an image is damaged, lacks columns, or was written in another version of the format.
    """
    for file, table in _checked_tables(run_folder):
        with damaged_as(file, "has text that is not UTF-8"):
            rows_of_step: list[Tree] = table.to_pylist()
        for number, rows in itertools.groupby(rows_of_step, key=lambda row: row["group"]):
            yield _group_record(file, number, list(rows))


def _group_record(file: Path, number: int, rows: Sequence[Fields]) -> GroupRecord:
    rollouts: list[RolloutRecord] = []
    first_row = rows[0]
    images = [_image(file, name) for name in first_row["images"]]
    for row in rows:
        fields = {name: row[name] for name in _OF_ROLLOUT}
        log_probs = _by_view(row, _LOG_PROBS)
        references = _by_view(row, _REFERENCE)
        try:
            rollouts.append(RolloutRecord(**fields, log_probs=log_probs, references=references))
        except DataError as error:
            raise DataError(f"{file}: {error}. Remove the file to read the rest") from error
    return GroupRecord(
        step=first_row["step"],
        number=number,
        images=images,
        rollouts=rollouts,
        **{name: first_row[name] for name in _OF_PROMPT},
    )


def _by_view(row: Fields, beginning: str) -> Tree:
    return {name.removeprefix(beginning): value for name, value in row.items() if name.startswith(beginning)}


def read_rollout_table(run_folder: Path) -> pyarrow.Table:
    """Returns all recorded rollouts of a run, one row each, oldest first; raises as `read_rollouts`."""
    tables = [table for _, table in _checked_tables(run_folder)]
    if not tables:
        return _schema(()).empty_table()
    return pyarrow.concat_tables(tables, promote_options="default")


def _checked_tables(run_folder: Path) -> Iterator[tuple[Path, Any]]:
    for _, file in recorded_steps(run_folder):
        table = read_step(file)
        version = (table.schema.metadata or {}).get(_VERSION_KEY, b"none")
        if version != str(TRACE_VERSION).encode():
            raise DataError(
                f"{file} has trace version {version[:20].decode(errors='replace')}, but this cepo reads version {TRACE_VERSION}"
            )
        require_columns(table, file)
        yield file, table.replace_schema_metadata(None)  # which could name other columns for pandas


def read_step(file: Path, columns: Sequence[str] | None = None) -> Any:
    """Returns the table of a step's file; raises `DataError` if it is damaged, or lacks one of these columns."""
    try:
        with open_regular(file, within=file.parents[1]) as opened:
            return read_parquet(opened, columns)
    except (pyarrow.ArrowException, OSError, MemoryError) as error:
        raise DataError(
            f"{file} cannot be read as Parquet ({type(error).__name__}). Remove it to read the rest"
        ) from error


def read_parquet(file: Any, columns: Sequence[str] | None = None) -> Any:
    """Returns a table. Without Arrow's threads, some of which still ran when a process ended, which aborted it."""
    return pyarrow.parquet.read_table(file, columns=columns, use_threads=False, pre_buffer=False)


def require_columns(table: Any, file: Path, names: Collection[str] | None = None) -> None:
    """Rejects a table with missing columns, wrong types, values that no run records, or nulls where none are allowed.

    `names` are the columns to look at, by default all of a trace.
    """
    views = [name.removeprefix(_LOG_PROBS) for name in table.column_names if name.startswith(_LOG_PROBS)]
    for column in _schema(views):
        if names is not None and column.name not in names:
            continue
        values = table.column(column.name) if column.name in table.column_names else None
        if values is None or values.type != column.type:
            problem = "is missing" if values is None else f"has the type {values.type}, not {column.type}"
        elif values.null_count and not column.name.startswith(_MAY_BE_NULL):
            problem = "has no value in some rows"
        elif pyarrow.types.is_list(column.type) and any(part.flatten().null_count for part in values.chunks):
            problem = "has lists with no value at some places"
        elif column.name == "step" and any(value != _step_of(file) for value in values.to_pylist()):
            problem = "has another step than the file's name"
        elif column.type == _SCORE and not all(abs(value) <= LARGEST_NUMBER for value in values.to_pylist()):
            problem = "has a number that is not finite in float32"
        else:
            continue
        raise DataError(f"{file}: the column '{column.name}' {problem}. Remove the file to read the rest")


def _image(file: Path, name: str) -> bytes:
    """Reads an image of the run. Its name must be the digest of its content, so a trace cannot refer to other files."""
    images = file.parents[1] / IMAGES_FOLDER
    try:
        content = read_bytes(images / name, within=images, largest=LARGEST_IMAGE)
        if _image_name(content) != name:
            raise DataError("its content is another's")
    except DataError as error:
        raise DataError(
            f"{file}: the image {name!r} is not in the run's images: {error}. Remove the file to read the rest"
        ) from error
    return content


def _image_name(image: bytes) -> str:
    return f"{hashlib.sha256(image).hexdigest()[:32]}.png"


def _schema(views: Collection[str]) -> Any:
    """Returns the columns: those of every run, and for each view its log-probs and the text that its teacher saw."""
    log_probs = {_LOG_PROBS + view: _NUMBERS for view in views}
    references = {_REFERENCE + view: _TEXT for view in views if view != STUDENT}
    columns = _COLUMNS | log_probs | references
    return pyarrow.schema(columns, metadata={_VERSION_KEY: str(TRACE_VERSION)})


def _delete(file: Path) -> None:
    """Deletes a file that is no longer needed; a network file system may refuse it, which harms no run."""
    try:
        file.unlink()
    except OSError as error:
        logger.warning("%s, which is no longer needed, cannot be deleted (%s); the run goes on", file, error)


def recorded_steps(run_folder: Path) -> Iterator[tuple[int, Path]]:
    for file in sorted((run_folder / ROLLOUTS_FOLDER).glob("step_*.parquet")):
        step = _step_of(file)
        if step is not None:
            yield step, file


def _step_of(file: Path) -> int | None:
    """Returns the step in the name of a trace's file, 1 or more; None for another name."""
    number = file.stem.removeprefix("step_")
    return int(number) if number.isdecimal() and int(number) > 0 else None


def _utf8(text: str) -> str:
    """Escapes lone surrogates, which UTF-8 cannot encode."""
    return text.encode("utf-8", errors="backslashreplace").decode("utf-8")
