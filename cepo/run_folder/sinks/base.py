"""Defines what a destination of records does, and what it is told about the run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol

from cepo.run_folder.trace import GroupRecord


@dataclass(frozen=True, kw_only=True)
class RunDescription:
    """The facts about a run that sinks receive.

    Attributes:
        config_text: the resolved configuration as YAML.
        max_steps: number of training steps of the whole run.
        project, experiment: names under which trackers group runs, and of the run there.
        resumed_step: the step of the checkpoint from which the run resumes; None for a new run.
        credit_of: returns what trackers show of a step's recorded groups under the run's method, as HTML.
    """

    folder: Path
    config_text: str
    max_steps: int
    project: str = "cepo"
    experiment: str = "demo"
    resumed_step: int | None = None
    max_rollouts_mb: int = 256
    credit_of: Callable[[Sequence[GroupRecord], str], str] | None = None


class Sink(Protocol):
    """A destination of metrics and samples. If a `required` sink fails, the run ends; any other sink is dropped."""

    required: ClassVar[bool] = False

    def log_metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Records the metrics after the 1-based `step` (0: before training). Steps never decrease."""
        ...

    def log_rollouts(self, records: Sequence[GroupRecord]) -> None:
        """Records groups of training rollouts. By default does nothing, as `close` does."""

    def log_generations(self, step: int, rows: Sequence[Mapping[str, object]]) -> None:
        """Records validation samples: one mapping each, with at least `prompt_id`, `response` and `accuracy`."""
        ...

    def close(self) -> None: ...
