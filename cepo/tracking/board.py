"""Draws the state of a run for the live view: progress, time left, metrics with their trend, and the last sample."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from cepo.live_view import duration

_TREND_LENGTH = 16
_LEVELS = "▁▂▃▄▅▆▇█"
_COLUMNS_PER_NUMBER = 44
_SAMPLE_LINES = 3


def decimal(value: float) -> str:
    """Formats a number with three decimals."""
    return f"{value:.3f}"


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def _whole(value: float) -> str:
    return f"{value:.0f}"


def significant(value: float) -> str:
    """Formats a number with three significant digits."""
    return f"{value:.3g}"


NUMBERS: Mapping[str, tuple[str, Callable[[float], str]]] = {
    "reward/mean": ("reward", decimal),
    "reward/accuracy": ("accuracy", decimal),
    "val/accuracy": ("held-out accuracy", decimal),
    "groups/mixed": ("mixed groups", _percent),
    "response_length/mean": ("response length", _whole),
    "rollout/entropy": ("entropy", decimal),
    "evidence/lambda": ("lambda", decimal),
    "evidence/positive_fraction": ("evidence above 0", _percent),
    "evidence/negative_fraction": ("evidence below 0", _percent),
    "actor/pg_clipfrac_higher": ("ratio clipped", _percent),
    "actor/grad_norm": ("gradient norm", significant),
    "timing_s/step": ("seconds per step", significant),
}
"""The metrics on the board, with their labels and formats."""


class Board:
    """A rich renderable with the latest values of a run."""

    def __init__(self, title: str, max_steps: int) -> None:
        self._title, self._max_steps = title, max_steps
        self._step = 0
        self._remaining: float | None = None
        self._values: dict[str, deque[float]] = {}
        self._sample: Text | None = None

    def add_metrics(self, step: int, values: Mapping[str, float], *, remaining_seconds: float | None) -> None:
        """Stores the metrics after `step`."""
        self._step, self._remaining = step, remaining_seconds
        for name in NUMBERS.keys() & values.keys():
            self._values.setdefault(name, deque(maxlen=_TREND_LENGTH)).append(values[name])

    def add_sample(self, step: int, *, right: bool, response: str) -> None:
        """Stores a sample; `response` must consist of printable characters."""
        verdict = Text("right" if right else "wrong", style="green" if right else "red")
        self._sample = Text.assemble(f"sample after step {step}, ", verdict, ": ", (response, "dim"))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        head = Table.grid(padding=(0, 2, 0, 0))
        left = "" if self._remaining is None else f"{duration(self._remaining)} left"
        bar = ProgressBar(total=self._max_steps, completed=self._step, width=min(30, options.max_width // 5))
        head.add_row(Text(self._title, style="bold"), f"step {self._step}/{self._max_steps}", bar, left)
        numbers = Table.grid(padding=(0, 2, 0, 0))
        cells = [self._cells(name, console) for name in NUMBERS if name in self._values]
        per_row = max(options.max_width // _COLUMNS_PER_NUMBER, 1)
        for start in range(0, len(cells), per_row):
            numbers.add_row(*(cell for one in cells[start : start + per_row] for cell in one))
        yield Group(head, numbers)
        if self._sample is not None:
            yield from self._sample.wrap(console, options.max_width)[:_SAMPLE_LINES]

    def _cells(self, name: str, console: Console) -> tuple[str, str, Text]:
        label, show = NUMBERS[name]
        values = self._values[name]
        drawn = trend(values) if console.encoding.startswith("utf") else ""
        return label, show(values[-1]), Text(drawn, style="cyan")


def trend(values: Sequence[float]) -> str:
    """Draws a line of one block character per value, scaled from the lowest to the highest; a space if not finite."""
    finite = [value for value in values if math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    scale = (len(_LEVELS) - 1) / (high - low) if high > low else 0.0
    return "".join(_LEVELS[round((value - low) * scale)] if math.isfinite(value) else " " for value in values)
