"""The check of a source's rows: `map` of the `datasets` library, in several processes, whose results are kept in the cache.

What `map` lacks is here: it waits for ever for a process that was stopped, knows nothing of the files that rows name, and
does not count what it reads back.
"""

from __future__ import annotations

import hashlib
import logging
import mmap
import os
import signal
import threading
import time
import warnings
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import pyarrow.compute  # pyright: ignore[reportMissingTypeStubs, reportUnusedImport]  # which makes it an attribute of pyarrow

from cepo.data.rows import RowMeasure, RowReader
from cepo.data.tables import Rows, datasets_library, pyarrow
from cepo.errors import CepoError, DataError
from cepo.files.own_cache import cached, has_entry
from cepo.files.safe_files import OpenedFile, noting_opened_files
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
WORTHWHILE_SECONDS = 2.0
"""The time that the rows together take from which several processes check them."""
MOST_PROCESSES = 16
LONGEST_SILENCE_SECONDS = 60.0
"""The time without a finished row after which helping processes are ended."""
_SECONDS_BETWEEN_LOOKS = 0.5
_LONGEST_REASON = 1000
_FILES_TOGETHER = 500
_LOOKING_THREADS = 8
_UNKNOWN = "unknown"
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
        checked["files"] = [encodable(_entry(file)) for file in files]
        return checked


class RowStats:
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

    def __getitem__(self, number: int) -> RowMeasure:
        """Returns the measure of a row that is not bad."""
        return RowMeasure(
            length=int(self.lengths[number]),
            num_images=int(self.num_images[number]),
            num_videos=int(self.num_videos[number]),
            visual_tokens=int(self.visual_tokens[number]),
        )

    def put(self, numbers: Sequence[int], checked: Any) -> None:
        """Notes what was found of rows, in place of what was found before; `checked` is a table of `COLUMNS`."""
        rows = numpy.asarray(numbers, dtype=numpy.int64)
        self.lengths[rows] = checked.column("length").to_numpy()
        self.num_images[rows] = checked.column("num_images").to_numpy()
        self.num_videos[rows] = checked.column("num_videos").to_numpy()
        self.visual_tokens[rows] = checked.column("visual_tokens").to_numpy()
        reasons: list[str | None] = checked.column("reason").to_pylist()
        for number, reason in zip(numbers, reasons, strict=True):
            if reason is None:
                self.reasons.pop(number, None)
            else:
                self.reasons[number] = reason


_active: RowCheck | None = None
_done: Any = None
"""The number of rows that each process has checked, in memory that processes share."""
_at_work: Any = None
"""The id of each process while it checks a row, otherwise 0; in memory that processes share."""


def checked_rows(check: RowCheck) -> Generator[list[tuple[Sequence[int], Any]]]:
    """Yields what is found of the rows, some at a time and in their order: their numbers and a table of `COLUMNS`.

    The first rows come twice, alone at first. Raises `ConfigError` at a row that shows a setting to be at fault.
    """
    size = len(check.rows)
    parts = [range(begin, min(begin + ROWS_TOGETHER, size)) for begin in range(0, size, ROWS_TOGETHER)]
    processes = _most_processes()
    with _activated(check), Progress(f"checking {check.source}", size) as progress, _watched(progress):
        if not parts or not _is_known(check, parts[0]):
            begin = time.monotonic()
            results = [*_trial(check)]
            yield [(range(len(results)), pyarrow.Table.from_pylist(results, schema=COLUMNS))]
            if len(results) == size:
                return
            seconds_per_row = (time.monotonic() - begin) / max(1, len(results))
            if seconds_per_row * len(parts[0]) < WORTHWHILE_SECONDS:
                processes = 1
        for part in parts:
            yield [*_checked_part(check, part, processes)]


def _most_processes() -> int:
    """Returns how many processes can check rows: one where a process cannot be forked, which would read all rows anew."""
    return min(MOST_PROCESSES, num_processors()) if _multiprocess().get_start_method() == "fork" else 1


def _multiprocess() -> Any:
    """Returns the library that starts the processes of `datasets`, of type Any."""
    import multiprocess  # pyright: ignore[reportMissingTypeStubs]

    return multiprocess


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


def _checked_part(check: RowCheck, part: range, processes: int) -> Iterator[tuple[Sequence[int], Any]]:
    """Yields the results of rows, and then again of those of them whose files have changed since they were kept."""
    table = _kept(check, part, _key(check, part), processes)
    yield part, table
    positions, entries = _stale(table)
    if positions:
        numbers = [part[position] for position in positions]
        logger.info(
            "%s: %d rows are checked again, because files that they name have changed", check.source, len(numbers)
        )
        is_kept = not any(entry.startswith(_UNKNOWN) for entry in entries)
        yield numbers, _kept(check, numbers, _key(check, numbers, entries) if is_kept else None, processes)


def _kept(check: RowCheck, numbers: Sequence[int], key: str | None, processes: int) -> Any:
    """Returns the results of rows from the cache, where they are put if they are not there."""
    if check.identity is None or key is None:
        return _mapped(check, numbers, None, processes)
    with cached("checks", key) as entry:
        return _mapped(check, numbers, entry / "rows.arrow", processes)


def _mapped(check: RowCheck, numbers: Sequence[int], file: Path | None, processes: int) -> Any:
    library = datasets_library()
    rows = library.Dataset.from_dict({"row": list(numbers)})
    options: Tree = {
        "function": _check_row,
        "input_columns": ["row"],
        "with_rank": True,
        "remove_columns": ["row"],
        "features": library.Features.from_arrow_schema(COLUMNS),
        "new_fingerprint": check.identity or "0",
        "keep_in_memory": file is None,
        "cache_file_name": None if file is None else str(file),
        "load_from_cache_file": True,
    }
    result: Any = None
    if processes > 1:
        with _own_environment(), _leaving_no_process():
            try:
                result = rows.map(**options, num_proc=processes)
            except CepoError:
                raise
            except Exception as error:  # of `datasets`, `multiprocess` or a connection
                _raise_interrupt(error)
                logger.warning(
                    "a process that checks rows of %s ended (%s); if memory has run out, that is why. This process checks "
                    "its rows",
                    check.source,
                    str(error) or type(error).__name__,
                )
    if result is None:
        result = rows.map(**options)
    # In memory of its own: files that are mapped could be cut.
    content = pyarrow.BufferOutputStream()
    with pyarrow.ipc.new_stream(content, COLUMNS) as writer:
        writer.write_table(result.data.table.cast(COLUMNS))
    return pyarrow.ipc.open_stream(content.getvalue()).read_all()


@contextmanager
def _leaving_no_process() -> Generator[None]:
    """Ends the processes that a library started inside this context and left.

    An interrupt can come while `multiprocess` starts its manager, which then waits for ever, and the end of the program
    with it.
    """
    earlier = set(_multiprocess().active_children())
    try:
        yield
    finally:
        for process in set(_multiprocess().active_children()) - earlier:
            process.kill()
            process.join()


def _raise_interrupt(error: BaseException) -> None:
    """Raises the `KeyboardInterrupt` in place of which a library raised another error."""
    interrupts.raise_if_lost()
    context = error.__context__
    while context is not None:
        if isinstance(context, KeyboardInterrupt):
            raise KeyboardInterrupt from error
        context = context.__context__


@contextmanager
def _own_environment() -> Generator[None]:
    """Restores what `map` changes: the object `os.environ` and a variable of tokenizers."""
    environment = os.environ
    name = "TOKENIZERS_PARALLELISM"
    before = environment.get(name)
    environment[name] = "false"
    try:
        yield
    finally:
        os.environ = environment  # noqa: B003  # the very object that it was
        environment.pop(name, None)
        if before is not None:
            environment[name] = before


# In a process that checks rows


def _check_row(number: int, rank: int | None) -> Tree:
    check = _active
    assert check is not None, (
        "rows are checked while a check is active, in this process or in one that was forked from it"
    )
    interrupts.raise_if_lost()
    place = (rank or 0) % MOST_PROCESSES
    _at_work[place] = os.getpid()
    try:
        return check.row(number)
    finally:
        _at_work[place] = 0
        _done[place] += 1


def _become_helper() -> None:
    """Makes a forked process one that says nothing, leaves Ctrl-C to its parent, and ends with it."""
    if _active is None:
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _allow_interrupts()
    threading.Thread(target=_end_with, args=(os.getppid(),), name="cepo-parent", daemon=True).start()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_SECONDS_BETWEEN_LOOKS)
    os._exit(1)


def _hold_interrupts() -> None:
    """Holds Ctrl-C back while a process is forked: a child that has not yet become a helper would raise it."""
    if _active is not None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})


def _allow_interrupts() -> None:
    if _active is not None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


os.register_at_fork(before=_hold_interrupts, after_in_parent=_allow_interrupts, after_in_child=_become_helper)


@contextmanager
def _activated(check: RowCheck) -> Generator[None]:
    global _active, _done, _at_work
    outer = _active, _done, _at_work
    _active = check
    _done = memoryview(mmap.mmap(-1, 8 * MOST_PROCESSES)).cast("q")
    _at_work = memoryview(mmap.mmap(-1, 8 * MOST_PROCESSES)).cast("q")
    try:
        yield
    finally:
        _active, _done, _at_work = outer


@contextmanager
def _watched(progress: Progress) -> Generator[None]:
    """Shows the rows that all processes have checked, and minds those that help if they finish none for too long."""
    is_over = threading.Event()
    done = _done

    def watch() -> None:
        shown = 0
        silence = 0.0
        while not is_over.wait(_SECONDS_BETWEEN_LOOKS):  # counted, not timed: all processes may be paused
            total = sum(done)
            progress.update(total - shown)
            silence += _SECONDS_BETWEEN_LOOKS
            if total != shown:
                silence = 0.0
            shown = total
            if silence > LONGEST_SILENCE_SECONDS:
                silence = 0.0
                _end_helpers()

    thread = threading.Thread(target=watch, name="cepo-checking", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def _end_helpers() -> None:
    """Ends the processes that are at a row. Another one waits for rows with a lock, and its death would stop the library."""
    helpers = [helper for helper in _multiprocess().active_children() if helper.pid in list(_at_work)]
    if helpers:
        logger.warning("no row was checked for %.0f s: the helping processes are ended", LONGEST_SILENCE_SECONDS)
    for helper in helpers:
        helper.kill()


# Files that rows name


def _entry(file: OpenedFile) -> str:
    """Returns a file that was opened, or could not be, with its state, as a text; the state of an address is unknown."""
    name, status = file
    if status is None:
        return f"{'-' if os.path.isabs(name) else _UNKNOWN} {name}"
    return f"{status.st_ino}:{status.st_size}:{status.st_mtime_ns}:{status.st_ctime_ns} {name}"


def _present_entries(names: Sequence[str]) -> list[str]:
    entries: list[str] = []
    for name in names:
        try:
            entries.append(_entry((name, os.stat(name))))
        except (OSError, ValueError):  # ValueError: a null byte
            entries.append(_entry((name, None)))
    return entries


def _stale(table: Any) -> tuple[list[int], list[str]]:
    """Returns the rows of a table whose files are not as they were, and how these files are now."""
    files = table.column("files").combine_chunks()
    noted: list[str] = files.flatten().unique().to_pylist()
    names = [entry.partition(" ")[2] for entry in noted]
    groups = [names[begin : begin + _FILES_TOGETHER] for begin in range(0, len(names), _FILES_TOGETHER)]
    present: list[str] = []
    with ThreadPoolExecutor(_LOOKING_THREADS) as pool:  # a look at a file on a network takes long
        for entries in pool.map(_present_entries, groups):
            present += entries
    changed: dict[str, str] = {}
    for old, new in zip(noted, present, strict=True):
        if old != new or old.startswith(_UNKNOWN):
            changed[old] = new
    if not changed:
        return [], []
    is_changed = pyarrow.compute.is_in(files.flatten(), value_set=pyarrow.array([*changed]))
    rows = pyarrow.compute.list_parent_indices(files)
    return rows.filter(is_changed).unique().to_pylist(), sorted(changed.values())
