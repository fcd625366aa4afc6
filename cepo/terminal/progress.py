"""Shows the progress of long work in a live view on a terminal, and as lines in a log."""

from __future__ import annotations

import logging
import os
import sys
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

SECONDS_BETWEEN_LINES = 60.0
_Item = TypeVar("_Item")
_view: LiveView | None = None


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
def phase(what: str) -> Generator[None]:
    """Reports a phase of a run that has nothing to count: elapsed seconds in the live view, and lines in a log."""
    if _view is None:
        logger.info("%s", what)
    start = time.monotonic()
    with Progress(what, None):
        yield
    seconds = time.monotonic() - start
    if seconds >= 1:
        logger.info("%s: done after %.0f s", what, seconds)


class Progress:
    """Shows the progress of the task `what` inside this context.

    It has `total` items, or None if they cannot be counted. Without a live view, one is opened that ends with this task.
    `draws`: whether the task is shown on a terminal.
    """

    def __init__(self, what: str, total: int | None, *, draws: bool = True) -> None:
        self._what = what
        self._total = total
        self._draws = draws
        self._done = 0
        self._start = time.monotonic()
        self._last_line = self._start
        self._task: TaskID | None = None
        self._on_exit = ExitStack()  # removes what `__enter__` drew

    def update(self, count: int = 1) -> None:
        self._done += count
        now = time.monotonic()
        if self._task is not None and _view is not None:
            _view.update(self._task, completed=self._done)
        elif now - self._last_line >= SECONDS_BETWEEN_LINES and not _is_terminal():
            self._last_line = now
            seconds = now - self._start
            rate = self._done / seconds
            remaining_seconds = ((self._total or 0) - self._done) / rate
            logger.info(
                "%s: %d of %d after %.0f s (%.3g per second), about %.0f s left",
                self._what,
                self._done,
                self._total,
                seconds,
                rate,
                remaining_seconds,
            )

    def __enter__(self) -> Progress:
        if self._draws:
            self._on_exit.enter_context(live_view())
            if _view is not None:
                self._task = _view.add_task(self._what, total=self._total)
                self._on_exit.callback(_view.remove_task, self._task)
        return self

    def __exit__(self, *raised: object) -> None:
        self._on_exit.close()


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
