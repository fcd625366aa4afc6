"""Weights & Biases, through its own library. `WANDB_MODE=offline` keeps the run on this machine until `wandb sync`."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from cepo.tracking.base import RunDescription
from cepo.tracking.continued import config_tree, earlier_run, remember_run
from cepo.tracking.records import GroupRecord

STEP_NAME = "trainer/step"
"""The axis of all charts. The library's own step drops what is logged for an earlier one, as a resumed run does."""


class WandbSink:
    """Metrics over `trainer/step` and validation samples as a table. A resumed run appends to the run it goes on with."""

    required: ClassVar[bool] = False

    def __init__(self, run: RunDescription) -> None:
        import wandb  # pyright: ignore[reportMissingImports]

        run.folder.mkdir(parents=True, exist_ok=True)
        identifier = earlier_run(run, "wandb") or uuid.uuid4().hex[:12]
        self._table: Any = wandb.Table
        self._run: Any = wandb.init(
            project=run.project,
            name=run.experiment,
            id=identifier,
            resume="allow",
            reinit="create_new",
            dir=str(run.folder),
            config=config_tree(run),
            settings=wandb.Settings(console="off"),
        )
        remember_run(run, "wandb", identifier)
        self._run.define_metric(STEP_NAME)
        self._run.define_metric("*", step_metric=STEP_NAME)

    def log_metrics(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({STEP_NAME: step, **{name: float(value) for name, value in values.items()}})

    def log_rollouts(self, records: Sequence[GroupRecord]) -> None:
        """Nothing: groups are in `rollouts.jsonl`, which the report draws."""

    def log_generations(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        if not rows:
            return
        columns = list(dict.fromkeys(name for row in rows for name in row))
        cells = [[str(row.get(name, "")) for name in columns] for row in rows]
        self._run.log({STEP_NAME: step, "val/generations": self._table(columns=columns, data=cells)})

    def close(self) -> None:
        self._run.finish()
