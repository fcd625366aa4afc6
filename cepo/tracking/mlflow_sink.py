"""MLflow, through its own client. Without `MLFLOW_TRACKING_URI` the run is kept in a database within the run folder."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from cepo.tracking.base import RunDescription
from cepo.tracking.continued import config_tree, earlier_run, finite_or_nan, flat_settings, remember_run
from cepo.tracking.records import MLFLOW_FOLDER, GroupRecord

_FORBIDDEN = re.compile(r"[^\w\-. :/]")
_LONGEST_PARAMETER = 500
_PARAMETERS_PER_CALL = 100


class MlflowSink:
    """Metrics by step, settings as parameters, the configuration and validation samples as artifacts.

    A resumed run appends to the run it goes on with. Characters that MLflow refuses in a metric's name become `_`.
    """

    required: ClassVar[bool] = False

    def __init__(self, run: RunDescription) -> None:
        from mlflow.entities import Metric, Param  # pyright: ignore[reportMissingImports]
        from mlflow.tracking import MlflowClient  # pyright: ignore[reportMissingImports]

        self._metric: Any = Metric
        address, artifacts = _places(run)
        self._client: Any = MlflowClient(tracking_uri=address)
        known = earlier_run(run, "mlflow")
        if known is not None:
            self._run_id = known
            self._client.update_run(known, status="RUNNING")
            self._client.log_text(known, run.config_text, f"config_from_step_{run.resumed_step}.yaml")
            return
        experiment = self._client.get_experiment_by_name(run.project)
        experiment_id = (
            self._client.create_experiment(run.project, artifact_location=artifacts)
            if experiment is None
            else experiment.experiment_id
        )
        self._run_id = self._client.create_run(experiment_id, run_name=run.experiment).info.run_id
        remember_run(run, "mlflow", self._run_id)
        settings = [Param(name, text[:_LONGEST_PARAMETER]) for name, text in flat_settings(config_tree(run))]
        for start in range(0, len(settings), _PARAMETERS_PER_CALL):
            self._client.log_batch(self._run_id, params=settings[start : start + _PARAMETERS_PER_CALL])
        self._client.log_text(self._run_id, run.config_text, "config.yaml")

    def log_metrics(self, step: int, values: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        metrics = [
            self._metric(_FORBIDDEN.sub("_", name), finite_or_nan(value), now, step) for name, value in values.items()
        ]
        self._client.log_batch(self._run_id, metrics=metrics)

    def log_rollouts(self, records: Sequence[GroupRecord]) -> None:
        """Nothing: groups are in `rollouts.jsonl`, which the report draws."""

    def log_generations(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        if rows:
            lines = "".join(json.dumps(dict(row), ensure_ascii=False, default=str) + "\n" for row in rows)
            self._client.log_text(self._run_id, lines, f"generations/step_{step}.jsonl")

    def close(self) -> None:
        self._client.set_terminated(self._run_id)


def _places(run: RunDescription) -> tuple[str, str | None]:
    """Where the run goes and, for a database of our own, where its artifacts go."""
    address = os.environ.get("MLFLOW_TRACKING_URI")
    if address:
        return address, None
    folder = (run.folder / MLFLOW_FOLDER).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    return f"sqlite:///{folder / 'mlflow.db'}", (folder / "artifacts").as_uri()
