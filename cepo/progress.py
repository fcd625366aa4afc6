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

from cepo.metrics import Metrics, merge_metrics, sum_value
from cepo.terminal import LogHandler

if TYPE_CHECKING:
    from rich.console import Console

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
    logging.basicConfig(level=logging.WARNING, handlers=[LogHandler()])
    logging.getLogger("cepo").setLevel(logging.INFO)


def end_view() -> None:
    """Ends the live view, if there is one, and restores the cursor."""
    global _view
    if _view is not None:
        view, _view = _view, None
        view.stop()


def view_console() -> Console | None:
    """Returns the console that prints above the live view; None without a view."""
    return None if _view is None else _view.console


@contextmanager
def phase(what: str) -> Iterator[None]:
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

    It has `total` items, or None if they cannot be counted. `draws`: whether it may be drawn; None: on a terminal.
    """

    def __init__(self, what: str, total: int | None, *, draws: bool | None = None) -> None:
        self._what, self._total, self._done = what, total, 0
        self._is_terminal = _is_terminal()
        self._draws = self._is_terminal if draws is None else draws
        self._start = self._last_line = time.monotonic()
        self._drawn, self._task = ExitStack(), None

    def update(self, count: int = 1) -> None:
        self._done += count
        now = time.monotonic()
        if self._draws:
            if self._task is None and now - self._start >= SECONDS_UNTIL_A_VIEW:
                self._draw()
            if self._task is not None and _view is not None:
                _view.update(self._task, completed=self._done)
        elif not self._is_terminal and now - self._last_line >= SECONDS_BETWEEN_LINES:
            self._last_line, spent = now, now - self._start
            left = spent * ((self._total or 0) - self._done) / self._done
            logger.info(
                "%s: %d of %d after %.0f s, about %.0f s left", self._what, self._done, self._total, spent, left
            )

    def __enter__(self) -> Progress:
        if self._draws and _view is not None:
            self._draw()
        return self

    def __exit__(self, *raised: object) -> None:
        self._drawn.close()

    def _draw(self) -> None:
        """Adds a line to the live view. Without a view, starts one that ends with this task."""
        self._drawn.enter_context(live_view())
        if _view is not None:
            self._task = _view.add(self._what, self._total, seconds=time.monotonic() - self._start)
            self._drawn.callback(_view.remove_task, self._task)


def shown(items: Iterable[_Item], what: str, total: int | None = None) -> Iterator[_Item]:
    """Yields the items and shows the progress; `total` is their number if they have no length."""
    with Progress(what, length_hint(items) if total is None else total) as progress:
        for item in items:
            yield item
            progress.update()


def _is_terminal() -> bool:
    return sys.stderr.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")


class StageClock:
    """Sums wall-clock seconds and tokens of each stage between two calls of `drain`."""

    def __init__(self) -> None:
        self._metrics: Metrics = {}

    @contextmanager
    def stage(self, name: str) -> Generator[None]:
        """Times the body as part of stage `name`. Stages may repeat, but a stage must not contain itself."""
        start = time.perf_counter()
        try:
            with Progress(name, None):
                yield
        finally:
            self._add(f"timing_s/{name}", time.perf_counter() - start)

    def count_tokens(self, name: str, tokens: int) -> None:
        """Counts tokens that stage `name` processed, including those of contexts if it computed them."""
        self._add(f"tokens/{name}", tokens)

    def drain(self) -> Metrics:
        metrics, self._metrics = self._metrics, {}
        return metrics

    def _add(self, name: str, value: float) -> None:
        self._metrics = merge_metrics([self._metrics, {name: sum_value(value)}])
