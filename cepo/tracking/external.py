"""Logs to TensorBoard, Weights & Biases, SwanLab, Trackio and MLflow through their own libraries; a resumed run
continues its tracker's run. `docs/tracking.md` says what each does without a network.
"""

from __future__ import annotations

import json
import math
import os
import re
import textwrap
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from cepo.files.foreign import read_json
from cepo.files.trees import Tree, leaves
from cepo.run_folder.layout import MLFLOW_FOLDER, SWANLAB_FOLDER, TENSORBOARD_FOLDER, TRACKERS_FILE
from cepo.run_folder.writing import write_atomically
from cepo.tracking.sink import RunDescription, Sink

STEP_NAME = "trainer/step"
"""The axis of all W&B charts. On W&B's own step axis, a resumed run's values for earlier steps would be dropped."""
_FORBIDDEN = re.compile(r"[^\w\-. :/]")
_LONGEST_PARAMETER = 500
_PARAMETERS_PER_CALL = 100


class _LibrarySink(Sink):
    """Logs through a library whose runs have `log` and `finish`."""

    def _start(self, library: Any, run: RunDescription, identifier: str, **options: Any) -> None:
        self._library = library
        self._run = library.init(project=run.project, resume="allow", config=config_tree(run), **options)
        remember_run(run, library.__name__, identifier)

    def log_metrics(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(finite_or_nan(values), step=step)

    def close(self) -> None:
        self._run.finish()


class WandbSink(_LibrarySink):
    def __init__(self, run: RunDescription) -> None:
        import wandb  # pyright: ignore[reportMissingImports]

        run.folder.mkdir(parents=True, exist_ok=True)
        known, settings = earlier_run(run, "wandb") or uuid.uuid4().hex[:12], wandb.Settings(console="off")
        own = {"reinit": "create_new", "dir": str(run.folder), "settings": settings}
        self._start(wandb, run, known, name=run.experiment, id=known, **own)
        self._run.define_metric(STEP_NAME)
        self._run.define_metric("*", step_metric=STEP_NAME)

    def log_metrics(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({STEP_NAME: step, **{name: float(value) for name, value in values.items()}})

    def log_generations(self, step: int, rows: Sequence[Mapping[str, object]]) -> None:
        if rows:
            columns = list(dict.fromkeys(name for row in rows for name in row))
            cells = [[str(row.get(name, "")) for name in columns] for row in rows]
            table = self._library.Table(columns=columns, data=cells)
            self._run.log({STEP_NAME: step, "val/generations": table})


class SwanlabSink(_LibrarySink):
    def __init__(self, run: RunDescription) -> None:
        import swanlab  # pyright: ignore[reportMissingImports]

        folder = run.folder / SWANLAB_FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        known = earlier_run(run, "swanlab") or uuid.uuid4().hex[:12]
        self._start(swanlab, run, known, name=run.experiment, id=known, reinit=True, log_dir=str(folder))

    def log_generations(self, step: int, rows: Sequence[Mapping[str, object]]) -> None:
        if rows:
            texts = ["\n\n".join(f"{name}: {value}" for name, value in row.items()) for row in rows]
            self._run.log({"val/generations": [*map(self._library.Text, texts)]}, step=step)


class TrackioSink(_LibrarySink):
    """Trackio finds runs by name, so that a run has the experiment's name with a suffix of its own."""

    def __init__(self, run: RunDescription) -> None:
        import trackio  # pyright: ignore[reportMissingImports]

        name = earlier_run(run, "trackio") or f"{run.experiment}-{uuid.uuid4().hex[:6]}"
        self._start(trackio, run, name, name=name, embed=False, auto_log_cpu=False, auto_log_gpu=False)

    def log_generations(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        if rows:
            cells = [{name: str(value) for name, value in row.items()} for row in rows]
            self._run.log({"val/generations": self._library.Table(data=cells)}, step=step)


class MlflowSink(Sink):
    def __init__(self, run: RunDescription) -> None:
        from mlflow.entities import Metric, Param  # pyright: ignore[reportMissingImports]
        from mlflow.tracking import MlflowClient  # pyright: ignore[reportMissingImports]

        self._metric: Any = Metric
        address, artifacts = os.environ.get("MLFLOW_TRACKING_URI"), None
        if not address:
            folder = (run.folder / MLFLOW_FOLDER).absolute()
            folder.mkdir(parents=True, exist_ok=True)
            address, artifacts = f"sqlite:///{folder / 'mlflow.db'}", (folder / "artifacts").as_uri()
        self._client: Any = MlflowClient(tracking_uri=address)
        known = earlier_run(run, "mlflow")
        if known is not None:
            self._run_id = known
            self._client.update_run(known, status="RUNNING")
            self._client.log_text(known, run.config_text, f"config_from_step_{run.resumed_step}.yaml")
            return
        experiment = self._client.get_experiment_by_name(run.project)
        if experiment is None:
            number = self._client.create_experiment(run.project, artifact_location=artifacts)
        else:
            number = experiment.experiment_id
        self._run_id = self._client.create_run(number, run_name=run.experiment).info.run_id
        remember_run(run, "mlflow", self._run_id)
        settings = [Param(name, str(value)[:_LONGEST_PARAMETER]) for name, value in leaves(config_tree(run))]
        for start in range(0, len(settings), _PARAMETERS_PER_CALL):
            self._client.log_batch(self._run_id, params=settings[start : start + _PARAMETERS_PER_CALL])
        self._client.log_text(self._run_id, run.config_text, "config.yaml")

    def log_metrics(self, step: int, values: Mapping[str, float]) -> None:
        now, numbers = int(time.time() * 1000), finite_or_nan(values)
        metrics = [self._metric(_FORBIDDEN.sub("_", name), value, now, step) for name, value in numbers.items()]
        self._client.log_batch(self._run_id, metrics=metrics)

    def log_generations(self, step: int, rows: Sequence[Mapping[str, object]]) -> None:
        if rows:
            lines = "".join(json.dumps(dict(row), ensure_ascii=False, default=str) + "\n" for row in rows)
            self._client.log_text(self._run_id, lines, f"generations/step_{step}.jsonl")

    def close(self) -> None:
        self._client.set_terminated(self._run_id)


def earlier_run(run: RunDescription, tracker: str) -> str | None:
    """Returns the tracker's identifier of the run that `run` resumes; None for a new run or one unknown to the tracker."""
    return _known(run).get(tracker) if run.resumed_step is not None else None


def remember_run(run: RunDescription, tracker: str, identifier: str) -> None:
    run.folder.mkdir(parents=True, exist_ok=True)
    known = _known(run) | {tracker: identifier}
    write_atomically(run.folder / TRACKERS_FILE, json.dumps(known, indent=2) + "\n")


def config_tree(run: RunDescription) -> Tree:
    return yaml.safe_load(run.config_text) or {}


def finite_or_nan(values: Mapping[str, float]) -> dict[str, float]:
    """Replaces infinities by NaN, since some trackers store them as the largest float."""
    return {name: float(value) if math.isfinite(value) else math.nan for name, value in values.items()}


def _known(run: RunDescription) -> dict[str, str]:
    path = run.folder / TRACKERS_FILE
    return read_json(path, dict, within=run.folder) if path.exists() else {}


class TensorboardSink(Sink):
    def __init__(self, run: RunDescription) -> None:
        from torch.utils.tensorboard import SummaryWriter  # loads torch, which reading records must not do

        first_step = 0 if run.resumed_step is None else run.resumed_step + 1
        # What an earlier start recorded from `first_step` on is hidden.
        self._writer = SummaryWriter(log_dir=str(run.folder / TENSORBOARD_FOLDER), purge_step=first_step)

    def log_metrics(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, float(value), global_step=step)
        self._writer.flush()

    def log_generations(self, step: int, rows: Sequence[Mapping[str, object]]) -> None:
        for number, row in enumerate(rows):
            # As Markdown code blocks, so that a model's text is not interpreted as markup.
            blocks = [
                f"**{name}**\n\n{textwrap.indent(str(text) or ' ', '    ', lambda _: True)}"
                for name, text in row.items()
            ]
            self._writer.add_text(f"val/sample_{number}", "\n\n".join(blocks), global_step=step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
