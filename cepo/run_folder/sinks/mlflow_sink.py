"""Logs to MLflow, into a database of the run folder unless MLFLOW_TRACKING_URI names a store."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

from cepo.files.trees import leaves
from cepo.run_folder.layout import MLFLOW_FOLDER
from cepo.run_folder.sinks.base import RunDescription
from cepo.run_folder.sinks.external import ExternalSink, config_tree, earlier_run, finite_or_nan, remember_run
from cepo.run_folder.sinks.samples import IMAGE, TrackedSample

_FORBIDDEN = re.compile(r"[^\w\-. :/]")
_LONGEST_PARAMETER = 500
_PARAMETERS_PER_CALL = 100


class MlflowSink(ExternalSink):
    def __init__(self, run: RunDescription) -> None:
        from mlflow.entities import Metric, Param  # pyright: ignore[reportMissingImports]
        from mlflow.tracking import MlflowClient  # pyright: ignore[reportMissingImports]

        super().__init__(run)
        self._metric: Any = Metric
        self._logged_images: set[str] = set()
        address, artifacts = _store(run)
        self._client: Any = MlflowClient(tracking_uri=address)
        known_run = earlier_run(run, "mlflow")
        if known_run is not None:
            self._run_id = known_run
            self._client.update_run(known_run, status="RUNNING")
            self._client.log_text(known_run, run.config_text, f"config_from_step_{run.resumed_step}.yaml")
            return
        experiment = self._client.get_experiment_by_name(run.project)
        if experiment is None:
            experiment_id = self._client.create_experiment(run.project, artifact_location=artifacts)
        else:
            experiment_id = experiment.experiment_id
        self._run_id = self._client.create_run(experiment_id, run_name=run.experiment).info.run_id
        remember_run(run, "mlflow", self._run_id)
        settings: list[Any] = []
        for name, value in leaves(config_tree(run)):
            settings.append(Param(name, str(value)[:_LONGEST_PARAMETER]))
        for start in range(0, len(settings), _PARAMETERS_PER_CALL):
            self._client.log_batch(self._run_id, params=settings[start : start + _PARAMETERS_PER_CALL])
        self._client.log_text(self._run_id, run.config_text, "config.yaml")

    def log_metrics(self, step: int, values: Mapping[str, float]) -> None:
        milliseconds = int(time.time() * 1000)
        metrics: list[Any] = []
        for name, value in finite_or_nan(values).items():
            allowed_name = _FORBIDDEN.sub("_", name)
            metrics.append(self._metric(allowed_name, value, milliseconds, step))
        self._client.log_batch(self._run_id, metrics=metrics)

    def log_samples(self, step: int, samples: Sequence[TrackedSample]) -> None:
        lines: list[str] = []
        for sample in samples:
            line = dict(sample.texts)
            if sample.image is not None:
                path = f"generations/images/{sample.image_name}.png"
                line[IMAGE] = path
                if path not in self._logged_images:
                    self._client.log_image(self._run_id, sample.image, artifact_file=path)
                    self._logged_images.add(path)
            lines.append(json.dumps(line, ensure_ascii=False) + "\n")
        self._client.log_text(self._run_id, "".join(lines), f"generations/step_{step}.jsonl")

    def log_credit(self, step: int, html: str) -> None:
        self._client.log_text(self._run_id, html, f"credit/step_{step}.html")

    def close(self) -> None:
        self._client.set_terminated(self._run_id)


def _store(run: RunDescription) -> tuple[str, str | None]:
    """Returns the address of the store, and where it keeps artifacts, None if it decides itself."""
    address = os.environ.get("MLFLOW_TRACKING_URI")
    if address:
        return address, None
    folder = (run.folder / MLFLOW_FOLDER).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    return f"sqlite:///{folder / 'mlflow.db'}", (folder / "artifacts").as_uri()
