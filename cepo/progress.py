"""Shows progress: as a bar on a terminal if the work lasts, and as one line a minute in a log."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, TypeVar

logger = logging.getLogger(__name__)

SECONDS_UNTIL_A_BAR = 2.0
SECONDS_BETWEEN_LINES = 60.0
_Item = TypeVar("_Item")


class Progress:
    """Shows the progress of `total` pieces of work; a context manager.

    Args:
        what: the work, as the beginning of a log line.
        draws: whether a bar may be drawn; None: if standard error is a terminal.
    """

    def __init__(self, what: str, total: int, *, draws: bool | None = None) -> None:
        self._what, self._total = what, total
        self._is_terminal = sys.stderr.isatty()
        self._draws = self._is_terminal if draws is None else draws
        self._start = self._said = time.monotonic()
        self._done = 0
        self._bar: Any = None

    def update(self, count: int = 1) -> None:
        """Counts finished pieces of work."""
        self._done += count
        now = time.monotonic()
        if self._draws:
            if self._bar is None and now - self._start >= SECONDS_UNTIL_A_BAR:
                self._bar = self._drawn()
            if self._bar is not None:
                self._bar.update(self._bar.task_ids[0], completed=self._done)
        elif not self._is_terminal and now - self._said >= SECONDS_BETWEEN_LINES:
            self._said = now
            spent = now - self._start
            left = spent * (self._total - self._done) / self._done
            logger.info(
                "%s: %d of %d after %.0f s, about %.0f s left", self._what, self._done, self._total, spent, left
            )

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def _drawn(self) -> Any:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        bar = Bar(*columns, console=Console(stderr=True), transient=True)
        bar.add_task(self._what, total=self._total)
        bar.start()
        return bar


def shown(items: Sequence[_Item], what: str) -> Iterator[_Item]:
    """Yields the items and shows progress while the work on them lasts."""
    with Progress(what, len(items)) as progress:
        for item in items:
            yield item
            progress.update()
