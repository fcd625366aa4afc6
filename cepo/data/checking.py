"""Checks the rows of a source, by several processes if there are enough of them."""

from __future__ import annotations

import logging
import math
import pickle
import threading
import time
from collections import deque
from collections.abc import Generator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from cepo.data.check_process import CheckedChunk, CheckProcess, CheckSetup, checked_row
from cepo.data.measures import CheckedRow
from cepo.data.rows import RowReader
from cepo.errors import ConfigError, DataError
from cepo.files.trees import Tree
from cepo.hardware import num_processors
from cepo.terminal.progress import Progress

logger = logging.getLogger(__name__)

TRIAL_SECONDS = 1.0
"""How long this process checks alone before it decides about others."""
WORTHWHILE_SECONDS = 10.0
"""The remaining time from which others are started: each takes about 4 s of a processor to load its libraries."""
MOST_PROCESSES = 16
"""The most processes, this one included: it hands out the rows, and could not serve many more."""
_CHUNK_SECONDS = 0.1
_MOST_ROWS_TOGETHER = 256


@dataclass(frozen=True)
class _Chunk:
    """Rows that one process checks: `start` is the position of the first in the list of all rows to check."""

    start: int
    numbers: Sequence[int]


class _Work:
    """The chunks that have not been handed out, and the results that have not been read; for several threads."""

    def __init__(self, rows: Any, numbers: Sequence[int]) -> None:
        self._rows = rows
        self._numbers = numbers
        self._reading = threading.Lock()
        self._next = 0
        self._returned: deque[_Chunk] = deque()
        self._results: dict[int, CheckedChunk] = {}  # by the start of the chunk
        self._changed = threading.Condition()
        self.seconds_per_row = _CHUNK_SECONDS  # until it is known, a chunk is a row

    def take(self) -> _Chunk | None:
        """Returns the next chunk; None if there is none at the moment."""
        with self._changed:
            if self._returned:
                return self._returned.popleft()
            size = min(_MOST_ROWS_TOGETHER, max(1, int(_CHUNK_SECONDS / self.seconds_per_row)))
            numbers = self._numbers[self._next : self._next + size]
            if not numbers:
                return None
            chunk = _Chunk(self._next, numbers)
            self._next += len(numbers)
            return chunk

    def read(self, chunk: _Chunk) -> list[Tree | DataError]:
        """Returns the chunk's rows as the source has them, and the error in place of one that cannot be read."""
        values: list[Tree | DataError] = []
        with self._reading:
            for number in chunk.numbers:
                try:
                    values.append(self._rows[number])
                except DataError as error:
                    values.append(error)
        return values

    def give_back(self, chunk: _Chunk) -> None:
        """Lets another process check a chunk."""
        with self._changed:
            self._returned.append(chunk)
            self._changed.notify()

    def put(self, chunk: _Chunk, result: CheckedChunk) -> None:
        with self._changed:
            self._results[chunk.start] = result
            self._changed.notify()

    def pop(self, start: int) -> CheckedChunk | None:
        """Returns what was found of the chunk at `start` if it has been checked."""
        with self._changed:
            return self._results.pop(start, None)

    def wait(self, start: int) -> None:
        """Waits until the chunk at `start` has been checked, or a chunk has been given back."""
        with self._changed:
            self._changed.wait_for(lambda: start in self._results or self._returned)


def checked_rows(
    rows: Any, numbers: Sequence[int], reader: RowReader, setup: CheckSetup
) -> Generator[tuple[int, CheckedRow]]:
    """Yields the number and the result of each row of `numbers`, in their order, and shows the progress.

    Other processes help if what remains after a second takes long; closing the generator kills them. If one of them ends,
    for example because memory has run out, this process checks its rows.

    Raises `ConfigError` at a row that shows a setting to be at fault.
    """
    work = _Work(rows, numbers)
    done = 0
    pace = _Pace()
    with ExitStack() as stack:
        progress = stack.enter_context(Progress(f"checking {setup.source}", len(numbers)))
        while done < len(numbers):
            result = work.pop(done)
            chunk = work.take() if result is None else None
            if result is not None:
                end = done + len(result.rows)
                yield from zip(numbers[done:end], _reported(result), strict=True)
                if result.error is not None:
                    raise result.error
                done = end
                progress.update(len(result.rows))
                pace.note(done)
                work.seconds_per_row = pace.seconds_per_row
            elif chunk is not None:
                work.put(chunk, _checked_here(reader, work.read(chunk)))
            else:
                work.wait(done)
            if pace.is_known and not pace.has_led_to_help:
                pace.has_led_to_help = True
                number = num_helpers(pace.seconds_per_row * (len(numbers) - done))
                stack.enter_context(_Helpers(number, work, setup))


class _Pace:
    """The time that a row takes; that of the first, which starts the renderer of chat templates, is left out."""

    def __init__(self) -> None:
        self.seconds_per_row = _CHUNK_SECONDS  # until it is known, a chunk is a row
        self.is_known = False
        self.has_led_to_help = False
        self._first: tuple[float, int] | None = None

    def note(self, done: int) -> None:
        """Notes that `done` rows have been checked by now."""
        now = time.monotonic()
        if self._first is None:
            self._first = now, done
            return
        begin, num_at_begin = self._first
        self.seconds_per_row = max(1e-6, (now - begin) / (done - num_at_begin))
        self.is_known = now - begin >= TRIAL_SECONDS


def num_helpers(remaining_seconds: float) -> int:
    """Returns how many processes to start beside this one for work that would take this one so long."""
    if remaining_seconds < WORTHWHILE_SECONDS:
        return 0
    useful = math.ceil(remaining_seconds / WORTHWHILE_SECONDS)
    return min(num_processors() - 1, MOST_PROCESSES - 1, useful)


def _reported(result: CheckedChunk) -> list[CheckedRow]:
    """Logs what was logged while a chunk was checked, and returns its rows."""
    for name, level, text in result.messages:
        logging.getLogger(name).log(level, "%s", text)
    return result.rows


def _checked_here(reader: RowReader, rows: Sequence[Tree | DataError]) -> CheckedChunk:
    result = CheckedChunk()
    for row in rows:
        try:
            result.rows.append(checked_row(reader, row))
        except ConfigError as error:
            result.error = error
            break
    return result


class _Helpers:
    """Processes that take part in the work inside this context, each served by a thread."""

    def __init__(self, number: int, work: _Work, setup: CheckSetup) -> None:
        self._number = number
        self._work = work
        self._setup = setup
        self._is_over = False
        self._processes: list[CheckProcess] = []
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> None:
        if self._number > 0:
            logger.info("%d processes check the rows of %s", self._number + 1, self._setup.source)
        try:
            for _ in range(self._number):
                process = CheckProcess(self._setup)
                self._processes.append(process)
                thread = threading.Thread(target=self._serve, args=(process,), name="cepo-checking", daemon=True)
                thread.start()
                self._threads.append(thread)
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        self._is_over = True
        for process in self._processes:
            process.kill()
        for thread in self._threads:
            thread.join()
        for process in self._processes:
            process.close()

    def _serve(self, process: CheckProcess) -> None:
        """Lets a process check chunks until there are none; chunks without a result go back to the work."""
        held: deque[tuple[_Chunk, bytes]] = deque()
        try:
            process.wait_until_ready()
            self._take(held)
            while held:
                chunk, rows = held[0]
                process.send(rows)
                self._take(held)  # while the process is busy, so that it need not wait for its next chunk
                result = process.received()
                if result.failure is not None:
                    logger.warning("a process that checks rows failed: %s", result.failure)
                    return
                self._work.put(chunk, result)
                held.popleft()
        except (EOFError, OSError):
            if not self._is_over:
                logger.warning(
                    "a process that checks rows ended with %s; if memory has run out, that is why. The others check its rows",
                    process.ending(),
                )
        except Exception:  # whatever a row does to pickle
            logger.warning("rows cannot be handed to another process", exc_info=True)
        finally:
            for chunk, _ in held:
                self._work.give_back(chunk)

    def _take(self, held: deque[tuple[_Chunk, bytes]]) -> None:
        chunk = self._work.take()
        if chunk is None:
            return
        try:
            held.append((chunk, pickle.dumps(self._work.read(chunk), protocol=pickle.HIGHEST_PROTOCOL)))
        except BaseException:
            self._work.give_back(chunk)
            raise
