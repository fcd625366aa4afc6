"""Passes the trainer's records to all sinks and isolates their failures from each other."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from cepo.config.paths import checkpoint_folders
from cepo.tracking.run_folder import (
    CONFIG_FILE,
    ENVIRONMENT_FILE,
    RECORDS,
    TENSORBOARD_FOLDER,
    TRACKERS_FILE,
    require_own_records,
)
from cepo.tracking.sink import RunDescription, Sink, build_sink, check_sinks
from cepo.tracking.trace import GroupRecord

_log = logging.getLogger(__name__)
# The folders of external trackers may hold several runs, so they remain; only this run's identifiers are moved.
_RECORDS = (*RECORDS, CONFIG_FILE, ENVIRONMENT_FILE, TENSORBOARD_FOLDER, TRACKERS_FILE)


class Tracker:
    """Passes all records to its sinks. A sink that fails is dropped with one warning, unless it is `required`."""

    def __init__(self, sinks: Mapping[str, Sink]) -> None:
        self._sinks = dict(sinks)

    @property
    def active_sinks(self) -> list[str]:
        return list(self._sinks)

    def log_metrics(self, step: int, values: Mapping[str, float]) -> None:
        self._each(lambda sink: sink.log_metrics(step, values))

    def log_rollouts(self, records: Sequence[GroupRecord]) -> None:
        self._each(lambda sink: sink.log_rollouts(records))

    def log_generations(self, step: int, rows: Sequence[Mapping[str, object]]) -> None:
        self._each(lambda sink: sink.log_generations(step, rows))

    def close(self) -> None:
        """Closes all sinks; nothing can be logged afterwards."""
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

    Raises:
        ConfigError: a sink is unknown, or its library is not installed.
        CepoError: the run folder cannot be written, or it would write through a link.
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
