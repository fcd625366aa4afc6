"""Opens the folder of a finished or running run as values: settings, metrics, rollouts, samples, checkpoints."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from cepo.config.record import without_interpolation
from cepo.config.sources import read_file
from cepo.errors import ConfigError, DataError
from cepo.files.trees import Tree
from cepo.report.score_tables import Cell
from cepo.run_folder.layout import CONFIG_FILE, checkpoint_folders
from cepo.run_folder.records import MetricsRow, read_generations, read_metrics
from cepo.sections.messages import written

if TYPE_CHECKING:
    import pandas

UNKNOWN_ESTIMATOR = "unknown method"
COUNTS = {
    "val/accuracy": "val/num_samples",
    "val/greedy_accuracy": "val/num_greedy_samples",
    "val/blind_accuracy": "val/num_blind_samples",
}
"""Of an accuracy, the metric with the number of its samples."""

_KINDS = (int | float, Mapping)
"""The kinds of settings of which more than the text is read."""


@dataclass(frozen=True, kw_only=True)
class RunData:
    """The records of a run, as they were when it was opened.

    Attributes:
        folder: the run folder, `trainer.save_checkpoint_path`.
        rows: the recorded metrics.
        config: the resolved settings as nested mappings; empty if the run wrote none.
    """

    folder: Path
    rows: Sequence[MetricsRow] = field(repr=False)
    config: Mapping[str, object] = field(repr=False)

    @property
    def name(self) -> str:
        """The folder's own name."""
        return self.folder.resolve().name

    @property
    def estimator(self) -> str:
        """The value of `algorithm.adv_estimator`."""
        return str(self.setting("algorithm.adv_estimator", UNKNOWN_ESTIMATOR))

    @property
    def last_step(self) -> int:
        """The last recorded step; 0 before the first."""
        return self.rows[-1].step if self.rows else 0

    @property
    def seconds(self) -> float:
        """The seconds of all steps, validations and checkpoints."""
        durations: list[float] = []
        for name in ("step", "validate", "save"):
            _, values = self.series(f"timing_s/{name}")
            durations += values
        return math.fsum(durations)

    @property
    def temperature(self) -> float:
        """The sampling temperature of validation."""
        sampled = self.setting("worker.rollout.temperature", 1.0)
        return self.setting("worker.rollout.val_override_config.temperature", sampled)

    @property
    def checkpoints(self) -> dict[int, Path]:
        """The folders of the complete checkpoints by step, oldest first."""
        return checkpoint_folders(self.folder)

    @cached_property
    def metrics(self) -> pandas.DataFrame:
        """The metrics: one row per step (the index; 0 is before training), one column per metric, NaN where unmeasured."""
        import pandas

        steps = pandas.Index([row.step for row in self.rows], name="step", dtype="int64")
        return pandas.DataFrame([dict(row.values) for row in self.rows], index=steps, dtype="float64")

    @cached_property
    def rollouts(self) -> pandas.DataFrame:
        """The recorded rollouts, one row each, with the columns of the trace (`docs/tracking.md`); raises `DataError`."""
        from cepo.run_folder.trace import read_rollout_table

        return read_rollout_table(self.folder).to_pandas()

    @cached_property
    def validation_samples(self) -> pandas.DataFrame:
        """The recorded validation responses, one row each, with the step after which they were sampled."""
        import pandas

        return pandas.DataFrame(list(read_generations(self.folder)))

    def setting(self, key: str, default: object = None) -> Any:
        """Returns the value of a dotted key of the configuration, or the default if it is missing or None.

        Raises `DataError` if the default is a number or a mapping, and the value is none.
        """
        node: object = self.config
        for part in key.split("."):
            node = node.get(part) if isinstance(node, Mapping) else None
        if node is None:
            return default
        kind = next((kind for kind in _KINDS if isinstance(default, kind)), object)
        if not isinstance(node, kind):
            raise self.wrong_setting(f"{key} is {written(node)[:100]}, which no run records")
        return node

    def wrong_setting(self, fault: str) -> DataError:
        """Returns the error for a configuration that no run has written."""
        return DataError(
            f"{self.folder / CONFIG_FILE}: {fault.rstrip('.')}. Correct it, or remove the file to read the rest"
        )

    @cached_property
    def curves(self) -> dict[str, dict[int, float]]:
        """The recorded metrics by name and step."""
        curves: dict[str, dict[int, float]] = {}
        for row in self.rows:
            for name, value in row.values.items():
                curves.setdefault(name, {})[row.step] = value
        return curves

    def series(self, name: str) -> tuple[list[int], list[float]]:
        """Returns the steps at which a metric was measured, and its values."""
        measured = self.values_by_step(name)
        return list(measured), list(measured.values())

    def values_by_step(self, name: str) -> dict[int, float]:
        return self.curves.get(name, {})

    def accuracies(self, name: str) -> dict[int, Cell]:
        """Returns by step one of the accuracies of `COUNTS`, with Wilson's intervals."""
        counts = self.values_by_step(COUNTS[name])
        cells: dict[int, Cell] = {}
        for step, accuracy in self.values_by_step(name).items():
            cells[step] = Cell.of_fraction(accuracy, counts.get(step))
        return cells


def load_run(folder: Path) -> RunData:
    """Opens a run folder, which may have no steps yet; raises `DataError` if it or a file is missing or broken."""
    rows = read_metrics(folder)
    config: Tree = {}
    path = folder / CONFIG_FILE
    if path.exists():
        try:
            source, _ = read_file(path, within=folder)
        except ConfigError as error:
            raise DataError(str(error)) from error
        config = {str(key): value for key, value in without_interpolation(source.tree).items()}
    return RunData(folder=folder, rows=rows, config=config)


def as_yaml(value: object) -> str:
    """Returns a value of the configuration as YAML in one line."""
    if not isinstance(value, list | Mapping):
        return written(value)
    return yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=math.inf).strip()
