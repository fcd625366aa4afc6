"""Weights & Biases, MLflow, SwanLab and Trackio by their own libraries, offline: what they keep, and how a run goes on."""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
from pathlib import Path
from typing import Any

import pytest

from cepo.errors import ConfigError
from cepo.tracking.sinks import RunDescription, build_sink, build_tracker, check_sinks

FIRST, AGAIN, LAST = 0.6251234, 0.1252345, 0.8753456
CONFIG = "trainer:\n  project_name: geometry\nworker:\n  rollout:\n    n: 12345\n"


def run_in(folder: Path, resumed_step: int | None = None) -> RunDescription:
    names = {"project": "geometry", "experiment": "first"}
    return RunDescription(folder=folder, config_text=CONFIG, max_steps=3, resumed_step=resumed_step, **names)


def needed(*names: str) -> list[Any]:
    """The modules, or a skipped test that says which is not installed."""
    return [
        pytest.importorskip(name, reason=f"{name} is not installed; pip install 'cepo[trackers]' brings it")
        for name in names
    ]


def log_two_halves(name: str, folder: Path) -> None:
    """Steps 1 and 2, then a run resumed after step 1 that does step 2 again and step 3."""
    sink = build_sink(name, run_in(folder))
    sink.log_metrics(1, {"reward/mean": FIRST, "val/pass@4": 1.0})
    sink.log_metrics(2, {"reward/mean": AGAIN, "actor/grad_norm": math.inf})
    sink.close()
    sink = build_sink(name, run_in(folder, resumed_step=1))
    sink.log_metrics(2, {"reward/mean": AGAIN})
    sink.log_metrics(3, {"reward/mean": LAST})
    sink.log_generations(3, [{"prompt_id": "a", "response": "the_answer_is_24", "accuracy": 1.0}])
    sink.log_generations(3, [])
    sink.close()


def identifier(folder: Path, name: str) -> str:
    return json.loads((folder / "trackers.json").read_text())[name]


def test_wandb_offline_keeps_two_parts_of_1_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run has 4 rows and the settings."""
    needed("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    log_two_halves("wandb", tmp_path)
    number = identifier(tmp_path, "wandb")
    parts = sorted(tmp_path.glob(f"wandb/offline-run-*/run-{number}.wandb"))
    assert len(parts) == len(list(tmp_path.glob("wandb/offline-run-*/*.wandb"))) == 2
    first, second = (part.read_bytes() for part in parts)
    for content, inside, outside in ((first, FIRST, LAST), (second, LAST, FIRST)):
        assert str(inside).encode() in content
        assert str(AGAIN).encode() in content
        assert str(outside).encode() not in content
        assert b"trainer/step" in content
        assert b"12345" in content
    tables = list(tmp_path.glob("wandb/offline-run-*/files/media/table/val/generations_*.table.json"))
    assert [json.loads(table.read_text())["data"] for table in tables] == [[["a", "the_answer_is_24", "1.0"]]]


def test_mlflow_keeps_1_run_with_values_settings_and_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has 4 values."""
    needed("mlflow", "sqlalchemy", "alembic")
    from mlflow.tracking import MlflowClient  # pyright: ignore[reportMissingImports]

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    log_two_halves("mlflow", tmp_path)
    client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path}/mlflow/mlflow.db")
    experiment = client.get_experiment_by_name("geometry")
    (kept,) = client.search_runs([experiment.experiment_id])
    assert kept.info.run_id == identifier(tmp_path, "mlflow")
    assert (kept.info.run_name, kept.info.status) == ("first", "FINISHED")
    assert kept.data.params["worker.rollout.n"] == "12345"
    history = client.get_metric_history(kept.info.run_id, "reward/mean")
    values = sorted((each.step, each.value) for each in history)
    assert values == [(1, FIRST), (2, AGAIN), (2, AGAIN), (3, LAST)]
    assert math.isnan(client.get_metric_history(kept.info.run_id, "actor/grad_norm")[0].value)
    assert client.get_metric_history(kept.info.run_id, "val/pass_4")[0].value == 1.0
    artifacts = tmp_path / "mlflow" / "artifacts"
    (samples,) = artifacts.rglob("generations/step_3.jsonl")
    assert json.loads(samples.read_text())["response"] == "the_answer_is_24"
    assert [path.read_text() for path in artifacts.rglob("config.yaml")] == [CONFIG]
    assert len(list(artifacts.rglob("config_from_step_1.yaml"))) == 1


def test_mlflow_follows_the_address_in_its_own_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needed("mlflow", "sqlalchemy", "alembic")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/elsewhere.db")
    sink = build_sink("mlflow", run_in(tmp_path / "run"))
    sink.log_metrics(1, {"reward/mean": FIRST})
    sink.close()
    assert (tmp_path / "elsewhere.db").stat().st_size > 0
    assert not (tmp_path / "run" / "mlflow").exists()


def test_swanlab_offline_keeps_two_parts_of_1_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needed("swanlab")
    monkeypatch.setenv("SWANLAB_MODE", "offline")
    log_two_halves("swanlab", tmp_path)
    number = identifier(tmp_path, "swanlab")
    parts = sorted(tmp_path.glob(f"swanlab/run-*/run-{number}.swanlab"))
    assert len(parts) == len(list(tmp_path.glob("swanlab/run-*"))) == 2
    assert all(b"reward/mean" in part.read_bytes() for part in parts)
    assert [path.read_text().count("the_answer_is_24") for path in tmp_path.rglob("media/text/*.txt")] == [1]
    assert all("12345" in path.read_text() for path in tmp_path.rglob("files/config.yaml"))


def test_trackio_keeps_1_run_with_values_settings_and_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new run of the same name is another one, though Trackio finds runs by name."""
    needed("trackio")
    from trackio import utils  # pyright: ignore[reportMissingImports]
    from trackio.sqlite_storage import SQLiteStorage  # pyright: ignore[reportMissingImports]

    for module in (utils, importlib.import_module("trackio.sqlite_storage")):
        monkeypatch.setattr(module, "TRACKIO_DIR", tmp_path / "trackio")
    log_two_halves("trackio", tmp_path / "run")
    name = identifier(tmp_path / "run", "trackio")
    assert name.startswith("first-")
    assert SQLiteStorage.get_runs("geometry") == [name]
    logs = SQLiteStorage.get_logs("geometry", name)
    values = [(each["step"], each["reward/mean"]) for each in logs if "reward/mean" in each]
    assert values == [(1, FIRST), (2, AGAIN), (2, AGAIN), (3, LAST)]
    assert "the_answer_is_24" in str([each["val/generations"] for each in logs if "val/generations" in each])
    assert SQLiteStorage.get_run_config("geometry", name)["worker"] == {"rollout": {"n": 12345}}
    other = build_sink("trackio", run_in(tmp_path / "other"))
    other.log_metrics(1, {"reward/mean": LAST})
    other.close()
    assert len(SQLiteStorage.get_runs("geometry")) == 2


@pytest.fixture
def without_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interpreter that finds none of the libraries."""

    real = importlib.util.find_spec
    hidden = ("wandb", "mlflow", "swanlab", "trackio", "sqlalchemy", "alembic")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name in hidden else real(name, *rest))


@pytest.mark.parametrize("name", ["wandb", "mlflow", "swanlab", "trackio"])
@pytest.mark.usefixtures("without_libraries")
def test_a_sink_without_its_library_names_the_extra(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"'{name}' needs {name}.*pip install 'cepo\[trackers\]'"):
        build_tracker(["file", name], run_in(tmp_path))
    assert not list(tmp_path.iterdir())


def test_a_folder_named_wandb_is_not_taken_for_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "folder_that_is_no_library"
    (tmp_path / name).mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("cepo.tracking.sinks._LIBRARIES", {"console": (name,)})
    with pytest.raises(ConfigError, match=f"needs {name}"):
        check_sinks(["console"])
