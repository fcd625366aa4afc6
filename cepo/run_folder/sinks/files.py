"""Writes the records of a run to the files of its folder."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

from cepo.errors import CepoError
from cepo.files.safe_files import read_text
from cepo.run_folder.environment import describe_environment, read_environment
from cepo.run_folder.layout import CONFIG_FILE, ENVIRONMENT_FILE, GENERATIONS_FILE, METRICS_FILE
from cepo.run_folder.own_records import remember_own_record
from cepo.run_folder.sinks.base import RunDescription, Sink
from cepo.run_folder.trace import GroupRecord, Trace
from cepo.run_folder.writing import LineFile, finite_or_none, write_atomically


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
            self._write_environment(run)
            self._write_config(run)
            self._metrics = LineFile(run.folder / METRICS_FILE, last_step=run.resumed_step)
            self._generations = LineFile(run.folder / GENERATIONS_FILE, last_step=run.resumed_step)
            max_bytes = run.max_rollouts_mb * 1_000_000
            self._trace = Trace(run.folder, max_bytes=max_bytes, last_step=run.resumed_step)

    def log_metrics(self, step: int, values: Mapping[str, float]) -> None:
        row: dict[str, float | None] = {"step": step}
        for name, value in values.items():
            row[name] = finite_or_none(value)
        earlier_row = self._metrics.last or {"step": -1}
        last_step = earlier_row["step"]
        assert step >= last_step, f"metrics of step {step} come after those of step {last_step}"
        with _writing(self._folder):
            if step == last_step:
                self._metrics.replace_last({**earlier_row, **row})
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
            self._metrics.close()
            self._generations.close()

    def _write_environment(self, run: RunDescription) -> None:
        """Adds an entry for this start to those of earlier ones."""
        earlier_starts = read_environment(run.folder)
        entries = [*earlier_starts, describe_environment(run.resumed_step)]
        write_atomically(run.folder / ENVIRONMENT_FILE, json.dumps(entries, indent=2) + "\n", private=True)

    def _write_config(self, run: RunDescription) -> None:
        """Writes the configuration; if a resume changed it, the earlier one is kept, named by its last step."""
        path = run.folder / CONFIG_FILE
        if run.resumed_step is not None and path.exists():
            earlier = read_text(path, within=run.folder)
            copy = run.folder / f"config_until_step_{run.resumed_step}.yaml"
            # If the copy exists, the results of an earlier resume from this step were discarded.
            if earlier != run.config_text and not copy.exists():
                write_atomically(copy, earlier, private=True)
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
