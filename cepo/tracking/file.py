"""Writes the files of a run folder. All reports read them, so this is the only sink whose failure ends the run."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

from cepo.errors import CepoError, DataError
from cepo.foreign_files import read_text
from cepo.tracking.environment import describe_environment
from cepo.tracking.run_folder import (
    CONFIG_FILE,
    ENVIRONMENT_FILE,
    GENERATIONS_FILE,
    METRICS_FILE,
    LineFile,
    finite_or_none,
    read_environment,
    write_atomically,
)
from cepo.tracking.sink import RunDescription
from cepo.tracking.trace import GroupRecord, Trace
from cepo.trees import Tree

_log = logging.getLogger(__name__)


class FileSink:
    """Writes the records that `cepo.tracking.run_folder` lists; raises `CepoError` if a file cannot be written.

    On resume, rows after the resumed step are dropped first, so that no step appears twice. Metrics that are logged in
    several calls for one step become one row; a later value of the same metric replaces the earlier one.
    """

    required: ClassVar[bool] = True

    def __init__(self, run: RunDescription) -> None:
        self._folder, self._is_deleted = run.folder, False
        with _writing(run.folder):
            run.folder.mkdir(parents=True, exist_ok=True)
            entries = [*self._earlier_starts(), describe_environment(run.resumed_step)]
            self._write_config(run)
            write_atomically(run.folder / ENVIRONMENT_FILE, json.dumps(entries, indent=2) + "\n", private=True)
            self._metrics, self._generations = (
                LineFile(run.folder / name, last_step=run.resumed_step) for name in (METRICS_FILE, GENERATIONS_FILE)
            )
            self._trace = Trace(run.folder, max_bytes=run.max_rollouts_mb * 1_000_000, last_step=run.resumed_step)
        if self._metrics.last is None and run.resumed_step:
            _log.warning("%s has no row of the %d earlier steps", run.folder / METRICS_FILE, run.resumed_step)

    def log_metrics(self, step: int, values: Mapping[str, float]) -> None:
        last = self._metrics.last or {"step": -1}
        if step < last["step"]:
            raise CepoError(
                f"metrics of step {step} come after those of step {last['step']} in {self._folder / METRICS_FILE}. "
                "Steps must not go back: resume the run, or give it a new folder (trainer.save_checkpoint_path)."
            )
        row = {"step": step} | {name: finite_or_none(value) for name, value in values.items()}
        with _writing(self._folder):
            if step == last["step"]:
                self._metrics.replace_last({**last, **row})
            else:
                self._metrics.append(row)
            self._metrics.to_disk()
        self._warn_if_deleted()

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
        self._warn_if_deleted()

    def _warn_if_deleted(self) -> None:
        path = self._folder / METRICS_FILE
        if not self._is_deleted and not path.exists():
            self._is_deleted = True
            _log.warning("%s was deleted or moved during the run: reports will lack the rows before and after", path)

    def _earlier_starts(self) -> list[Tree]:
        """Returns the content of `environment.json`; a damaged file is renamed."""
        try:
            return read_environment(self._folder)
        except DataError as error:
            beside = self._folder / f"{ENVIRONMENT_FILE}.damaged"
            (self._folder / ENVIRONMENT_FILE).replace(beside)
            _log.warning("%s; it was moved to %s, and a new file is started", error, beside.name)
            return []

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


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CepoError(
            f"cannot write the run's records in {folder}: {error}. Free disk space, allow writing there, or choose another "
            "folder with trainer.save_checkpoint_path."
        ) from error
