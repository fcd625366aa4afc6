"""Reads the folder of a finished or running run, for reports and as values for programs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from omegaconf import OmegaConf

from cepo.config.checks import checkpoints_in, last_checkpoint
from cepo.config.listing import written
from cepo.config.other_names import with_present_keys
from cepo.config.recorded import without_interpolation
from cepo.config.sources import read_file
from cepo.errors import ConfigError, DataError
from cepo.foreign_files import read_json
from cepo.tracking.run_folder import CONFIG_FILE, MetricsRow, read_generations, read_metrics

if TYPE_CHECKING:
    import pandas

UNKNOWN_ESTIMATOR = "unknown method"
_TIMED = ("timing_s/step", "timing_s/validate", "timing_s/save")


@dataclass(frozen=True, kw_only=True)
class RunData:
    """The metrics and configuration of a run folder; `config` is empty if the run wrote none."""

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
        return str(self.setting("algorithm.adv_estimator", UNKNOWN_ESTIMATOR))

    @property
    def last_step(self) -> int:
        """The last recorded step; 0 before the first."""
        return self.rows[-1].step if self.rows else 0

    @property
    def seconds(self) -> float:
        """The seconds of all steps, validations and checkpoints."""
        return math.fsum(value for name in _TIMED for value in self.series(name)[1])

    def setting(self, key: str, default: Any = None) -> Any:
        """Returns the value of a dotted key of the configuration."""
        return nested(self.config, key, default)

    def temperature(self, *, validation: bool = False) -> float:
        """Returns the sampling temperature of training or of validation."""
        sampled = self.setting("worker.rollout.temperature", 1.0)
        return self.setting("worker.rollout.val_override_config.temperature", sampled) if validation else sampled

    def training_data(self) -> str | None:
        """Returns the name and checksum of the training set as the run's last checkpoint states them; None without one."""
        checkpoint = last_checkpoint(self.folder)
        if checkpoint is None:
            return None
        try:
            settings = read_json(checkpoint / "trainer_state.json", dict, within=self.folder)["settings"]
            return f"{Path(settings['data.train_files']).name}: {settings['data']}"
        except (DataError, KeyError, TypeError):  # an earlier version's, or damaged: the path must do
            return None

    def names(self, beginning: str) -> list[str]:
        """Returns the sorted names of the metrics that begin with `beginning`."""
        return sorted({name for row in self.rows for name in row.values if name.startswith(beginning)})

    def series(self, name: str) -> tuple[list[int], list[float]]:
        """Returns the steps at which a metric was measured, and its values."""
        measured = [(row.step, row.values[name]) for row in self.rows if name in row.values]
        return [step for step, _ in measured], [value for _, value in measured]

    def values_by_step(self, name: str) -> dict[int, float]:
        """Returns a metric's values by step."""
        return dict(zip(*self.series(name), strict=True))


def load_run(folder: Path) -> RunData:
    """Reads a run folder, which may have no steps yet; raises `DataError` if it or a file is missing or broken."""
    return RunData(folder=folder, rows=read_metrics(folder), config=_read_config(folder / CONFIG_FILE))


def nested(tree: Mapping[str, Any], key: str, default: Any = None) -> Any:
    """Returns the value of a dotted key in nested mappings, or the default if it is missing or None."""
    node: Any = tree
    for part in key.split("."):
        node = node.get(part) if isinstance(node, Mapping) else None
    return default if node is None else node


def as_yaml(value: Any) -> str:
    """Returns a value of the configuration as YAML in one line."""
    if not isinstance(value, list | Mapping):
        return written(value)
    return yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=math.inf).strip()


def _read_config(path: Path) -> dict[str, Any]:
    """Returns the configuration as plain mappings, without resolving references; `DataError` if it is not a mapping."""
    if not path.exists():
        return {}
    try:
        source, _ = read_file(path, within=path.parent)
    except ConfigError as error:
        raise DataError(str(error)) from error
    tree = without_interpolation(OmegaConf.to_container(source.tree))
    return with_present_keys({str(key): value for key, value in tree.items()})


@dataclass(frozen=True)
class Run:
    """The records of a finished or running run. Each property reads its files once; open the run anew to read on.

    Attributes:
        folder: the run folder, `trainer.save_checkpoint_path`.
    """

    folder: Path

    @cached_property
    def records(self) -> RunData:
        """The metrics by name and the settings by dotted key, as the report reads them; raises `DataError`."""
        return load_run(self.folder)

    @property
    def config(self) -> Mapping[str, Any]:
        """The resolved settings as nested mappings; empty if the run wrote none."""
        return self.records.config

    @cached_property
    def metrics(self) -> pandas.DataFrame:
        """The metrics: one row per step (the index; 0 is before training), one column per metric, NaN where unmeasured."""
        import pandas

        rows = self.records.rows
        steps = pandas.Index([row.step for row in rows], name="step", dtype="int64")
        return pandas.DataFrame([dict(row.values) for row in rows], index=steps, dtype="float64")

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
        return checkpoints_in(self.folder)

    def page(self, out: Path | str | None = None) -> Path:
        """Writes the report of the run, by default `report.html` in its folder, and returns the file's path."""
        from cepo.report.page import write_report

        return write_report(self.folder, None if out is None else Path(out))


def open_run(folder: Path | str) -> Run:
    """Opens a run folder; raises `DataError` if it is not one."""
    run = Run(Path(folder))
    read_metrics(run.folder)
    return run
