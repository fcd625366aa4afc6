"""Passes the trainer's records to all sinks, and defines what a sink is and what it is told about the run."""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Protocol

from cepo.config.paths import checkpoint_folders
from cepo.errors import ConfigError, did_you_mean
from cepo.tracking.run_folder import (
    CONFIG_FILE,
    ENVIRONMENT_FILE,
    RECORDS,
    TENSORBOARD_FOLDER,
    TRACKERS_FILE,
    require_own_records,
)

if TYPE_CHECKING:
    from cepo.tracking.trace import GroupRecord

_log = logging.getLogger(__name__)
# The folders of external trackers may hold several runs, so they remain; only this run's identifiers are moved.
_RECORDS = (*RECORDS, CONFIG_FILE, ENVIRONMENT_FILE, TENSORBOARD_FOLDER, TRACKERS_FILE)
_SINKS = {
    "console": ("console", "ConsoleSink", ()),
    "file": ("file", "FileSink", ()),
    "mlflow": ("external", "MlflowSink", ("mlflow", "sqlalchemy", "alembic")),
    "swanlab": ("external", "SwanlabSink", ("swanlab",)),
    "tensorboard": ("external", "TensorboardSink", ()),
    "trackio": ("external", "TrackioSink", ("trackio",)),
    "wandb": ("external", "WandbSink", ("wandb",)),
}
"""The module and class of each sink, and the libraries that it needs from the extra `trackers`."""


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


def build_sink(name: str, run: RunDescription) -> Sink:
    module, class_name, _ = _SINKS[name]
    return getattr(importlib.import_module(f"cepo.tracking.{module}"), class_name)(run)


def check_sinks(names: Sequence[str]) -> None:
    """Checks the names of sinks; raises `ConfigError` if one is not registered or its library is not installed."""
    for name in names:
        if name not in _SINKS:
            raise ConfigError(
                f"trainer.logger '{name}' is unknown.{did_you_mean(name, _SINKS)} Known: {', '.join(_SINKS)}"
            )
        specs = {library: importlib.util.find_spec(library) for library in _SINKS[name][2]}
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


def set_aside_earlier_run(folder: Path, *, resumed_step: int | None) -> None:
    """Moves what this run does not continue into a new subfolder `earlier_run_<n>`, so that no run resumes from it.

    These are the checkpoints after `resumed_step` and, if it is None, all checkpoints and records.
    """
    found = [path for step, path in checkpoint_folders(folder).items() if step > (resumed_step or 0)]
    if resumed_step is None:
        found += [folder / name for name in _RECORDS if (folder / name).exists()]
    if not found:
        return
    names = (folder / f"earlier_run_{number}" for number in itertools.count(1))
    aside = next(name for name in names if not name.exists())
    aside.mkdir()
    for path in found:
        path.rename(aside / path.name)
    _log.info("%d records and checkpoints of an earlier run in %s were moved to %s", len(found), folder, aside.name)


def _warn_dropped(name: str, error: Exception) -> None:
    _log.warning(
        "trainer.logger '%s' failed and is off for the rest of the run: %s: %s", name, type(error).__name__, error
    )
