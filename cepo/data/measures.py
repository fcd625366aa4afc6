"""Holds what a check found of all rows of a source, in arrays, and the files that the rows' images were read from."""

from __future__ import annotations

import io
import json
import os
from array import array
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from typing import Any, cast

import numpy
from numpy.typing import NDArray

from cepo.data.cache import is_settled
from cepo.data.rows import RowMeasure
from cepo.files.safe_files import OpenedFile

FileState = tuple[int, int, int, int]
"""A file's inode, size, and the times in ns of the last changes of its content and of its entry."""
MISSING: FileState = (0, 0, 0, 0)
UNKNOWN: FileState = (-1, -1, -1, -1)
"""Equals no state of a file, so that its rows are checked again."""
_BAD = -1
_LOOKING_THREADS = 8
_FILES_TOGETHER = 500
_COUNTS = ("lengths", "num_images", "num_videos", "visual_tokens")


@dataclass(frozen=True)
class CheckedRow:
    """What a check found of one row: its measure, or the reason why it is bad, and the files that it depends on."""

    measure: RowMeasure | None
    reason: str
    files: Sequence[tuple[str, FileState]]


def state_of(name: str, status: os.stat_result | None) -> FileState:
    """Returns the state of a file that was opened, or could not be.

    It is `UNKNOWN` for an address, and for a file that changed in the last seconds and may change again without a trace.
    """
    if status is None:
        return MISSING if os.path.isabs(name) else UNKNOWN
    return _state(status) if is_settled(status) else UNKNOWN


def states_of(files: Sequence[OpenedFile]) -> list[tuple[str, FileState]]:
    """Returns the state of each of the opened files."""
    return [(name, state_of(name, status)) for name, status in files]


def _state(status: os.stat_result) -> FileState:
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _present_states(paths: Sequence[str]) -> list[FileState]:
    states: list[FileState] = []
    for path in paths:
        try:
            states.append(_state(os.stat(path)))
        except (OSError, ValueError):  # ValueError: a null byte
            states.append(MISSING)
    return states


class RowMeasures:
    """The measures of a source's rows: arrays with an entry for each row, of which those of bad rows are 0.

    Attributes:
        lengths: (rows,) int32, the tokens of each prompt; -1 for a bad row.
        num_images, num_videos, visual_tokens: (rows,) int32.
        reasons: why a row is bad, by number.
    """

    def __init__(self, num_rows: int) -> None:
        self.lengths = numpy.full(num_rows, _BAD, dtype=numpy.int32)
        self.num_images = numpy.zeros(num_rows, dtype=numpy.int32)
        self.num_videos = numpy.zeros(num_rows, dtype=numpy.int32)
        self.visual_tokens = numpy.zeros(num_rows, dtype=numpy.int32)
        self.reasons: dict[int, str] = {}
        self._files = RowFiles(num_rows)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, number: int) -> RowMeasure:
        """Returns the measure of a row that is not bad."""
        return RowMeasure(
            length=int(self.lengths[number]),
            num_images=int(self.num_images[number]),
            num_videos=int(self.num_videos[number]),
            visual_tokens=int(self.visual_tokens[number]),
        )

    def put(self, number: int, row: CheckedRow) -> None:
        """Notes what was found of a row, in place of what was found before."""
        self.reasons.pop(number, None)
        measure = row.measure
        if measure is None:
            self.reasons[number] = row.reason
            measure = RowMeasure(length=_BAD, num_images=0, num_videos=0, visual_tokens=0)
        self.lengths[number] = measure.length
        self.num_images[number] = measure.num_images
        self.num_videos[number] = measure.num_videos
        self.visual_tokens[number] = measure.visual_tokens
        self._files.put(number, row.files)

    def stale_rows(self) -> list[int]:
        """Returns the rows whose files have changed, vanished or appeared since they were checked."""
        return self._files.stale_rows()

    def encoded(self) -> bytes:
        """Returns the content as bytes, from which `decoded` makes an equal object."""
        if self._files.has_leftovers:
            self._files = self._files.compacted()
        reasons = {str(row): reason for row, reason in self.reasons.items()}
        texts = json.dumps({"paths": self._files.paths, "reasons": reasons}).encode()
        arrays: dict[str, Any] = {name: getattr(self, name) for name in _COUNTS}
        arrays.update(self._files.arrays())
        stream = io.BytesIO()
        numpy.savez(stream, texts=numpy.frombuffer(texts, dtype=numpy.uint8), **arrays)
        return stream.getvalue()


def decoded(content: bytes, num_rows: int) -> RowMeasures:
    """Returns the measures that `RowMeasures.encoded` wrote for as many rows; raises `ValueError` for anything else."""
    try:
        with numpy.load(io.BytesIO(content), allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
        texts = json.loads(arrays.pop("texts").tobytes())
        measures = RowMeasures(num_rows)
        for name in _COUNTS:
            setattr(measures, name, _checked_array(arrays[name], (num_rows,), numpy.int32))
        reasons = {int(row): str(reason) for row, reason in texts["reasons"].items()}
        measures.reasons.update(reasons)
        bad_rows: list[int] = numpy.flatnonzero(measures.lengths < 0).tolist()
        if reasons.keys() != set(bad_rows):
            raise ValueError("the reasons are not those of the bad rows")
        measures._files.fill([str(path) for path in texts["paths"]], arrays)  # pyright: ignore[reportPrivateUsage]
    except ValueError:
        raise
    except Exception as error:  # damaged archives make numpy raise almost anything
        raise ValueError(f"{type(error).__name__}: {error}") from error
    return measures


def _checked_array(values: Any, shape: tuple[int, ...], kind: type[numpy.generic]) -> Any:
    if values.shape != shape or values.dtype != kind:
        raise ValueError(f"an array is {values.dtype} {values.shape} and not {kind.__name__} {shape}")
    return values


class RowFiles:
    """The files that each row depends on, each named once, with their states when the rows were checked."""

    def __init__(self, num_rows: int) -> None:
        self.paths: list[str] = []
        self._numbers: dict[str, int] = {}  # of the paths
        self._states = array("q")  # four integers for each path
        self._links = array("i")  # numbers of paths; those of a row stand together
        self._starts = numpy.zeros(num_rows, dtype=numpy.int64)  # of each row's links
        self._counts = numpy.zeros(num_rows, dtype=numpy.int32)

    def put(self, row: int, files: Sequence[tuple[str, FileState]]) -> None:
        """Notes the files of a row, in place of those before. A file that two rows saw in two states becomes unknown."""
        self._starts[row] = len(self._links)
        self._counts[row] = len(files)
        for path, state in files:
            number = self._numbers.get(path)
            if number is None:
                number = len(self.paths)
                self._numbers[path] = number
                self.paths.append(path)
                self._states.extend(state)
            elif self._state_at(number) != state:
                self._states[4 * number : 4 * number + 4] = array("q", UNKNOWN)
            self._links.append(number)

    def _state_at(self, number: int) -> FileState:
        return cast(FileState, tuple(self._states[4 * number : 4 * number + 4]))

    def stale_rows(self) -> list[int]:
        """Returns the rows with a file whose state is another than when it was noted, and forgets those files' states."""
        if not self.paths:
            return []
        starts = range(0, len(self.paths), _FILES_TOGETHER)
        parts = [self.paths[start : start + _FILES_TOGETHER] for start in starts]
        with ThreadPoolExecutor(_LOOKING_THREADS) as pool:  # a look at a file on a network takes long
            present_states = list(chain.from_iterable(pool.map(_present_states, parts)))
        noted = numpy.frombuffer(self._states, dtype=numpy.int64).reshape(-1, 4)
        present = numpy.array(present_states, dtype=numpy.int64)  # (files, 4)
        is_changed = (noted != present).any(axis=1)
        if not is_changed.any():
            return []
        rows = self._rows_with(is_changed)
        self._forget(set(numpy.flatnonzero(is_changed).tolist()))
        return rows

    def _rows_with(self, is_changed: NDArray[numpy.bool_]) -> list[int]:
        """Returns the rows that have one of the changed files; `is_changed`: (files,)."""
        links = numpy.frombuffer(self._links, dtype=numpy.int32)
        changed_links_before = numpy.concatenate([[0], numpy.cumsum(is_changed[links])])  # (links + 1,)
        ends = self._starts + self._counts
        num_changed = changed_links_before[ends] - changed_links_before[self._starts]  # (rows,)
        return numpy.flatnonzero(num_changed).tolist()

    def _forget(self, changed: Collection[int]) -> None:
        """Makes the next state that is noted for each of these files count."""
        for number in changed:
            del self._numbers[self.paths[number]]

    def compacted(self) -> RowFiles:
        """Returns an equal object without the files that no row depends on any more."""
        num_rows = len(self._starts)
        result = RowFiles(num_rows)
        for row in range(num_rows):
            start = int(self._starts[row])
            end = start + int(self._counts[row])
            files = [(self.paths[number], self._state_at(number)) for number in self._links[start:end]]
            result.put(row, files)
        return result

    @property
    def has_leftovers(self) -> bool:
        """Whether rows have been noted twice."""
        return int(self._counts.sum()) != len(self._links)

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Returns states, (files, 4), and for each row the start and the number of its files in `links`."""
        return {
            "states": numpy.frombuffer(self._states, dtype=numpy.int64).reshape(-1, 4),
            "links": numpy.frombuffer(self._links, dtype=numpy.int32),
            "starts": self._starts,
            "counts": self._counts,
        }

    def fill(self, paths: list[str], arrays: dict[str, Any]) -> None:
        """Takes what `arrays` returned; raises `ValueError` or `LookupError` if the parts do not fit one another."""
        num_rows = len(self._starts)
        states = _checked_array(arrays["states"], (len(paths), 4), numpy.int64)
        links = _checked_array(arrays["links"], (len(arrays["links"]),), numpy.int32)
        starts = _checked_array(arrays["starts"], (num_rows,), numpy.int64)
        counts = _checked_array(arrays["counts"], (num_rows,), numpy.int32)
        is_link_wrong = (links < 0) | (links >= len(paths))
        if is_link_wrong.any():
            raise ValueError("a row depends on a file that is not named")
        is_row_wrong = (starts < 0) | (counts < 0) | (starts + counts > len(links))
        if is_row_wrong.any():
            raise ValueError("a row's files are not there")
        self.paths = paths
        self._numbers = {path: number for number, path in enumerate(paths)}
        self._states = array("q", states.tobytes())
        self._links = array("i", links.tobytes())
        self._starts = starts
        self._counts = counts
