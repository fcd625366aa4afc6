"""Draws a live view at the bottom of a terminal; all other output appears above it."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable
from typing import Any, Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from cepo.terminal import without_controls

_SHORTEST_SECONDS = 0.5
_BAR_CELLS = 30


class SafeConsole(Console):
    """A console of rich; only its own styles and movements reach the terminal as control characters."""

    def render(self, renderable: Any, options: Any = None) -> Iterable[Segment]:
        """Renders as rich does, without the control characters of texts."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=without_controls(segment.text))


class Work(Protocol):
    """Describes a task in progress; `total` is None if its size is unknown."""

    what: str
    total: int | None
    done: int

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        ...


class LiveView:
    """Shows a board, if the run has one, and below it a line for each task.

    Attributes:
        board: drawn above the tasks; it remains on the terminal after the view has ended.
        work: the running tasks, outermost first.
        console: prints above the view.
    """

    def __init__(self) -> None:
        self.board: RenderableType | None = None
        self.work: list[Work] = []
        self.console = SafeConsole(stderr=True)
        self._live = Live(
            console=self.console,
            get_renderable=self._drawn,
            refresh_per_second=4,
            # Output to a file or a pipe must still go there.
            redirect_stdout=sys.stdout.isatty(),
        )
        self._log_streams: list[tuple[logging.StreamHandler, object]] = []

    def start(self) -> None:
        """Starts drawing. From now on, log lines for the terminal are printed above the view."""
        before = sys.stderr
        self._live.start()
        for handler in logging.getLogger().handlers:
            if isinstance(handler, logging.StreamHandler) and handler.stream is before:
                self._log_streams.append((handler, handler.setStream(sys.stderr)))

    def stop(self) -> None:
        """Stops drawing, leaves the board on the terminal and restores the cursor."""
        self.work = []
        self._live.transient = self.board is None
        self._live.stop()
        while self._log_streams:
            handler, stream = self._log_streams.pop()
            handler.setStream(stream)

    def add(self, work: Work) -> None:
        """Adds a task, whose line appears after half a second."""
        self.work.append(work)
        if work.seconds >= _SHORTEST_SECONDS:
            self._live.refresh()

    def forget(self, work: Work) -> None:
        """Removes a task and its line."""
        if work in self.work:
            self.work.remove(work)

    def _drawn(self) -> RenderableType:
        lines = Table.grid(padding=(0, 2, 0, 0))
        for work in tuple(self.work):
            if work.seconds >= _SHORTEST_SECONDS:
                lines.add_row(*_cells(work))
        return lines if self.board is None else Group(self.board, lines)


def _cells(work: Work) -> tuple[RenderableType, ...]:
    elapsed = duration(work.seconds)
    if work.total is None:
        return Text(work.what), elapsed
    bar = ProgressBar(total=work.total, completed=work.done, width=_BAR_CELLS)
    left = f", {duration(work.seconds / work.done * (work.total - work.done))} left" if work.done else ""
    return Text(work.what), elapsed + left, bar, f"{work.done}/{work.total}"


def duration(seconds: float) -> str:
    """Formats a duration as `42 s`, `3:07 min` or `1:02:05 h`."""
    whole = round(seconds)
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    if hours:
        return f"{hours}:{minutes:02d}:{rest:02d} h"
    return f"{minutes}:{rest:02d} min" if minutes else f"{rest} s"
