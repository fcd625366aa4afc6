"""Shows the progress of long work in a live view on a terminal, and as lines in a log.

In a log each task has a line after 5 s, after 15 s and then each minute, also while nothing of it finishes. A task inside
another one is named in the other's lines.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Generator, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from operator import length_hint
from typing import TYPE_CHECKING, TypeVar

from cepo.terminal.lines import LogHandler

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import TaskID

    from cepo.terminal.live_view import LiveView

logger = logging.getLogger(__name__)

FIRST_LINES_SECONDS = (5.0, 15.0)
SECONDS_BETWEEN_LINES = 60.0
_SECONDS_BETWEEN_LOOKS = 1.0
_Item = TypeVar("_Item")
_view: LiveView | None = None
_tasks: list[Progress] = []
"""The tasks that run without a live view, outermost first."""
_lock = threading.RLock()
_watcher: threading.Thread | None = None


@contextmanager
def live_view() -> Generator[None]:
    """Keeps a live view at the bottom of the terminal inside this context; does nothing without a terminal."""
    global _view
    if _view is not None or not _is_terminal():
        yield
        return
    from cepo.terminal.live_view import LiveView

    _view = LiveView()
    _view.start()
    try:
        yield
    finally:
        end_view()


def log_to_stderr() -> None:
    """Shows our log on standard error, and of other libraries only warnings."""
    logging.basicConfig(level=logging.WARNING, handlers=[LogHandler()])
    logging.getLogger("cepo").setLevel(logging.INFO)


def end_view() -> None:
    """Ends the live view, if there is one, and restores the cursor."""
    global _view
    view = _view
    _view = None
    if view is not None:
        view.stop()


def view_console() -> Console | None:
    """Returns the console that prints above the live view; None without a view."""
    return None if _view is None else _view.console


@contextmanager
def phase(what: str, *, is_brief: bool = False) -> Generator[None]:
    """Reports a phase of a run that has nothing to count: elapsed seconds in the live view, and lines in a log.

    A brief one has no line in a log unless it takes longer than 5 s.
    """
    if _view is None and not is_brief:
        logger.info("%s", what)
    start = time.monotonic()
    with Progress(what, None):
        yield
    seconds = time.monotonic() - start
    if seconds >= 1 and not is_brief:
        logger.info("%s: done after %.0f s", what, seconds)


class Progress:
    """Shows the progress of the task `what` inside this context.

    It has `total` items, or None if they cannot be counted. Without a live view, one is opened that ends with this task.
    `draws`: whether the task is shown on a terminal. `is_even`: whether items finish at about one rate, from which the time
    left can be told; responses of one length finish together.
    """

    def __init__(self, what: str, total: int | None, *, draws: bool = True, is_even: bool = True) -> None:
        self.what = what
        self._total = total
        self._draws = draws
        self._is_even = is_even
        self._done = 0
        self._detail = ""
        self._start = time.monotonic()
        self._next_line_seconds = FIRST_LINES_SECONDS[0]
        self._task: TaskID | None = None
        self._on_exit = ExitStack()  # removes what `__enter__` drew or listed

    def update(self, count: int = 1) -> None:
        self.reach(self._done + count)

    def reach(self, done: int, detail: str = "") -> None:
        """Sets how many items are done. The log's line ends with `detail`: how far those are that are not."""
        self._done = done
        self._detail = detail
        if self._task is not None and _view is not None:
            _view.update(self._task, completed=self._done)
        else:
            _log_due_lines()

    def seconds(self, now: float) -> float:
        return now - self._start

    def is_line_due(self, now: float) -> bool:
        return self.seconds(now) >= self._next_line_seconds

    def schedule_line(self, now: float) -> None:
        """Sets when the next line is due: after the next of the first seconds, else at the next full minute."""
        seconds = self.seconds(now)
        later = [first for first in FIRST_LINES_SECONDS if first > seconds]
        next_minute = (seconds // SECONDS_BETWEEN_LINES + 1) * SECONDS_BETWEEN_LINES
        self._next_line_seconds = later[0] if later else next_minute

    def line(self, now: float) -> str:
        """Returns what is done so far, with the time that is left if items are counted and finish at one rate."""
        seconds = self.seconds(now)
        if not self._total or self._total == 1:
            return f"{self.what}: {seconds:.0f} s so far"
        counts = f"{self.what}: {self._done} of {self._total} after {seconds:.0f} s"
        if self._detail:
            counts = f"{counts}, {self._detail}"
        if not self._done or seconds <= 0 or not self._is_even:
            return counts
        rate = self._done / seconds
        remaining_seconds = (self._total - self._done) / rate
        return f"{counts} ({rate:.3g} per second), about {remaining_seconds:.0f} s left"

    def __enter__(self) -> Progress:
        if self._draws:
            self._on_exit.enter_context(live_view())
        if self._draws and _view is not None:
            self._task = _view.add_task(self.what, total=self._total)
            self._on_exit.callback(_view.remove_task, self._task)
        elif not _is_terminal():
            with _lock:
                _tasks.append(self)
            self._on_exit.callback(self._leave_tasks)
            _start_watcher()
        return self

    def _leave_tasks(self) -> None:
        with _lock:
            _tasks.remove(self)

    def __exit__(self, *raised: object) -> None:
        self._on_exit.close()


def _start_watcher() -> None:
    """Starts the thread that logs the lines of tasks which finish nothing for long."""
    global _watcher
    if _watcher is None or not _watcher.is_alive():  # a forked process has no threads
        _watcher = threading.Thread(target=_watch, name="cepo progress", daemon=True)
        _watcher.start()


def _watch() -> None:
    never = threading.Event()
    while not never.wait(_SECONDS_BETWEEN_LOOKS):
        _log_due_lines()


def _log_due_lines() -> None:
    """Logs a line if the outermost task is due for one: with its seconds, and what the innermost task has done."""
    with _lock:
        now = time.monotonic()
        if not _tasks or not _tasks[0].is_line_due(now):
            return
        outermost = _tasks[0]
        innermost = _tasks[-1]
        outermost.schedule_line(now)
        line = innermost.line(now)
        if outermost is not innermost:
            line = f"{outermost.what} ({outermost.seconds(now):.0f} s): {line}"
    logger.info("%s", line)


def shown(items: Iterable[_Item], what: str, total: int | None = None) -> Iterator[_Item]:
    """Yields the items and shows the progress; `total` is their number if they have no length."""
    if total is None:
        total = length_hint(items)
    with Progress(what, total) as progress:
        for item in items:
            yield item
            progress.update()


def _is_terminal() -> bool:
    return sys.stderr.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")
