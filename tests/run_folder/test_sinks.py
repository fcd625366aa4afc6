"""What each sink keeps of a run and how it goes on after a resume: console, TensorBoard, and others offline; sinks that fail."""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from run_folders import group, rollout, run_in, trackio_into, written

from cepo.errors import ConfigError
from cepo.run_folder.pictures import thumbnail
from cepo.run_folder.records import read_metrics
from cepo.run_folder.sinks.base import RunDescription, Sink
from cepo.run_folder.sinks.console import step_line
from cepo.run_folder.sinks.tracker import Tracker, build_sink, check_sinks
from cepo.run_folder.trace import GroupRecord
from cepo.terminal.lines import duration

STEP_METRICS = {
    "reward/mean": 0.53125,
    "reward/accuracy": 0.5,
    "groups/mixed": 0.62,
    "evidence/lambda": 0.42,
    "evidence/positive_fraction": 0.31,
    "evidence/negative_fraction": 0.12,
    "evidence/clip_low_rate": 0.03,
    "evidence/clip_high_rate": 0.05,
    "actor/grad_norm": 0.8342,
    "timing_s/generate": 2.13,
    "timing_s/update": 0.456,
    "timing_s/step": 6.0,
}


def test_the_console_lines_say_what_an_operator_asks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A validation before training with 96 of 256 right, then step 3 of 10.

    Wilson: (0.375 + 3.84 / 512 ± 1.96 sqrt(0.375 * 0.625 / 256 + 3.84 / 512^2)) / (1 + 3.84 / 256).
    """
    sink = build_sink("console", run_in(tmp_path))
    sink.log_metrics(0, {"val/accuracy": 0.375, "val/num_samples": 256, "timing_s/validate": 12.34})
    sink.log_metrics(3, STEP_METRICS)
    assert capsys.readouterr().out == (
        "step  0/10  validation accuracy 0.375 (0.318 to 0.436, n 256)  seconds 12.3\n"
        "step  3/10  reward 0.531  accuracy 0.500  mixed 62%  grad 0.834  6.0 s  ETA 42 s\n"
    )
    assert step_line(7, 10, {}, remaining_seconds=None).plain == "step  7/10"


@pytest.mark.parametrize("max_steps", [1, 20, 999, 100_000])
@pytest.mark.parametrize("seconds", [0.5, 59.9, 4_000.0])
def test_a_steps_line_has_at_most_80_columns(max_steps: int, seconds: float) -> None:
    values = {**STEP_METRICS, "timing_s/step": seconds, "actor/grad_norm": 1.234e-5, "reward/mean": -12.5}
    line = step_line(max_steps - 1, max_steps, values, remaining_seconds=seconds * max_steps).plain
    assert len(line) <= 80
    assert "accuracy 0.500" in line
    assert "ETA" in line


def test_durations_read_as_seconds_minutes_or_hours() -> None:
    assert [duration(value) for value in (41.6, 187, 3725)] == ["42 s", "3:07 min", "1:02:05 h"]


def test_tensorboard_shows_after_resume_at_step_1_each_step_once(tmp_path: Path) -> None:
    """An image is there once per start, as an image and not as its text."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sample = {"prompt_id": "a", "response": "# not a title", "accuracy": 1.0, "image": GREEN}
    for resumed, steps, value in ((None, (0, 1, 2, 3), 0.25), (1, (2, 3), 0.75)):
        sink = build_sink("tensorboard", run_in(tmp_path, resumed_step=resumed))
        for step in steps:
            sink.log_metrics(step, {"reward/mean": value})
            sink.log_generations(step, [sample])
        sink.log_rollouts(pair(3))
        sink.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    scalars = [(event.step, event.value) for event in events.Scalars("reward/mean")]
    assert scalars == [(0, 0.25), (1, 0.25), (2, 0.75), (3, 0.75)]
    text = events.Tensors("val/sample_0/text_summary")[-1].tensor_proto.string_val[0].decode()
    assert text == "**prompt_id**\n\n    a\n\n**response**\n\n    # not a title\n\n**accuracy**\n\n    1.0"
    assert [(image.step, image.width, image.height) for image in events.Images("val/sample_0")] == [
        (0, 64, 48),
        (2, 64, 48),
    ]


class FailingSink(Sink):
    """Fails at its first call and counts them."""

    calls = 0

    def log_metrics(self, step: int, values: Mapping[str, float]) -> None:
        self.calls += 1
        raise OSError("no space")

    def close(self) -> None:
        self.calls += 1


def test_a_failing_optional_sink_is_dropped_with_1_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    failing = FailingSink()
    tracker = Tracker({"failing": failing, "file": build_sink("file", run_in(tmp_path))})
    for step in (1, 2, 3):
        tracker.log_metrics(step, {"reward/mean": 0.5})
    tracker.log_rollouts([])
    tracker.close()
    assert failing.calls == 1
    assert caplog.messages == ["trainer.logger 'failing' failed and is off for the rest of the run: OSError: no space"]
    assert [row.step for row in read_metrics(tmp_path)] == [1, 2, 3]


def test_a_failing_required_sink_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FailingSink, "required", True)
    with pytest.raises(OSError, match="no space"):
        Tracker({"file": FailingSink()}).log_metrics(1, {"reward/mean": 0.5})


FIRST = 0.6251234
AGAIN = 0.1252345
LAST = 0.8753456


CONFIG = "algorithm:\n  adv_estimator: cepo\ntrainer:\n  project_name: geometry\nworker:\n  rollout:\n    n: 12345\n"


def of_geometry(folder: Path, **changes: Any) -> RunDescription:
    return run_in(folder, config_text=CONFIG, project="geometry", experiment="first", **changes)


def needed(*names: str) -> list[Any]:
    """The modules, or a skipped test that says which is not installed."""
    return [
        pytest.importorskip(name, reason=f"{name} is not installed; pip install -e '.[trackers]' brings it")
        for name in names
    ]


GREEN = thumbnail([Image.new("RGB", (64, 48), (10, 200, 30))])
SAMPLE = {"prompt_id": "a", "response": "the_answer_is_24", "accuracy": 1.0, "image": GREEN}


def pair(step: int) -> list[GroupRecord]:
    """A right and a wrong response, whose last token has most of the credit: 1.5 and 0.75 against a mean of 1."""
    tokens = ("3", " <b>sides", " 27")
    sides = [
        replace(rollout(right=right, tokens=tokens), token_advantages=[0.75 * sign, 0.75 * sign, 1.5 * sign])
        for right, sign in ((True, 1.0), (False, -1.0))
    ]
    return [group(step, sides)]


def log_two_halves(name: str, folder: Path) -> None:
    """Steps 1 and 2, then a run resumed after step 1 that does step 2 again and step 3."""
    sink = build_sink(name, of_geometry(folder))
    sink.log_metrics(1, {"reward/mean": FIRST, "val/pass@4": 1.0})
    sink.log_rollouts(pair(1))
    sink.log_rollouts(pair(2))  # within 10 steps of the first, so that it is left out
    sink.log_metrics(2, {"reward/mean": AGAIN, "actor/grad_norm": math.inf})
    sink.close()
    sink = build_sink(name, of_geometry(folder, resumed_step=1))
    sink.log_metrics(2, {"reward/mean": AGAIN})
    sink.log_metrics(3, {"reward/mean": LAST})
    sink.log_generations(3, [SAMPLE, {**SAMPLE, "accuracy": 0.0}])
    sink.log_generations(3, [])
    sink.close()


def require_credit(html: str) -> None:
    """The last token of each response has full colour, and markup of a model is text."""
    assert html.count("rgba(64, 145, 220, 0.60)") == html.count("rgba(235, 130, 50, 0.60)") == 1
    assert "cepo credits “27” of the right response most and blames “27” of the wrong response most." in html
    assert "&lt;b&gt;sides" in html
    assert "<script" not in html
    assert "data:image/png;base64," in html


def identifier(folder: Path, name: str) -> str:
    return json.loads((folder / "trackers.json").read_text())[name]


def test_wandb_offline_keeps_two_parts_of_1_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run has 4 rows and the settings."""
    needed("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path / "data"))
    log_two_halves("wandb", tmp_path)
    number = identifier(tmp_path, "wandb")
    parts = sorted(tmp_path.glob(f"wandb/offline-run-*/run-{number}.wandb"))
    assert len(parts) == len(list(tmp_path.glob("wandb/offline-run-*/*.wandb"))) == 2
    first, second = (written(part, b"trainer/step") for part in parts)
    for content, own_value, value_of_other_part in ((first, FIRST, LAST), (second, LAST, FIRST)):
        assert str(own_value).encode() in content
        assert str(AGAIN).encode() in content
        assert str(value_of_other_part).encode() not in content
        assert b"trainer/step" in content
        assert b"12345" in content
    staged = [path.read_bytes() for path in (tmp_path / "data").rglob("artifacts/staging/*")]
    tables = [json.loads(content) for content in staged if content.startswith(b"{")]
    table = next(table for table in tables if table["_type"] == "table")
    assert table["columns"] == ["image", "prompt_id", "response", "accuracy"]
    assert [row[1:] for row in table["data"]] == [["a", "the_answer_is_24", "1.0"], ["a", "the_answer_is_24", "0.0"]]
    for image, *_ in table["data"]:
        assert image["_type"] == "image-file"
        assert image["width"] == 64
        assert image["height"] == 48
    assert sum(content.startswith(b"\x89PNG") for content in staged) == 1
    files = "wandb/offline-run-*/files/media"
    [credit] = tmp_path.glob(f"{files}/html/credit/responses_*.html")
    require_credit(credit.read_text())


def test_mlflow_keeps_1_run_with_values_settings_and_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has 4 values."""
    needed("mlflow", "sqlalchemy", "alembic")
    from mlflow.tracking import MlflowClient  # pyright: ignore[reportMissingImports]

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    log_two_halves("mlflow", tmp_path)
    client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path}/mlflow/mlflow.db")
    experiment = client.get_experiment_by_name("geometry")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.run_id == identifier(tmp_path, "mlflow")
    assert run.info.run_name == "first"
    assert run.info.status == "FINISHED"
    assert run.data.params["worker.rollout.n"] == "12345"
    history = client.get_metric_history(run.info.run_id, "reward/mean")
    values = sorted((logged.step, logged.value) for logged in history)
    assert values == [(1, FIRST), (2, AGAIN), (2, AGAIN), (3, LAST)]
    assert math.isnan(client.get_metric_history(run.info.run_id, "actor/grad_norm")[0].value)
    assert client.get_metric_history(run.info.run_id, "val/pass_4")[0].value == 1.0
    artifacts = tmp_path / "mlflow" / "artifacts"
    (samples,) = artifacts.rglob("generations/step_3.jsonl")
    rows = [json.loads(line) for line in samples.read_text().splitlines()]
    assert [row["response"] for row in rows] == ["the_answer_is_24"] * 2
    [picture] = artifacts.rglob("generations/images/*.png")
    assert {row["image"] for row in rows} == {f"generations/images/{picture.name}"}
    with Image.open(picture) as image:
        assert image.size == (64, 48)
    [credit] = artifacts.rglob("credit/step_1.html")
    require_credit(credit.read_text())
    assert not list(artifacts.rglob("credit/step_2.html"))
    assert [path.read_text() for path in artifacts.rglob("config.yaml")] == [CONFIG]
    assert len(list(artifacts.rglob("config_from_step_1.yaml"))) == 1


def test_mlflow_follows_the_address_in_its_own_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needed("mlflow", "sqlalchemy", "alembic")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/elsewhere.db")
    sink = build_sink("mlflow", of_geometry(tmp_path / "run"))
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
    assert [path.read_text().count("the_answer_is_24") for path in tmp_path.rglob("media/text/*.txt")] == [1, 1]
    [picture] = tmp_path.rglob("media/image/*.png")
    with Image.open(picture) as image:
        assert image.size == (64, 48)
    [credit] = tmp_path.rglob("media/html/*.html")
    require_credit(credit.read_text())
    assert all("12345" in path.read_text() for path in tmp_path.rglob("files/config.yaml"))


def test_trackio_keeps_1_run_with_values_settings_and_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new run of the same name is another one, though Trackio finds runs by name."""
    needed("trackio")
    from trackio.sqlite_storage import SQLiteStorage  # pyright: ignore[reportMissingImports]

    trackio_into(tmp_path / "trackio", monkeypatch)
    log_two_halves("trackio", tmp_path / "run")
    name = identifier(tmp_path / "run", "trackio")
    assert name.startswith("first-")
    assert SQLiteStorage.get_runs("geometry") == [name]
    logs = SQLiteStorage.get_logs("geometry", name)
    values = [(entry["step"], entry["reward/mean"]) for entry in logs if "reward/mean" in entry]
    assert values == [(1, FIRST), (2, AGAIN), (2, AGAIN), (3, LAST)]
    [samples] = [log["val/generations"] for log in logs if "val/generations" in log]
    assert [row["response"] for row in samples["_value"]] == ["the_answer_is_24"] * 2
    assert samples["_value"][0]["image"]["_type"] == "trackio.image"
    [credit] = [path for path in (tmp_path / "trackio").rglob("*.html") if "media" in path.parts]
    require_credit(credit.read_text())
    assert SQLiteStorage.get_run_config("geometry", name)["worker"] == {"rollout": {"n": 12345}}
    second_run = build_sink("trackio", of_geometry(tmp_path / "other"))
    second_run.log_metrics(1, {"reward/mean": LAST})
    second_run.close()
    assert len(SQLiteStorage.get_runs("geometry")) == 2


@pytest.fixture
def without_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interpreter that finds none of the libraries."""

    real = importlib.util.find_spec
    hidden = ("wandb", "mlflow", "swanlab", "trackio", "sqlalchemy", "alembic")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name in hidden else real(name, *rest))


@pytest.mark.parametrize("name", ["wandb", "mlflow", "swanlab", "trackio"])
@pytest.mark.usefixtures("without_libraries")
def test_a_sink_without_its_library_names_the_extra(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"'{name}' needs {name}.*pip install -e '.\[trackers\]'"):
        check_sinks(["file", name])


def test_a_folder_named_wandb_is_not_taken_for_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "folder_that_is_no_library"
    (tmp_path / name).mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("cepo.run_folder.sinks.tracker._LIBRARIES", {"console": (name,)})
    with pytest.raises(ConfigError, match=f"needs {name}"):
        check_sinks(["console"])
