"""Draws a live view at the bottom of a terminal; all other output appears above it."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import (
    BarColumn,
    Progress,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.segment import Segment

from cepo.terminal import without_controls

_SHORTEST_SECONDS = 0.5


class SafeConsole(Console):
    """A console of rich; only its own styles and movements reach the terminal as control characters."""

    def render(self, renderable: Any, options: Any = None) -> Iterable[Segment]:
        """Renders as rich does, without the control characters of texts."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=without_controls(segment.text))


class _Tasks(Progress):
    """A line for each running task, which appears after half a second."""

    def get_renderables(self) -> Iterable[RenderableType]:
        yield self.make_tasks_table([task for task in self.tasks if (task.elapsed or 0.0) >= _SHORTEST_SECONDS])


class LiveView:
    """Shows a board, if the run has one, and below it a line for each task.

    Attributes:
        board: drawn above the tasks; it remains on the terminal after the view has ended.
        tasks: the running tasks, outermost first.
        console: prints above the view.
    """

    def __init__(self) -> None:
        self.board: RenderableType | None = None
        self.console = SafeConsole(stderr=True)
        self.tasks = _Tasks(
            TextColumn("{task.description}", markup=False),
            TimeElapsedColumn(),
            BarColumn(),
            TaskProgressColumn(),
            TimeRemainingColumn(),
            console=self.console,
        )
        self._live = Live(
            console=self.console,
            get_renderable=lambda: self.tasks if self.board is None else Group(self.board, self.tasks),
            refresh_per_second=4,
            # Output to a file or a pipe must still go there.
            redirect_stdout=sys.stdout.isatty(),
        )

    def start(self) -> None:
        """Starts drawing; what is written to the terminal from now on is printed above the view."""
        self._live.start()

    def add(self, what: str, total: int | None, *, seconds: float) -> TaskID:
        """Adds a task that began `seconds` ago."""
        number = self.tasks.add_task(what, total=total)
        self.tasks.tasks[-1].start_time = self.console.get_time() - seconds
        if seconds >= _SHORTEST_SECONDS:
            self._live.refresh()
        return number

    def remove(self, task: TaskID) -> None:
        """Removes a task and its line."""
        if task in self.tasks.task_ids:
            self.tasks.remove_task(task)

    def stop(self) -> None:
        """Stops drawing, leaves the board on the terminal and restores the cursor."""
        for task in self.tasks.task_ids:
            self.remove(task)
        self._live.transient = self.board is None
        self._live.stop()


def duration(seconds: float) -> str:
    """Formats a duration as `42 s`, `3:07 min` or `1:02:05 h`."""
    whole = round(seconds)
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    if hours:
        return f"{hours}:{minutes:02d}:{rest:02d} h"
    return f"{minutes}:{rest:02d} min" if minutes else f"{rest} s"
