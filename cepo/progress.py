"""Shows the progress of long work in a live view on a terminal, and as lines in a log."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from operator import length_hint
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from cepo.live_view import LiveView

logger = logging.getLogger(__name__)

SECONDS_UNTIL_A_VIEW = 2.0
SECONDS_BETWEEN_LINES = 60.0
_Item = TypeVar("_Item")
_view: LiveView | None = None


@contextmanager
def live_view() -> Iterator[None]:
    """Keeps a live view at the bottom of the terminal inside this context; does nothing without a terminal."""
    global _view
    if _view is not None or not _is_terminal():
        yield
        return
    from cepo.live_view import LiveView

    _view = LiveView()
    _view.start()
    try:
        yield
    finally:
        end_view()


def log_to_stderr() -> None:
    """Shows our log on standard error, and of other libraries only warnings."""
    from cepo.terminal import LogFormatter

    handler = logging.StreamHandler()
    handler.setFormatter(LogFormatter())
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.getLogger("cepo").setLevel(logging.INFO)


def end_view() -> None:
    """Ends the live view, if there is one, and restores the cursor."""
    global _view
    if _view is not None:
        view, _view = _view, None
        view.stop()


def show_board(board: RenderableType) -> Console | None:
    """Draws `board` above the tasks in the live view. Returns the console that prints above it; None without a view."""
    if _view is None:
        return None
    _view.board = board
    return _view.console


@contextmanager
def phase(what: str) -> Iterator[None]:
    """Reports a phase of a run that has nothing to count: elapsed seconds in the live view, and lines in a log."""
    if _view is None:
        logger.info("%s", what)
    with Progress(what, None) as progress:
        yield
    if progress.seconds >= 1:
        logger.info("%s: done after %.0f s", what, progress.seconds)


class Progress:
    """Shows the progress of a task inside this context. The task has `total` items, or None if they cannot be counted.

    Args:
        what: the task's name, with which its line begins.
        draws: whether it may be drawn; None: if standard error is a terminal.
    """

    def __init__(self, what: str, total: int | None, *, draws: bool | None = None) -> None:
        self.what, self.total, self.done = what, total, 0
        self._is_terminal = _is_terminal()
        self._draws = self._is_terminal if draws is None else draws
        self._start = self._said = time.monotonic()
        self._shown: ExitStack | None = None

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._start

    def update(self, count: int = 1) -> None:
        """Counts finished items."""
        self.done += count
        now = time.monotonic()
        if self._draws:
            if self._shown is None and self.seconds >= SECONDS_UNTIL_A_VIEW:
                self._show()
        elif not self._is_terminal and now - self._said >= SECONDS_BETWEEN_LINES:
            self._said = now
            spent = now - self._start
            left = spent * ((self.total or 0) - self.done) / self.done
            logger.info("%s: %d of %d after %.0f s, about %.0f s left", self.what, self.done, self.total, spent, left)

    def __enter__(self) -> Progress:
        if self._draws and _view is not None:
            self._show()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._shown is not None:
            self._shown.close()

    def _show(self) -> None:
        """Adds a line to the live view. Without a view, starts one that ends with this task."""
        self._shown = ExitStack()
        self._shown.enter_context(live_view())
        if _view is not None:
            _view.add(self)
            self._shown.callback(_view.forget, self)


def shown(items: Iterable[_Item], what: str, total: int | None = None) -> Iterator[_Item]:
    """Yields the items and shows the progress; `total` is their number if they have no length."""
    with Progress(what, length_hint(items) if total is None else total) as progress:
        for item in items:
            yield item
            progress.update()


def _is_terminal() -> bool:
    return sys.stderr.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")
