"""SwanLab, through its own library. `SWANLAB_MODE=offline` keeps the run on this machine until `swanlab sync`."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from cepo.tracking.base import RunDescription
from cepo.tracking.continued import config_tree, earlier_run, finite_or_nan, remember_run
from cepo.tracking.records import SWANLAB_FOLDER, GroupRecord


class SwanlabSink:
    """Metrics by step and validation samples as texts. A resumed run appends to the run it goes on with."""

    required: ClassVar[bool] = False

    def __init__(self, run: RunDescription) -> None:
        import swanlab  # pyright: ignore[reportMissingImports]

        folder = run.folder / SWANLAB_FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        identifier = earlier_run(run, "swanlab") or uuid.uuid4().hex[:12]
        self._text: Any = swanlab.Text
        self._run: Any = swanlab.init(
            project=run.project,
            name=run.experiment,
            id=identifier,
            resume="allow",
            reinit=True,
            log_dir=str(folder),
            config=config_tree(run),
        )
        remember_run(run, "swanlab", identifier)

    def log_metrics(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({name: finite_or_nan(value) for name, value in values.items()}, step=step)

    def log_rollouts(self, records: Sequence[GroupRecord]) -> None:
        """Nothing: groups are in `rollouts.jsonl`, which the report draws."""

    def log_generations(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        texts = [self._text("\n\n".join(f"{name}: {value}" for name, value in row.items())) for row in rows]
        if texts:
            self._run.log({"val/generations": texts}, step=step)

    def close(self) -> None:
        self._run.finish()
