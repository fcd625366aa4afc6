"""Reads a finished or running run for reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from cepo.config.recorded import without_interpolation
from cepo.errors import DataError
from cepo.tracking.run_folder import CONFIG_FILE, METRICS_FILE, MetricsRow, read_metrics

UNKNOWN_ESTIMATOR = "unknown method"


@dataclass(frozen=True, kw_only=True)
class RunData:
    """The metrics and configuration of a run folder. `config` is empty if the run wrote none."""

    folder: Path
    rows: Sequence[MetricsRow]
    config: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The folder's own name."""
        return self.folder.resolve().name

    @property
    def estimator(self) -> str:
        """The value of `algorithm.adv_estimator`."""
        return str(self._algorithm.get("adv_estimator", UNKNOWN_ESTIMATOR))

    @property
    def clip_radius(self) -> float | None:
        """The radius r of the evidence weight; None for a method without one."""
        section = self._algorithm.get(self.estimator)
        radius = section.get("clip_radius") if isinstance(section, Mapping) else None
        return float(radius) if isinstance(radius, int | float) else None

    @property
    def last_step(self) -> int:
        return self.rows[-1].step

    def series(self, name: str) -> tuple[list[int], list[float]]:
        """Returns the steps at which a metric was measured, and its values."""
        measured = [(row.step, row.values[name]) for row in self.rows if name in row.values]
        return [step for step, _ in measured], [value for _, value in measured]

    def values_by_step(self, name: str) -> dict[int, float]:
        """Returns a metric's values by step."""
        return dict(zip(*self.series(name), strict=True))

    @property
    def _algorithm(self) -> Mapping[str, Any]:
        section = self.config.get("algorithm")
        return section if isinstance(section, Mapping) else {}


def load_run(folder: Path) -> RunData:
    """Reads a run folder; raises `DataError` if it, `metrics.jsonl` or its first row is missing, or a file is broken."""
    rows = read_metrics(folder)
    if not rows:
        raise DataError(
            f"{folder / METRICS_FILE} has no rows yet; wait for the first step, or look at the run's own output"
        )
    return RunData(folder=folder, rows=rows, config=_read_config(folder / CONFIG_FILE))


def _read_config(path: Path) -> dict[str, Any]:
    """Returns the configuration as plain mappings, references left as text; `DataError` if it is not a mapping."""
    if not path.is_file():
        return {}
    try:
        tree = without_interpolation(OmegaConf.to_container(OmegaConf.load(path)))
    except (yaml.YAMLError, OmegaConfBaseException, OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path} cannot be read as YAML: {error}") from error
    if not isinstance(tree, dict):
        raise DataError(f"{path} must hold a mapping of settings, got {type(tree).__name__}")
    return {str(key): value for key, value in tree.items()}
