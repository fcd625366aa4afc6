"""Passes the records of a run to its sinks: the console and the run folder here, trackers of others in `external`."""

from __future__ import annotations

import importlib
import importlib.util
import json
import logging
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol

from rich.text import Text

from cepo.config.own_records import remember_own_record
from cepo.errors import CepoError, ConfigError, did_you_mean
from cepo.files.foreign import read_text
from cepo.metrics import wilson_interval
from cepo.run_folder.earlier_runs import set_aside_earlier_run
from cepo.run_folder.environment import describe_environment, read_environment
from cepo.run_folder.layout import (
    CONFIG_FILE,
    ENVIRONMENT_FILE,
    GENERATIONS_FILE,
    METRICS_FILE,
    STAGES,
    require_own_records,
)
from cepo.run_folder.trace import GroupRecord, Trace
from cepo.run_folder.writing import LineFile, finite_or_none, write_atomically
from cepo.terminal.live_view import SafeConsole, duration
from cepo.terminal.progress import view_console

_log = logging.getLogger(__name__)
_LIBRARIES = {
    "console": (),
    "file": (),
    "mlflow": ("mlflow", "sqlalchemy", "alembic"),
    "swanlab": ("swanlab",),
    "tensorboard": (),
    "trackio": ("trackio",),
    "wandb": ("wandb",),
}
"""The libraries that each sink needs from the extra `trackers`."""
_STEPS_FOR_ETA = 20
_MOST_SAMPLES = 3
_SAMPLE_CHARACTERS = 100
_LONGEST_TEXT = 2_000
_STEP_PARTS = (
    (("reward {:.3f}", "reward/mean"), ("accuracy {:.3f}", "reward/accuracy")),
    (("mixed {:.0%}", "groups/mixed"),),
    (("lambda {:.3f}", "evidence/lambda"),),
    (("evidence +{:.0%}", "evidence/positive_fraction"), ("-{:.0%}", "evidence/negative_fraction")),
    (("weight clip low {:.0%}", "evidence/clip_low_rate"), ("high {:.0%}", "evidence/clip_high_rate")),
    (("ratio clip {:.0%}", "actor/pg_clipfrac_higher"),),
    (("grad {:.3g}", "actor/grad_norm"),),
)
"""The parts of a step's line: for each of its numbers the text and the metric."""


@dataclass(frozen=True, kw_only=True)
class RunDescription:
    """The facts about a run that sinks receive.

    Attributes:
        config_text: the resolved configuration as YAML.
        max_steps: number of training steps of the whole run.
        project, experiment: names under which trackers group runs, and of the run there.
        resumed_step: the step of the checkpoint from which the run resumes; None for a new run.
    """

    folder: Path
    config_text: str
    max_steps: int
    project: str = "cepo"
    experiment: str = "demo"
    resumed_step: int | None = None
    max_rollouts_mb: int = 256


class Sink(Protocol):
    """A destination of metrics and samples. If a `required` sink fails, the run ends; any other sink is dropped."""

    required: ClassVar[bool] = False

    def log_metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Records the metrics after the 1-based `step` (0: before training). Steps never decrease."""
        ...

    def log_rollouts(self, records: Sequence[GroupRecord]) -> None:
        """Records groups of training rollouts. By default does nothing, as `close` does."""

    def log_generations(self, step: int, rows: Sequence[Mapping[str, object]]) -> None:
        """Records validation samples: one mapping each, with at least `prompt_id`, `response` and `accuracy`."""
        ...

    def close(self) -> None: ...


class ConsoleSink(Sink):
    """Prints a plain, unwrapped line per step and per validation, and some samples."""

    def __init__(self, run: RunDescription) -> None:
        self._max_steps = run.max_steps
        self._step_seconds: deque[float] = deque(maxlen=_STEPS_FOR_ETA)
        self._console = (view_console() if sys.stdout.isatty() else None) or SafeConsole()

    def log_metrics(self, step: int, values: Mapping[str, float]) -> None:
        if "timing_s/step" in values:
            self._step_seconds.append(values["timing_s/step"])
        if any(not name.startswith(("val/", "timing_s/")) for name in values):
            seconds = self._step_seconds
            left = sum(seconds) / len(seconds) * max(self._max_steps - step, 0) if seconds else None
            self._show(step_line(step, self._max_steps, values, remaining_seconds=left))
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
    """Returns the line of one training step; parts whose metrics are missing are left out."""
    line = _step_label(step, max_steps)
    parts = [" ".join(text.format(values[name]) for text, name in part if name in values) for part in _STEP_PARTS]
    for part in filter(None, [*parts, _stage_seconds(values)]):
        line.append("  " + part)
    if remaining_seconds is not None and step < max_steps:
        line.append(f"  ETA {duration(remaining_seconds)}", style="cyan")
    return line


def validation_line(step: int, max_steps: int, values: Mapping[str, float]) -> Text:
    """Returns the line of a validation: accuracy, with its 95 % interval if the number of samples is known."""
    accuracy = values["val/accuracy"]
    line = _step_label(step, max_steps)
    line.append(f"  validation accuracy {accuracy:.3f}", style="bold green")
    count = values.get("val/num_samples")
    if (interval := wilson_interval(accuracy, count, 1.96)) is not None:
        line.append(f" ({interval[0]:.3f} to {interval[1]:.3f}, n {count:.0f})")
    if "val/reward" in values:
        line.append(f"  reward {values['val/reward']:.3f}")
    if "timing_s/validate" in values:
        line.append(f"  seconds {_seconds(values['timing_s/validate'])}")
    return line


def _step_label(step: int, max_steps: int) -> Text:
    return Text().append(f"step {step:>{len(str(max_steps))}}/{max_steps}", style="bold")


def _stage_seconds(values: Mapping[str, float]) -> str:
    shown = [f"{stage} {_seconds(values[f'timing_s/{stage}'])}" for stage in STAGES if f"timing_s/{stage}" in values]
    total = f"{_seconds(values['timing_s/step'])} s" if "timing_s/step" in values else ""
    return f"{total} ({', '.join(shown)})" if total and shown else total or ", ".join(shown)


def _seconds(value: float) -> str:
    return f"{value:.2f}" if value < 1 else f"{value:.1f}"


class FileSink(Sink):
    """Writes the records that `cepo.run_folder.layout` lists; raises `CepoError` if a file cannot be written.

    All reports read these files, so this is the only sink whose failure ends the run.

    On resume, rows after the resumed step are dropped first, so that no step appears twice. Several calls for one step
    make one row, with the last value of each metric.
    """

    required: ClassVar[bool] = True

    def __init__(self, run: RunDescription) -> None:
        self._folder = run.folder
        with _writing(run.folder):
            run.folder.mkdir(parents=True, exist_ok=True)
            entries = [*read_environment(run.folder), describe_environment(run.resumed_step)]
            self._write_config(run)
            write_atomically(run.folder / ENVIRONMENT_FILE, json.dumps(entries, indent=2) + "\n", private=True)
            self._metrics, self._generations = (
                LineFile(run.folder / name, last_step=run.resumed_step) for name in (METRICS_FILE, GENERATIONS_FILE)
            )
            self._trace = Trace(run.folder, max_bytes=run.max_rollouts_mb * 1_000_000, last_step=run.resumed_step)

    def log_metrics(self, step: int, values: Mapping[str, float]) -> None:
        last = self._metrics.last or {"step": -1}
        assert step >= last["step"], f"metrics of step {step} come after those of step {last['step']}"
        row = {"step": step} | {name: finite_or_none(value) for name, value in values.items()}
        with _writing(self._folder):
            if step == last["step"]:
                self._metrics.replace_last({**last, **row})
            else:
                self._metrics.append(row)
            self._metrics.to_disk()

    def log_rollouts(self, records: Sequence[GroupRecord]) -> None:
        with _writing(self._folder):
            self._trace.write(records)

    def log_generations(self, step: int, rows: Sequence[Mapping[str, object]]) -> None:
        with _writing(self._folder):
            for row in rows:
                self._generations.append({"step": step, **row})
            self._generations.to_disk()

    def close(self) -> None:
        with _writing(self._folder):
            for lines in (self._metrics, self._generations):
                lines.close()

    def _write_config(self, run: RunDescription) -> None:
        """Writes the configuration; if a resume changed it, the earlier one is kept, named by its last step."""
        path = run.folder / CONFIG_FILE
        if run.resumed_step is not None and path.exists():
            earlier = read_text(path, within=run.folder)
            kept = run.folder / f"config_until_step_{run.resumed_step}.yaml"
            # If `kept` exists, the results of an earlier resume from this step were discarded.
            if earlier != run.config_text and not kept.exists():
                write_atomically(kept, earlier, private=True)
        write_atomically(path, run.config_text, private=True)
        remember_own_record(run.config_text)


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CepoError(
            f"cannot write the run's records in {folder}: {error}. Free disk space, allow writing there, or choose another "
            "folder with trainer.save_checkpoint_path."
        ) from error


def build_sink(name: str, run: RunDescription) -> Sink:
    own = {"console": ConsoleSink, "file": FileSink}
    if name in own:
        return own[name](run)
    return getattr(importlib.import_module("cepo.tracking.external"), f"{name.capitalize()}Sink")(run)


def check_sinks(names: Sequence[str]) -> None:
    """Checks the names of sinks; raises `ConfigError` if one is not registered or its library is not installed."""
    for name in names:
        if name not in _LIBRARIES:
            raise ConfigError(
                f"trainer.logger '{name}' is unknown.{did_you_mean(name, _LIBRARIES)} Known: {', '.join(_LIBRARIES)}"
            )
        specs = {library: importlib.util.find_spec(library) for library in _LIBRARIES[name]}
        # A plain folder of the library's name in the working directory has no origin.
        missing = [library for library, spec in specs.items() if spec is None or spec.origin is None]
        if missing:
            raise ConfigError(
                f"trainer.logger '{name}' needs {', '.join(missing)}, not installed here. "
                f"Install it with: pip install 'cepo[trackers]', or leave '{name}' out of trainer.logger"
            )


class Tracker:
    """Passes all records to its sinks. A sink that fails is dropped with one warning, unless it is `required`."""

    def __init__(self, sinks: Mapping[str, Sink]) -> None:
        self._sinks = dict(sinks)

    def log_metrics(self, step: int, values: Mapping[str, float]) -> None:
        self._each(lambda sink: sink.log_metrics(step, values))

    def log_rollouts(self, records: Sequence[GroupRecord]) -> None:
        self._each(lambda sink: sink.log_rollouts(records))

    def log_generations(self, step: int, rows: Sequence[Mapping[str, object]]) -> None:
        self._each(lambda sink: sink.log_generations(step, rows))

    def close(self) -> None:
        self._each(lambda sink: sink.close())
        self._sinks.clear()

    def _each(self, call: Callable[[Sink], None]) -> None:
        for name, sink in list(self._sinks.items()):
            try:
                call(sink)
            except Exception as error:
                if sink.required:
                    raise
                del self._sinks[name]
                _warn_dropped(name, error)


def build_tracker(names: Sequence[str], run: RunDescription) -> Tracker:
    """Builds the sinks of `trainer.logger`, after it has moved an earlier run's records and checkpoints away.

    Raises `ConfigError` as `check_sinks`; `CepoError`: the run folder cannot be written, or has a link in it.
    """
    check_sinks(names)
    set_aside_earlier_run(run.folder, resumed_step=run.resumed_step)
    require_own_records(run.folder)
    sinks: dict[str, Sink] = {}
    for name in dict.fromkeys(names):
        try:
            sinks[name] = build_sink(name, run)
        except Exception as error:
            if name == "file":
                raise
            _warn_dropped(name, error)
    return Tracker(sinks)


def _warn_dropped(name: str, error: Exception) -> None:
    _log.warning(
        "trainer.logger '%s' failed and is off for the rest of the run: %s: %s", name, type(error).__name__, error
    )
