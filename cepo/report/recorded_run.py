"""Reads the metrics and settings of a finished or running run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from cepo.config.listing import written
from cepo.config.moved_keys import with_present_keys
from cepo.config.recorded import without_interpolation
from cepo.config.sources import read_file
from cepo.errors import ConfigError, DataError
from cepo.tracking.run_folder import CONFIG_FILE, MetricsRow, read_metrics
from cepo.trees import Tree

UNKNOWN_ESTIMATOR = "unknown method"


@dataclass(frozen=True, kw_only=True)
class RunData:
    """The records of a run, as they were when it was opened.

    Attributes:
        folder: the run folder, `trainer.save_checkpoint_path`.
        rows: the recorded metrics.
        config: the resolved settings as nested mappings; empty if the run wrote none.
    """

    folder: Path
    rows: Sequence[MetricsRow]
    config: Mapping[str, object]

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
        return math.fsum(value for name in ("step", "validate", "save") for value in self.series(f"timing_s/{name}")[1])

    @property
    def temperature(self) -> float:
        """The sampling temperature of validation."""
        sampled = self.setting("worker.rollout.temperature", 1.0)
        return self.setting("worker.rollout.val_override_config.temperature", sampled)

    def setting(self, key: str, default: object = None) -> Any:
        """Returns the value of a dotted key of the configuration, or the default if it is missing or None."""
        node: object = self.config
        for part in key.split("."):
            node = node.get(part) if isinstance(node, Mapping) else None
        return default if node is None else node

    def names(self) -> list[str]:
        """Returns the sorted names of the recorded metrics."""
        return sorted({name for row in self.rows for name in row.values})

    def series(self, name: str) -> tuple[list[int], list[float]]:
        """Returns the steps at which a metric was measured, and its values."""
        measured = [(row.step, row.values[name]) for row in self.rows if name in row.values]
        return [step for step, _ in measured], [value for _, value in measured]

    def values_by_step(self, name: str) -> dict[int, float]:
        """Returns a metric's values by step."""
        return dict(zip(*self.series(name), strict=True))


def load_run(folder: Path) -> RunData:
    """Opens a run folder, which may have no steps yet; raises `DataError` if it or a file is missing or broken."""
    return RunData(folder=folder, rows=read_metrics(folder), config=_read_config(folder / CONFIG_FILE))


def as_yaml(value: object) -> str:
    """Returns a value of the configuration as YAML in one line."""
    if not isinstance(value, list | Mapping):
        return written(value)
    return yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=math.inf).strip()


def _read_config(path: Path) -> Tree:
    """Returns the configuration as plain mappings, without resolving references; `DataError` if it is not a mapping."""
    if not path.exists():
        return {}
    try:
        source, _ = read_file(path, within=path.parent)
    except ConfigError as error:
        raise DataError(str(error)) from error
    return with_present_keys({str(key): value for key, value in without_interpolation(source.tree).items()})
