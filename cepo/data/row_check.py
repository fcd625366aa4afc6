"""The check of a source's rows, by several processes where that is worth it; the results are kept in the cache."""

from __future__ import annotations

import hashlib
import logging
import mmap
import multiprocessing
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

import numpy
import pyarrow.feather  # pyright: ignore[reportMissingTypeStubs, reportUnusedImport]  # which makes it an attribute of pyarrow
from numpy.typing import NDArray

from cepo.data.fingerprint import file_entry, stale_rows
from cepo.data.rows import RowMeasure, RowReader
from cepo.data.tables import Rows, pyarrow
from cepo.errors import DataError
from cepo.files.own_cache import cached, has_entry
from cepo.files.safe_files import noting_opened_files
from cepo.files.trees import Tree
from cepo.hardware import num_processors
from cepo.models.text_codec import encodable
from cepo.terminal import interrupts
from cepo.terminal.progress import Progress

logger = logging.getLogger(__name__)

ROWS_TOGETHER = 16_384
"""The rows whose results are kept together: what a check that is interrupted has finished of them is found again."""
TRIAL_SECONDS = 1.0
"""How long this process checks alone at first. A fault of all rows is found then, and a small set is checked whole."""
MOST_PROCESSES = 16
LONGEST_SILENCE_SECONDS = 60.0
"""The time without a checked row after which helping processes are ended."""
_ROWS_OF_TASK = 16
_SECONDS_BETWEEN_LOOKS = 0.5
_LONGEST_REASON = 1000
_BAD = -1
COLUMNS = pyarrow.schema(
    [
        ("length", pyarrow.int32()),  # `_BAD` for a bad row
        ("num_images", pyarrow.int32()),
        ("num_videos", pyarrow.int32()),
        ("visual_tokens", pyarrow.int32()),
        ("reason", pyarrow.string()),  # why the row is bad
        ("files", pyarrow.list_(pyarrow.string())),  # that the row names, each with its state
    ]
)


Work = Callable[[Sequence[int]], Any]
"""Checks rows; returns their table of `COLUMNS`."""


@dataclass(frozen=True, kw_only=True)
class RowCheck:
    """The rows to check, and how. Results are kept under `identity`, or not at all."""

    source: str
    rows: Rows
    reader: RowReader
    identity: str | None

    def row(self, number: int) -> Tree:
        """Checks one row; returns its entries of `COLUMNS`. Raises `ConfigError` if a setting is at fault, not the row."""
        checked: Tree = {"length": _BAD, "num_images": 0, "num_videos": 0, "visual_tokens": 0, "reason": None}
        with noting_opened_files() as files:
            try:
                measure = self.reader.measure(self.rows[number])
                checked |= vars(measure)
            except DataError as error:
                checked["reason"] = encodable(str(error)[:_LONGEST_REASON])
            except RecursionError:
                checked["reason"] = "the row is nested too deeply"
        checked["files"] = [encodable(file_entry(file)) for file in files]
        return checked


class RowStats:
    """The measures of a source's rows.

    Attributes:
        measures: for each field of `RowMeasure` an array, (rows,) int32; of bad rows, `length` is -1 and all others are 0.
        reasons: why a row is bad, by number.
    """

    def __init__(self, num_rows: int) -> None:
        self.measures = {field.name: numpy.zeros(num_rows, dtype=numpy.int32) for field in fields(RowMeasure)}
        self.lengths[:] = _BAD
        self.reasons: dict[int, str] = {}

    @property
    def lengths(self) -> NDArray[numpy.int32]:
        """The tokens of each prompt."""
        return self.measures["length"]

    def __getitem__(self, number: int) -> RowMeasure:
        """Returns the measure of a row that is not bad."""
        return RowMeasure(**{name: int(values[number]) for name, values in self.measures.items()})

    def put(self, numbers: Sequence[int], checked: Any) -> None:
        """Notes what was found of rows, in place of what was found before; `checked` is a table of `COLUMNS`."""
        rows = numpy.asarray(numbers, dtype=numpy.int64)
        for name, values in self.measures.items():
            values[rows] = checked.column(name).to_numpy()
        for number, reason in zip(numbers, checked.column("reason").to_pylist(), strict=True):
            self.reasons.pop(number, None)
            if reason is not None:
                self.reasons[number] = reason


def checked_rows(check: RowCheck) -> Generator[list[tuple[Sequence[int], Any]]]:
    """Yields what is found of the rows, some at a time and in their order: their numbers and a table of `COLUMNS`.

    The first rows come twice, alone at first. Raises `ConfigError` at a row that shows a setting to be at fault.
    """
    size = len(check.rows)
    parts = [range(begin, min(begin + ROWS_TOGETHER, size)) for begin in range(0, size, ROWS_TOGETHER)]
    with Progress(f"checking {check.source}", size) as progress:
        if not parts or not _is_known(check, parts[0]):
            results = [*_trial(check)]
            yield [(range(len(results)), pyarrow.Table.from_pylist(results, schema=COLUMNS))]
            if len(results) == size:
                return
        work = partial(_checked, check, _most_processes(), progress)
        for part in parts:
            yield [*_checked_part(check, part, work)]


def _most_processes() -> int:
    """Returns how many processes can check rows: one where a process cannot be forked, which would read all rows anew."""
    return min(MOST_PROCESSES, num_processors()) if sys.platform == "linux" else 1


def _key(check: RowCheck, *facts: object) -> str:
    return hashlib.sha256(repr((check.identity, *facts)).encode()).hexdigest()[:32]


def _is_known(check: RowCheck, part: range) -> bool:
    return check.identity is not None and has_entry("checks", _key(check, part))


def _trial(check: RowCheck) -> Iterator[Tree]:
    until = time.monotonic() + TRIAL_SECONDS
    for number in range(len(check.rows)):
        if time.monotonic() > until:
            return
        yield check.row(number)


def _checked_part(check: RowCheck, part: range, work: Work) -> Iterator[tuple[Sequence[int], Any]]:
    """Yields the results of rows, and then again of those of them whose files have changed since they were kept."""
    table = _kept(check, part, _key(check, part), work)
    yield part, table
    positions, changes = stale_rows(table.column("files"))
    if positions:
        numbers = [part[position] for position in positions]
        logger.info(
            "%s: %d rows are checked again, because files that they name have changed", check.source, len(numbers)
        )
        key = None if changes is None else _key(check, numbers, changes)
        yield numbers, _kept(check, numbers, key, work)


def _kept(check: RowCheck, numbers: Sequence[int], key: str | None, work: Work) -> Any:
    """Returns the results of rows from the cache, where they are put if they are not there."""
    if check.identity is None or key is None:
        return work(numbers)
    with cached("checks", key) as entry:
        file = str(entry / "rows.arrow")
        if not os.path.exists(file):
            pyarrow.feather.write_feather(work(numbers), file)
        # Not mapped into memory: a file that is mapped could be cut.
        return pyarrow.feather.read_table(file, memory_map=False, use_threads=False)


def _checked(check: RowCheck, processes: int, progress: Progress, numbers: Sequence[int]) -> Any:
    """Checks rows; returns their table of `COLUMNS`."""
    tasks = [numbers[begin : begin + _ROWS_OF_TASK] for begin in range(0, len(numbers), _ROWS_OF_TASK)]
    tables = _by_helpers(check, tasks, processes, progress) if processes > 1 else {}
    for place, task in enumerate(tasks):
        if place in tables:
            continue
        results: list[Tree] = []
        for number in task:
            interrupts.raise_if_lost()
            results.append(check.row(number))
            progress.update()
        tables[place] = pyarrow.Table.from_pylist(results, schema=COLUMNS)
    return pyarrow.concat_tables([tables[place] for place in range(len(tasks))]).combine_chunks()


# Processes that help


def _by_helpers(check: RowCheck, tasks: Sequence[Sequence[int]], processes: int, progress: Progress) -> dict[int, Any]:
    """Returns the tables of the tasks by their places, without those that processes had which were lost."""
    tables: dict[int, Any] = {}
    places: dict[Future[Any], int] = {}
    finished: SimpleQueue[Future[Any]] = SimpleQueue()
    earlier_processes = set(multiprocessing.active_children())
    helpers: set[Any] = set()
    fork = multiprocessing.get_context("fork")
    num_checked = memoryview(mmap.mmap(-1, 8)).cast("q")  # which processes share, without a file
    pool = ProcessPoolExecutor(processes, fork, _become_helper, (check, num_checked, os.getpid()))
    try:
        with _interrupts_held():  # a process that is not yet a helper would raise them
            try:
                for place, task in enumerate(tasks):
                    future = pool.submit(_check_task, task)
                    places[future] = place
                    future.add_done_callback(finished.put)
            finally:  # also if one of the processes cannot be forked: the others would never end
                helpers = set(multiprocessing.active_children()) - earlier_processes
        # The end of the helpers is then the end of the pipe. Otherwise a result that one wrote in part is waited for for ever.
        pool._result_queue._writer.close()  # pyright: ignore
        for _ in tasks:
            future = _next(finished, num_checked)
            if future is None:
                logger.warning(
                    "no row was checked for %.0f s: the helping processes are ended", LONGEST_SILENCE_SECONDS
                )
                _end(helpers)
                future = finished.get()
            place = places[future]
            tables[place] = future.result()
            progress.update(len(tasks[place]))
    except (BrokenProcessPool, OSError, MemoryError) as error:
        logger.warning(
            "a process that checks rows of %s ended (%s); if memory has run out, that is why. This process checks its rows",
            check.source,
            error,
        )
    finally:
        _end(helpers)
        pool.shutdown(cancel_futures=True)
    return tables


@contextmanager
def _interrupts_held() -> Generator[None]:
    """Holds Ctrl-C back from this thread, and from processes that it forks; the signals that its caller held stay held."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _next(finished: SimpleQueue[Future[Any]], num_checked: memoryview[int]) -> Future[Any] | None:
    """Returns the next task that is finished; None if no row was checked for too long.

    The time is counted: all processes may be paused. Rows count, since a task with long videos may take minutes.
    """
    num_checked_before = num_checked[0]
    silence = 0.0
    while silence < LONGEST_SILENCE_SECONDS:
        interrupts.raise_if_lost()
        with suppress(Empty):
            return finished.get(timeout=_SECONDS_BETWEEN_LOOKS)
        silence = silence + _SECONDS_BETWEEN_LOOKS if num_checked[0] == num_checked_before else 0.0
        num_checked_before = num_checked[0]
    return None


def _end(helpers: set[Any]) -> None:
    """Ends processes, even those that are stopped."""
    for helper in helpers:
        helper.kill()


_check_of_helper: RowCheck | None = None
_num_checked: memoryview[int] | None = None
"""The number of rows that helpers have checked, in memory that they share; some may be missed."""


def _become_helper(check: RowCheck, num_checked: memoryview[int], parent: int) -> None:
    """Makes a forked process one that says nothing, leaves Ctrl-C to its parent, and ends with it."""
    global _check_of_helper, _num_checked
    _check_of_helper = check
    _num_checked = num_checked
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_end_with, args=(parent,), name="cepo-parent", daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_SECONDS_BETWEEN_LOOKS)
    os._exit(1)


def _check_task(numbers: Sequence[int]) -> Any:
    assert _check_of_helper is not None and _num_checked is not None, "helpers alone run tasks"
    results: list[Tree] = []
    for number in numbers:
        results.append(_check_of_helper.row(number))
        _num_checked[0] += 1
    return pyarrow.Table.from_pylist(results, schema=COLUMNS)
