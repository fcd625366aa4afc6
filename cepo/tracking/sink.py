"""Defines the protocol of a sink, the description of a run that sinks receive, and the registry of sinks."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Protocol

from cepo.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from rich.console import Console

    from cepo.tracking.trace import GroupRecord

_SINKS = {
    "console": ("cepo.tracking.console", "ConsoleSink"),
    "file": ("cepo.tracking.file", "FileSink"),
    "mlflow": ("cepo.tracking.external", "MlflowSink"),
    "swanlab": ("cepo.tracking.external", "SwanlabSink"),
    "tensorboard": ("cepo.tracking.external", "TensorboardSink"),
    "trackio": ("cepo.tracking.external", "TrackioSink"),
    "wandb": ("cepo.tracking.external", "WandbSink"),
}
_LIBRARIES = {
    "mlflow": ("mlflow", "sqlalchemy", "alembic"),
    "swanlab": ("swanlab",),
    "trackio": ("trackio",),
    "wandb": ("wandb",),
}
"""Libraries that a sink needs beyond the package's own dependencies; the extra `trackers` installs them."""


@dataclass(frozen=True, kw_only=True)
class RunDescription:
    """The facts about a run that sinks receive.

    Attributes:
        folder: the run folder; created if it does not exist.
        project: `trainer.project_name`, under which trackers group runs.
        experiment: `trainer.experiment_name`, the run's name there.
        config_text: the resolved configuration as YAML.
        max_steps: number of training steps of the whole run.
        resumed_step: the step of the checkpoint from which the run resumes; None for a new run.
        max_rollouts_mb: `trainer.rollouts_max_mb`, the maximum size of the recorded rollouts.
        device_names: accelerators in use; empty for a run on the CPU.
        console: where the console sink writes; None for standard output.
    """

    folder: Path
    config_text: str
    max_steps: int
    project: str = "cepo"
    experiment: str = "demo"
    resumed_step: int | None = None
    max_rollouts_mb: int = 256
    device_names: Sequence[str] = ()
    command_line: Sequence[str] = field(default_factory=lambda: tuple(sys.argv))
    console: Console | None = None


class Sink(Protocol):
    """A destination of metrics and samples. If a `required` sink fails, the run ends; any other sink is dropped."""

    required: ClassVar[bool] = False

    def log_metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Records the metrics after the 1-based `step` (0: before training). Steps never decrease."""
        ...

    def log_rollouts(self, records: Sequence[GroupRecord]) -> None:
        """Records groups of training rollouts. By default does nothing, since the file sink records them."""

    def log_generations(self, step: int, rows: Sequence[Mapping[str, object]]) -> None:
        """Records validation samples: one mapping each, with at least `prompt_id`, `response` and `accuracy`."""
        ...

    def close(self) -> None:
        """Writes pending data and closes files."""
        ...


def build_sink(name: str, run: RunDescription) -> Sink:
    """Builds the sink registered under `name`; raises `ConfigError` as `check_sinks` does."""
    check_sinks([name])
    module, class_name = _SINKS[name]
    return getattr(importlib.import_module(module), class_name)(run)


def check_sinks(names: Sequence[str]) -> None:
    """Checks the names of sinks; raises `ConfigError` if one is not registered or its library is not installed."""
    known = sorted(_SINKS)
    for name in names:
        if name not in _SINKS:
            raise ConfigError(
                f"trainer.logger '{name}' is unknown.{did_you_mean(name, known)} Known: {', '.join(known)}"
            )
        missing = [library for library in _LIBRARIES.get(name, ()) if not _is_installed(library)]
        if missing:
            raise ConfigError(
                f"trainer.logger '{name}' needs {', '.join(missing)}, not installed here. "
                f"Install it with: pip install 'cepo[trackers]', or leave '{name}' out of trainer.logger"
            )


def _is_installed(library: str) -> bool:
    """Returns whether a library can be imported; ignores plain folders of its name in the working directory."""
    spec = importlib.util.find_spec(library)
    return spec is not None and spec.origin is not None
