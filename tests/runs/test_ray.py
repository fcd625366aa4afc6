"""Two worker processes under Ray: the same run as one process, and one that outlives the death of a worker."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from json_files import read_lines
from rounding import LOG_PROBS
from training_runs import REPOSITORY, TWO_TEACHERS, Train, checked_config, recorded_groups

from cepo.errors import EngineError, WorkerLostError
from cepo.train import train as train_config
from cepo.trainer.loop import Trainer

pytestmark = pytest.mark.heavy
ray = pytest.importorskip("ray")

TWO_WORKERS = "trainer.n_gpus_per_node=2"
TrainOnRay = Callable[..., None]


@pytest.fixture(scope="module", autouse=True)
def _cluster_ends_with_these_tests() -> Iterator[None]:
    yield
    ray.shutdown()


@pytest.fixture
def train_on_ray(tiny_run: list[str], tmp_path: Path) -> TrainOnRay:
    """Trains in worker processes, in the test's own folder."""

    def train(*overrides: str) -> None:
        settings = [*tiny_run, "trainer.launcher=ray", f"trainer.save_checkpoint_path={tmp_path}", *overrides]
        train_config(checked_config(settings))

    return train


def kill_rank_1(monkeypatch: pytest.MonkeyPatch, *, method: str, call: int, with_signal: int) -> list[int]:
    """Ends rank 1 a moment after the `call`-th call of a worker method has begun; gives the killed process's number."""
    from cepo.runtime.ray_backend import RayBackend

    killed: list[int] = []
    plain = RayBackend.call
    calls = []

    def faulty(self: Any, name: str, *arguments: Any, **keywords: Any) -> Any:
        calls.extend([name] * (name == method))
        if len(calls) == call and not killed:
            killed.append(self.ranks.locations[1].process)
            threading.Timer(0.02, os.kill, (killed[0], with_signal)).start()
        return plain(self, name, *arguments, **keywords)

    monkeypatch.setattr(RayBackend, "call", faulty)
    return killed


def responses(folder: Path) -> list[Any]:
    groups: list[Any] = []
    for group in recorded_groups(folder):
        tokens = [rollout["tokens"] for rollout in group["rollouts"]]
        groups.append((group["step"], group["prompt_id"], tokens))
    return groups


def addresses_listened_at() -> set[str]:
    """Where this process, the parts of the cluster and the workers can be reached."""
    addresses: set[str] = set()
    for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
        try:
            connections = process.net_connections("inet")
        except psutil.NoSuchProcess:  # a short-lived process of Ray's that ended since it was listed
            continue
        for connection in connections:
            if connection.status == psutil.CONN_LISTEN:
                addresses.add(connection.laddr[0].removeprefix("::ffff:"))
    return addresses


def test_2_workers_sample_and_learn_as_this_process(
    train_on_ray: TrainOnRay, once: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To rounding, step by step. Nothing outside this machine can reach any of their processes."""
    reached = set[str]()
    record = Trainer.record

    def look(self: Trainer, *arguments: Any) -> None:
        reached.update(addresses_listened_at())
        record(self, *arguments)

    monkeypatch.setattr(Trainer, "record", look)
    train_on_ray(*TWO_TEACHERS, TWO_WORKERS)
    in_this_process = once(*TWO_TEACHERS)
    assert responses(tmp_path) == responses(in_this_process.folder)
    for row, expected_row in zip(read_lines(tmp_path / "metrics.jsonl"), in_this_process.metrics, strict=True):
        compared = {
            name: value for name, value in expected_row.items() if name.startswith(("actor/", "reward/", "evidence/"))
        }
        assert len(compared) > 10
        assert {name: row[name] for name in compared} == pytest.approx(compared, rel=1e-3, abs=LOG_PROBS)
        assert row["work/bytes_sent_max"] < 20_000  # 4 prompts' pixels alone would be more
    assert reached == {"127.0.0.1"}


@pytest.mark.nightly("one more cluster, in a process of its own")
def test_the_command_alone_prepares_its_cluster(tiny_run: list[str], tmp_path: Path) -> None:
    """Nothing that it loads first may import Ray; the processes of these tests are prepared by tests/conftest.py."""
    options = ["trainer.launcher=ray", "trainer.max_steps=1", f"trainer.save_checkpoint_path={tmp_path}"]
    done = subprocess.run(
        [sys.executable, "-m", "cepo.train", *tiny_run, *options],
        env={name: value for name, value in os.environ.items() if not name.startswith("RAY_")},
        cwd=REPOSITORY,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "started Ray on this machine" in done.stderr
    assert len(read_lines(tmp_path / "metrics.jsonl")) == 1


@pytest.mark.parametrize(
    "engine", ["transformers", pytest.param("vllm", marks=pytest.mark.nightly("four more starts of vLLM"))]
)
def test_a_run_trains_on_after_a_worker_was_killed(
    engine: str,
    train_on_ray: TrainOnRay,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The run has 2 workers, and every step is accounted for."""
    pytest.importorskip(engine, reason=f"{engine} is not installed")
    killed = kill_rank_1(monkeypatch, method="update", call=2, with_signal=signal.SIGKILL)
    caplog.set_level("INFO", logger="cepo")
    train_on_ray(*TWO_TEACHERS, TWO_WORKERS, f"worker.rollout.name={engine}", "trainer.save_freq=1")
    assert len(killed) == 1
    rows = read_lines(tmp_path / "metrics.jsonl")
    assert [(row["step"], row.get("faults/restarts")) for row in rows] == [(1, None), (2, 1.0)]
    assert [group[0] for group in responses(tmp_path)] == [1] * 4 + [2] * 4
    assert (tmp_path / "global_step_2" / "trainer_state.json").is_file()
    assert f"process {killed[0]}) died during the call `update`" in caplog.text
    assert "restart 1 of 2" in caplog.text
    assert f"resumed from {tmp_path}/global_step_1: continues with step 2 of 2" in caplog.text
    assert all(row["work/teacher_rows"] > 0 for row in rows)


@pytest.mark.nightly("waits for a time limit, and for the end of a cluster")
def test_a_hanging_rank_is_found_by_the_time_limit(train_on_ray: TrainOnRay, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped = kill_rank_1(monkeypatch, method="score", call=1, with_signal=signal.SIGSTOP)
    options = ["trainer.stage_timeout_seconds=10", "trainer.max_restarts=0"]
    with pytest.raises(WorkerLostError, match=r"rank 1 \(machine .*\): .* has not finished after 10 s"):
        train_on_ray(*TWO_TEACHERS, TWO_WORKERS, *options)
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(stopped[0]).wait(timeout=10)


@pytest.mark.nightly("one more cluster; test_faults ends with the same folder in this process")
def test_a_model_that_a_worker_cannot_load_ends_the_run(
    train_on_ray: TrainOnRay, tiny_model_folder: Path, tmp_path: Path
) -> None:
    shutil.copytree(tiny_model_folder, tmp_path / "model")
    weights = tmp_path / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    words = r"its weights cannot be loaded \(SafetensorError: .*download the folder again"
    with pytest.raises(EngineError, match=words):
        train_on_ray(f"worker.actor.model.model_path={tmp_path / 'model'}")


def test_more_devices_than_the_cluster_has_are_refused(
    train_on_ray: TrainOnRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "cepo.runtime.preflight.check_devices", lambda config: ""
    )  # of this machine, not of the cluster
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"GPU": 2.0})
    with pytest.raises(EngineError, match="1 machine with 64 GPUs each; the cluster has 1 machines with 2 GPUs"):
        train_on_ray("trainer.n_gpus_per_node=64", "worker.rollout.n=64", "trainer.start_timeout_seconds=1")
