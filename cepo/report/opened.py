"""Opens the folder of a run as values: data frames of its metrics, rollouts and validation samples, checkpoints, page."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from cepo.config.paths import checkpoint_folders
from cepo.report.page import write_report
from cepo.report.recorded_run import RunData, load_run
from cepo.tracking.run_folder import read_generations

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True, kw_only=True)
class Run(RunData):
    """The records of a run, as they were when it was opened; see `RunData` for the settings and for single metrics."""

    @cached_property
    def metrics(self) -> pandas.DataFrame:
        """The metrics: one row per step (the index; 0 is before training), one column per metric, NaN where unmeasured."""
        import pandas

        steps = pandas.Index([row.step for row in self.rows], name="step", dtype="int64")
        return pandas.DataFrame([dict(row.values) for row in self.rows], index=steps, dtype="float64")

    @cached_property
    def rollouts(self) -> pandas.DataFrame:
        """The recorded rollouts, one row each, with the columns of the trace (`docs/tracking.md`); raises `DataError`."""
        from cepo.tracking.trace import read_rollout_table

        return read_rollout_table(self.folder).to_pandas()

    @cached_property
    def validation_samples(self) -> pandas.DataFrame:
        """The recorded validation responses, one row each, with the step after which they were sampled."""
        import pandas

        return pandas.DataFrame(list(read_generations(self.folder)))

    @property
    def checkpoints(self) -> dict[int, Path]:
        """The folders of the complete checkpoints by step, oldest first."""
        return checkpoint_folders(self.folder)

    def page(self, out: Path | str | None = None) -> Path:
        """Writes the report of the run, by default `report.html` in its folder, and returns the file's path."""
        return write_report(self.folder, None if out is None else Path(out))


def open_run(folder: Path | str) -> Run:
    """Opens a run folder, which may have no steps yet; raises `DataError` if it or a file is missing or broken."""
    return Run(**vars(load_run(Path(folder))))
