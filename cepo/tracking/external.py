"""Logs to TensorBoard, Weights & Biases, SwanLab, Trackio and MLflow through their own libraries; a resumed run
continues its tracker's run.

| tracker | without a network or server |
| --- | --- |
| Weights & Biases | `WANDB_MODE=offline` keeps the run on this machine until `wandb sync` |
| SwanLab | `SWANLAB_MODE=offline` keeps it until `swanlab sync` |
| Trackio | without `TRACKIO_SPACE_ID` or `TRACKIO_SERVER_URL` the run is kept in `TRACKIO_DIR`; `trackio show` shows it |
| MLflow | without `MLFLOW_TRACKING_URI` the run is kept in a database within the run folder |
"""

from __future__ import annotations

import json
import math
import os
import re
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import yaml

from cepo.foreign_files import read_json
from cepo.tracking.run_folder import MLFLOW_FOLDER, SWANLAB_FOLDER, TENSORBOARD_FOLDER, TRACKERS_FILE, write_atomically
from cepo.tracking.sink import RunDescription, Sink
from cepo.tracking.trace import GroupRecord
from cepo.trees import Tree, leaves

STEP_NAME = "trainer/step"
"""The axis of all W&B charts. On W&B's own step axis, a resumed run's values for earlier steps would be dropped."""
_FORBIDDEN = re.compile(r"[^\w\-. :/]")
_LONGEST_PARAMETER = 500
_PARAMETERS_PER_CALL = 100


class _LibrarySink(Sink):
    """Logs through a library whose runs have `log` and `finish`."""

    _run: Any

    def log_metrics(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({name: finite_or_nan(value) for name, value in values.items()}, step=step)

    def close(self) -> None:
        self._run.finish()


class WandbSink(_LibrarySink):
    """Logs to Weights & Biases: metrics over `trainer/step`, rollouts and validation samples as tables."""

    def __init__(self, run: RunDescription) -> None:
        import wandb  # pyright: ignore[reportMissingImports]

        run.folder.mkdir(parents=True, exist_ok=True)
        identifier = earlier_run(run, "wandb") or uuid.uuid4().hex[:12]
        self._table: Any = wandb.Table
        self._run = wandb.init(
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

    def log_generations(self, step: int, rows: Sequence[Mapping[str, object]]) -> None:
        if not rows:
            return
        columns = list(dict.fromkeys(name for row in rows for name in row))
        cells = [[str(row.get(name, "")) for name in columns] for row in rows]
        self._run.log({STEP_NAME: step, "val/generations": self._table(columns=columns, data=cells)})

    def log_rollouts(self, records: Sequence[GroupRecord]) -> None:
        columns = ["problem", "ground_truth", "response", "reward", "accuracy"]
        cells = [
            [group.problem, group.ground_truth, rollout.response, rollout.reward, rollout.accuracy]
            for group in records
            for rollout in group.rollouts
        ]
        if cells:
            self._run.log({STEP_NAME: records[0].step, "rollouts": self._table(columns=columns, data=cells)})


class SwanlabSink(_LibrarySink):
    """Logs to SwanLab: metrics by step, validation samples as texts."""

    def __init__(self, run: RunDescription) -> None:
        import swanlab  # pyright: ignore[reportMissingImports]

        folder = run.folder / SWANLAB_FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        identifier = earlier_run(run, "swanlab") or uuid.uuid4().hex[:12]
        self._text: Any = swanlab.Text
        self._run = swanlab.init(
            project=run.project,
            name=run.experiment,
            id=identifier,
            resume="allow",
            reinit=True,
            log_dir=str(folder),
            config=config_tree(run),
        )
        remember_run(run, "swanlab", identifier)

    def log_generations(self, step: int, rows: Sequence[Mapping[str, object]]) -> None:
        texts = [self._text("\n\n".join(f"{name}: {value}" for name, value in row.items())) for row in rows]
        if texts:
            self._run.log({"val/generations": texts}, step=step)


class TrackioSink(_LibrarySink):
    """Logs to Trackio: metrics by step, validation samples as tables.

    Trackio finds runs by name, so that a run has the experiment's name with a suffix of its own.
    """

    def __init__(self, run: RunDescription) -> None:
        import trackio  # pyright: ignore[reportMissingImports]

        name = earlier_run(run, "trackio") or f"{run.experiment}-{uuid.uuid4().hex[:6]}"
        self._table: Any = trackio.Table
        self._run = trackio.init(
            project=run.project,
            name=name,
            resume="allow",
            config=config_tree(run),
            embed=False,
            auto_log_cpu=False,
            auto_log_gpu=False,
        )
        remember_run(run, "trackio", name)

    def log_generations(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        if rows:
            cells = [{name: str(value) for name, value in row.items()} for row in rows]
            self._run.log({"val/generations": self._table(data=cells)}, step=step)


class MlflowSink(Sink):
    """Logs to MLflow: metrics by step, settings as parameters, the configuration and validation samples as artifacts.

    Characters that MLflow rejects in a metric's name become `_`.
    """

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
        settings = [Param(name, str(value)[:_LONGEST_PARAMETER]) for name, value in leaves(config_tree(run))]
        for start in range(0, len(settings), _PARAMETERS_PER_CALL):
            self._client.log_batch(self._run_id, params=settings[start : start + _PARAMETERS_PER_CALL])
        self._client.log_text(self._run_id, run.config_text, "config.yaml")

    def log_metrics(self, step: int, values: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        metrics = [
            self._metric(_FORBIDDEN.sub("_", name), finite_or_nan(value), now, step) for name, value in values.items()
        ]
        self._client.log_batch(self._run_id, metrics=metrics)

    def log_generations(self, step: int, rows: Sequence[Mapping[str, object]]) -> None:
        if rows:
            lines = "".join(json.dumps(dict(row), ensure_ascii=False, default=str) + "\n" for row in rows)
            self._client.log_text(self._run_id, lines, f"generations/step_{step}.jsonl")

    def close(self) -> None:
        self._client.set_terminated(self._run_id)


def _places(run: RunDescription) -> tuple[str, str | None]:
    """Returns the tracking URI and, for the run folder's own database, the URI of its artifacts."""
    address = os.environ.get("MLFLOW_TRACKING_URI")
    if address:
        return address, None
    folder = (run.folder / MLFLOW_FOLDER).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    return f"sqlite:///{folder / 'mlflow.db'}", (folder / "artifacts").as_uri()


def earlier_run(run: RunDescription, tracker: str) -> str | None:
    """Returns the tracker's identifier of the run that `run` resumes; None for a new run or one unknown to the tracker."""
    return _known(run).get(tracker) if run.resumed_step is not None else None


def remember_run(run: RunDescription, tracker: str, identifier: str) -> None:
    """Stores the tracker's identifier in the run folder, where a resumed run finds it."""
    run.folder.mkdir(parents=True, exist_ok=True)
    known = _known(run) | {tracker: identifier}
    write_atomically(run.folder / TRACKERS_FILE, json.dumps(known, indent=2) + "\n")


def config_tree(run: RunDescription) -> Tree:
    return yaml.safe_load(run.config_text) or {}


def finite_or_nan(value: float) -> float:
    """Replaces infinities by NaN, since some trackers store them as the largest float."""
    return float(value) if math.isfinite(value) else math.nan


def _known(run: RunDescription) -> dict[str, str]:
    path = run.folder / TRACKERS_FILE
    return read_json(path, dict, within=run.folder) if path.exists() else {}


_CELL = (10, 6)
"""Height and width of a token in a heat map, in pixels."""
_MOST_TOKENS = 400
_ABOVE, _BELOW, _BEYOND = np.array([67, 147, 195]), np.array([214, 96, 77]), 217


class TensorboardSink(Sink):
    """Logs metrics as scalars, samples as text, and a heat map of token advantages for one group per step.

    On resume, TensorBoard hides earlier records of the steps that are repeated.
    """

    def __init__(self, run: RunDescription) -> None:
        from torch.utils.tensorboard import SummaryWriter  # loads torch, which reading records must not do

        first_step = 0 if run.resumed_step is None else run.resumed_step + 1
        self._writer = SummaryWriter(log_dir=str(run.folder / TENSORBOARD_FOLDER), purge_step=first_step)

    def log_metrics(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, float(value), global_step=step)
        self._writer.flush()

    def log_generations(self, step: int, rows: Sequence[Mapping[str, object]]) -> None:
        for number, row in enumerate(rows):
            text = "\n\n".join(f"**{name}**\n\n{_indented(str(value))}" for name, value in row.items())
            self._writer.add_text(f"val/sample_{number}", text, global_step=step)
        self._writer.flush()

    def log_rollouts(self, records: Sequence[GroupRecord]) -> None:
        for group in records[:1]:
            self._writer.add_image(
                "rollouts/advantages", advantage_map(group), global_step=group.step, dataformats="HWC"
            )
            parts = [("problem", group.problem), ("ground truth", group.ground_truth)]
            parts += [(f"reward {rollout.reward:g}", rollout.response) for rollout in group.rollouts]
            text = "\n\n".join(f"**{name}**\n\n{_indented(value)}" for name, value in parts)
            self._writer.add_text("rollouts/responses", text, global_step=group.step)

    def close(self) -> None:
        self._writer.close()


def advantage_map(group: GroupRecord) -> np.ndarray:
    """Draws a heat map of advantages, (height, width, 3) bytes, with a row per rollout and a cell per token.

    White is advantage 0. Positive advantages are blue and negative ones red, with full colour at the group's largest
    |advantage|. Cells after the end of a response are grey. Only the first 400 tokens of a response are shown.
    """
    longest = min(max(len(rollout.tokens) for rollout in group.rollouts), _MOST_TOKENS)
    cells = np.full((len(group.rollouts), max(longest, 1), 3), _BEYOND, dtype=np.uint8)
    rows = [np.nan_to_num(np.asarray(rollout.token_advantages[:longest])) for rollout in group.rollouts]
    scale = max((float(np.abs(row).max()) for row in rows if row.size), default=0.0) or 1.0
    for cell, row in zip(cells, rows, strict=True):
        share = row[:, None] / scale
        cell[: len(row)] = np.round(255 + np.abs(share) * (np.where(share > 0, _ABOVE, _BELOW) - 255))
    return cells.repeat(_CELL[0], axis=0).repeat(_CELL[1], axis=1)


def _indented(text: str) -> str:
    """Returns a Markdown code block, so that a model's text is not interpreted as markup."""
    return "\n".join("    " + line for line in text.splitlines() or [""])
