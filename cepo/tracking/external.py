"""Logs to TensorBoard, Weights & Biases, SwanLab, Trackio and MLflow through their own libraries; a resumed run
continues its tracker's run. `docs/tracking.md` says what each does without a network.
"""

from __future__ import annotations

import itertools
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
        identifier = earlier_run(run, "wandb") or uuid.uuid4().hex[:12]
        self._start(
            wandb,
            run,
            identifier,
            name=run.experiment,
            id=identifier,
            reinit="create_new",
            dir=str(run.folder),
            settings=wandb.Settings(console="off"),
        )
        self._run.define_metric(STEP_NAME)
        self._run.define_metric("*", step_metric=STEP_NAME)

    def log_metrics(self, step: int, values: Mapping[str, float]) -> None:
        numbers = {name: float(value) for name, value in values.items()}
        self._run.log({STEP_NAME: step, **numbers})

    def log_generations(self, step: int, rows: Sequence[Mapping[str, object]]) -> None:
        if rows:
            columns = list(dict.fromkeys(itertools.chain.from_iterable(rows)))
            table_rows: list[list[str]] = []
            for row in rows:
                table_rows.append([str(row.get(name, "")) for name in columns])
            table = self._library.Table(columns=columns, data=table_rows)
            self._run.log({STEP_NAME: step, "val/generations": table})


class SwanlabSink(_LibrarySink):
    def __init__(self, run: RunDescription) -> None:
        import swanlab  # pyright: ignore[reportMissingImports]

        folder = run.folder / SWANLAB_FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        identifier = earlier_run(run, "swanlab") or uuid.uuid4().hex[:12]
        self._start(
            swanlab,
            run,
            identifier,
            name=run.experiment,
            id=identifier,
            reinit=True,
            log_dir=str(folder),
        )

    def log_generations(self, step: int, rows: Sequence[Mapping[str, object]]) -> None:
        if rows:
            texts: list[Any] = []
            for row in rows:
                lines = [f"{name}: {value}" for name, value in row.items()]
                texts.append(self._library.Text("\n\n".join(lines)))
            self._run.log({"val/generations": texts}, step=step)


class TrackioSink(_LibrarySink):
    """Trackio finds runs by name, so that a run has the experiment's name with a suffix of its own."""

    def __init__(self, run: RunDescription) -> None:
        import trackio  # pyright: ignore[reportMissingImports]

        name = earlier_run(run, "trackio") or f"{run.experiment}-{uuid.uuid4().hex[:6]}"
        self._start(trackio, run, name, name=name, embed=False, auto_log_cpu=False, auto_log_gpu=False)

    def log_generations(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        if rows:
            table_rows: list[dict[str, str]] = []
            for row in rows:
                table_rows.append({name: str(value) for name, value in row.items()})
            self._run.log({"val/generations": self._library.Table(data=table_rows)}, step=step)


class MlflowSink(Sink):
    def __init__(self, run: RunDescription) -> None:
        from mlflow.entities import Metric, Param  # pyright: ignore[reportMissingImports]
        from mlflow.tracking import MlflowClient  # pyright: ignore[reportMissingImports]

        self._metric: Any = Metric
        address = os.environ.get("MLFLOW_TRACKING_URI")
        artifacts: str | None = None
        if not address:
            folder = (run.folder / MLFLOW_FOLDER).absolute()
            folder.mkdir(parents=True, exist_ok=True)
            address = f"sqlite:///{folder / 'mlflow.db'}"
            artifacts = (folder / "artifacts").as_uri()
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
        milliseconds = int(time.time() * 1000)
        metrics: list[Any] = []
        for name, value in finite_or_nan(values).items():
            allowed_name = _FORBIDDEN.sub("_", name)
            metrics.append(self._metric(allowed_name, value, milliseconds, step))
        self._client.log_batch(self._run_id, metrics=metrics)

    def log_generations(self, step: int, rows: Sequence[Mapping[str, object]]) -> None:
        if rows:
            lines = [json.dumps(dict(row), ensure_ascii=False, default=str) + "\n" for row in rows]
            self._client.log_text(self._run_id, "".join(lines), f"generations/step_{step}.jsonl")

    def close(self) -> None:
        self._client.set_terminated(self._run_id)


def earlier_run(run: RunDescription, tracker: str) -> str | None:
    """Returns the tracker's identifier of the run that `run` resumes; None for a new run or one unknown to the tracker."""
    if run.resumed_step is None:
        return None
    return _known(run).get(tracker)


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
            blocks: list[str] = []
            for name, text in row.items():
                code = textwrap.indent(str(text) or " ", "    ", lambda _: True)
                blocks.append(f"**{name}**\n\n{code}")
            self._writer.add_text(f"val/sample_{number}", "\n\n".join(blocks), global_step=step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
