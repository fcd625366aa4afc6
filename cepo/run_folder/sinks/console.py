"""Prints the steps of a run on the console, one line each."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Mapping, Sequence

from rich.text import Text

from cepo.metrics import wilson_interval
from cepo.run_folder.sinks.base import RunDescription, Sink
from cepo.terminal.lines import duration
from cepo.terminal.live_view import SafeConsole
from cepo.terminal.progress import view_console

_STEPS_FOR_ETA = 20
_MOST_SAMPLES = 3
_SAMPLE_CHARACTERS = 100
_LONGEST_TEXT = 2_000
_COLUMNS = 80
_STEP_PARTS = (
    (("reward {:.3f}", "reward/mean"),),
    (("accuracy {:.3f}", "reward/accuracy"),),
    (("mixed {:.0%}", "groups/mixed"),),
    (("grad {:.3g}", "actor/grad_norm"),),
    (("evidence +{:.0%}", "evidence/positive_fraction"), ("-{:.0%}", "evidence/negative_fraction")),
    (("ratio clip {:.0%}", "actor/pg_clipfrac_higher"),),
)
"""The parts of a step's line, the most important ones first: for each of its numbers the text and the metric."""

_STEP_METRICS = {metric for part in _STEP_PARTS for _, metric in part}


class ConsoleSink(Sink):
    """Prints a plain, unwrapped line per step and per validation, and some samples."""

    def __init__(self, run: RunDescription) -> None:
        self._max_steps = run.max_steps
        self._step_seconds: deque[float] = deque(maxlen=_STEPS_FOR_ETA)
        self._console = (view_console() if sys.stdout.isatty() else None) or SafeConsole()

    def log_metrics(self, step: int, values: Mapping[str, float]) -> None:
        if "timing_s/step" in values:
            self._step_seconds.append(values["timing_s/step"])
        if _STEP_METRICS & values.keys():
            remaining_seconds: float | None = None
            if self._step_seconds:
                mean = sum(self._step_seconds) / len(self._step_seconds)
                remaining_seconds = mean * max(self._max_steps - step, 0)
            self._show(step_line(step, self._max_steps, values, remaining_seconds=remaining_seconds))
        if "val/accuracy" in values:
            self._show(validation_line(step, self._max_steps, values))

    def log_generations(self, step: int, rows: Sequence[Mapping[str, object]]) -> None:
        for row in rows[:_MOST_SAMPLES]:
            response = " ".join(str(row.get("response", ""))[:_LONGEST_TEXT].split())
            if len(response) > _SAMPLE_CHARACTERS:
                response = response[: _SAMPLE_CHARACTERS - 3] + "..."
            verdict = f"accuracy {row['accuracy']:g}" if "accuracy" in row else "sample"
            self._show(Text(f"  {verdict}: {response}", style="dim"))

    def _show(self, line: Text) -> None:
        self._console.print(line, soft_wrap=True)


def step_line(step: int, max_steps: int, values: Mapping[str, float], *, remaining_seconds: float | None) -> Text:
    """Returns the line of one training step, of at most 80 columns; the run folder and its report have all metrics.

    Parts whose metrics are missing are left out, and so are the least important ones if the line would be too long.
    """
    line = _step_label(step, max_steps)
    duration_words = f"  {_seconds(values['timing_s/step'])} s" if "timing_s/step" in values else ""
    remaining_words = ""
    if remaining_seconds is not None and step < max_steps:
        remaining_words = f"  ETA {duration(remaining_seconds)}"
    free_columns = _COLUMNS - len(line) - len(duration_words) - len(remaining_words)
    for part in _STEP_PARTS:
        numbers = [text.format(values[name]) for text, name in part if name in values]
        words = "  " + " ".join(numbers)
        if numbers and len(words) <= free_columns:
            line.append(words)
            free_columns -= len(words)
    line.append(duration_words)
    line.append(remaining_words, style="cyan")
    return line


def validation_line(step: int, max_steps: int, values: Mapping[str, float]) -> Text:
    """Returns the line of a validation: accuracy, with its 95 % interval if the number of samples is known."""
    accuracy = values["val/accuracy"]
    line = _step_label(step, max_steps)
    line.append(f"  validation accuracy {accuracy:.3f}", style="bold green")
    count = values.get("val/num_samples")
    interval = wilson_interval(accuracy, count, 1.96)
    if interval is not None:
        low, high = interval
        line.append(f" ({low:.3f} to {high:.3f}, n {count:.0f})")
    for name in ("val/greedy_accuracy", "val/headroom", "val/blind_accuracy"):
        if name in values:
            words = name.removeprefix("val/").removesuffix("_accuracy")
            line.append(f"  {words} {values[name]:.3f}")
    if "val/reward" in values:
        line.append(f"  reward {values['val/reward']:.3f}")
    if "timing_s/validate" in values:
        line.append(f"  seconds {_seconds(values['timing_s/validate'])}")
    return line


def _step_label(step: int, max_steps: int) -> Text:
    width = len(str(max_steps))
    return Text().append(f"step {step:>{width}}/{max_steps}", style="bold")


def _seconds(value: float) -> str:
    return f"{value:.2f}" if value < 1 else f"{value:.1f}"
