"""Passes the records of a run to its sinks: builds them by name, and drops those that fail."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Mapping, Sequence

from cepo.errors import ConfigError
from cepo.run_folder.layout import require_own_records, set_aside_earlier_run
from cepo.run_folder.sinks.base import RunDescription, Sink
from cepo.run_folder.sinks.console import ConsoleSink
from cepo.run_folder.sinks.external import SwanlabSink, TrackioSink, WandbSink
from cepo.run_folder.sinks.files import FileSink
from cepo.run_folder.sinks.mlflow_sink import MlflowSink
from cepo.run_folder.sinks.tensorboard_sink import TensorboardSink
from cepo.run_folder.trace import GroupRecord

_log = logging.getLogger(__name__)
_SINKS: Mapping[str, Callable[[RunDescription], Sink]] = {
    "console": ConsoleSink,
    "file": FileSink,
    "mlflow": MlflowSink,
    "swanlab": SwanlabSink,
    "tensorboard": TensorboardSink,
    "trackio": TrackioSink,
    "wandb": WandbSink,
}
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


def build_sink(name: str, run: RunDescription) -> Sink:
    """Builds the sink `name`, one of `trainer.logger`; raises what its library raises."""
    return _SINKS[name](run)


def check_sinks(names: Sequence[str]) -> None:
    """Raises `ConfigError` if the library of a sink, one of `trainer.logger`, is not installed."""
    for name in names:
        specs = {library: importlib.util.find_spec(library) for library in _LIBRARIES[name]}
        # A plain folder of the library's name in the working directory has no origin.
        missing = [library for library, spec in specs.items() if spec is None or spec.origin is None]
        if missing:
            raise ConfigError(
                f"trainer.logger '{name}' needs {', '.join(missing)}, not installed here. "
                f"Install it with: pip install -e '.[trackers]', in cepo's checkout, or leave '{name}' out of trainer.logger"
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

    The run folder always gets its records (the sink `file`), which `cepo report` and a resumed run read.

    Raises `CepoError`: the run folder cannot be written, or has a link in it.
    """
    set_aside_earlier_run(run.folder, resumed_step=run.resumed_step)
    require_own_records(run.folder)
    sinks: dict[str, Sink] = {}
    for name in dict.fromkeys(["file", *names]):
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
