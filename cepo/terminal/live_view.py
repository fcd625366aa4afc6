"""Draws a live view at the bottom of a terminal; all other output appears above it."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.segment import Segment

from cepo.terminal.lines import without_controls

_SHORTEST_SECONDS = 0.5


class SafeConsole(Console):
    """A console of rich; only its own styles and movements reach the terminal as control characters."""

    def render(self, renderable: Any, options: Any = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=without_controls(segment.text, self.encoding))


class LiveView(Progress):
    """A line for each task that has run half a second, outermost first; other output is printed above them."""

    def __init__(self) -> None:
        super().__init__(
            TextColumn("{task.description}", markup=False),
            TimeElapsedColumn(),
            BarColumn(),
            TaskProgressColumn(),
            TimeRemainingColumn(),
            console=SafeConsole(stderr=True),
            refresh_per_second=4,
            transient=True,
            redirect_stdout=sys.stdout.isatty(),  # output to a file or a pipe must still go there
        )

    def get_renderables(self) -> Iterable[RenderableType]:
        yield self.make_tasks_table([task for task in self.tasks if (task.elapsed or 0.0) >= _SHORTEST_SECONDS])
