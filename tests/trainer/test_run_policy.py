"""A run holds its folder alone, says at its first steps if it learns nothing, and ends when its updates are all skipped."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cepo.algorithms import build_estimator
from cepo.config.schema import TrainerConfig
from cepo.errors import CheckpointError, EngineError
from cepo.metrics import fraction
from cepo.run_folder.layout import LOCK_FILE
from cepo.run_folder.lock import RunLock
from cepo.train import main
from cepo.trainer.health import Health
from cepo.trainer.run_policy import RunPolicy

HOLD = """
import os, sys, time
from pathlib import Path
from cepo.run_folder.lock import RunLock
RunLock(Path(sys.argv[1])).acquire()
if os.fork():
    print("held", flush=True)
time.sleep(60)
"""


def test_the_holder_is_named_and_if_killed_its_lock_is_taken(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its child goes on without holding the folder."""
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "held\n"
            names_before = sorted(path.name for path in tmp_path.iterdir())
            who = f"in use by process {process.pid} on {socket.gethostname()}, since 20"
            with pytest.raises(CheckpointError, match=who):
                RunLock(tmp_path).acquire()
            settings = ["config=configs/microgeo/quickstart.yaml", f"trainer.save_checkpoint_path={tmp_path}"]
            assert main([*settings, "trainer.find_last_checkpoint=false"]) == 2
            assert who in caplog.text
            assert sorted(path.name for path in tmp_path.iterdir()) == names_before
            process.kill()
            process.wait(timeout=30)
            lock = RunLock(tmp_path)
            lock.acquire()
        finally:
            os.killpg(process.pid, signal.SIGKILL)
    assert f"was left by process {process.pid}" in caplog.text
    assert f"process {os.getpid()} on" in (tmp_path / LOCK_FILE).read_text()
    lock.acquire()  # once more changes nothing
    lock.release()
    assert (tmp_path / LOCK_FILE).read_bytes() == b""


@pytest.mark.parametrize("left", [b"no holder", b"\xff\xfe"])
def test_an_illegible_lock_that_nobody_holds_is_taken(tmp_path: Path, left: bytes) -> None:
    (tmp_path / LOCK_FILE).write_bytes(left)
    RunLock(tmp_path).acquire()
    assert f"process {os.getpid()} on" in (tmp_path / LOCK_FILE).read_text()


def test_a_folder_that_does_not_exist_is_not_made_by_the_lock(tmp_path: Path) -> None:
    with RunPolicy(TrainerConfig(save_checkpoint_path=str(tmp_path / "run")), identity={}):
        assert not (tmp_path / "run").exists()


def test_without_locks_a_warning_says_that_nothing_is_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr("fcntl.lockf", no_locks)
    RunLock(tmp_path).acquire()
    assert "this file system has no locks" in caplog.text
    assert f"process {os.getpid()} on" in (tmp_path / LOCK_FILE).read_text()


@pytest.mark.parametrize(
    ("steps", "is_told"),
    [
        ([[0.5] * 4] * 5, True),
        ([[0.0] * 4] * 2, False),
        ([[0.0] * 4, [0.0] * 4, [0.0, 0.0, 0.0, 1.0]], False),
        ([[0.0, 1.0], [0.0] * 2, [0.0] * 2, [0.0] * 2], False),
    ],
)
def test_equal_rewards_in_all_of_3_first_steps_are_told_once(
    steps: list[list[float]], is_told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    health = Health(TrainerConfig())
    for rewards in steps:
        health.count_equal_rewards(torch.tensor(rewards))
    start = "in each of the first 3 steps all responses got the same reward, now 0.5, so that nothing can be learnt"
    assert [text.startswith(start) and "data.answer_key" in text for text in caplog.messages] == [True] * is_told


def test_the_first_step_with_most_answers_missing_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    health = Health(TrainerConfig())
    for num_missing in (4, 6, 8):
        health.count_missing_answers(fraction(num_missing, 8))
    (message,) = caplog.messages
    assert message.startswith("6 of 8 responses (75 %) have no final answer that a teacher could read")
    assert "worker.reward.answer_function" in message
    assert r"\boxed{...}" in message


@pytest.mark.parametrize(
    ("method", "settings", "reads"),
    [
        ("cepo", {}, True),
        ("cepo", {"negative": {"source": "peer_full"}}, False),
        ("rlsd", {}, False),
        ("opsd", {"positive": {"source": "peer_answer"}}, True),
        ("grpo", {}, False),
    ],
)
def test_only_methods_that_show_answers_depend_on_them(method: str, settings: dict[str, object], reads: bool) -> None:
    assert ("peer_answer" in build_estimator(method, settings).reference_sources) is reads


def test_the_third_skipped_step_in_a_row_ends_the_run(caplog: pytest.LogCaptureFixture) -> None:
    health = Health(TrainerConfig(max_skipped_steps=3))
    counts = [(0, 2), (1, 2), (2, 2), (2, 2), (0, 0), (1, 2), (2, 2), (2, 2)]
    for step, (skipped, updates) in enumerate(counts, start=1):
        health.count_skipped(step, skipped, updates)
        health.require_updates()
    told = caplog.messages
    assert [text[:7] for text in told] == ["step 3 ", "step 7 "]
    assert "all of its 2 updates were skipped" in told[0]
    assert "after 3 such steps the run ends (trainer.max_skipped_steps)" in told[0]
    health.count_skipped(9, 2, 2)
    words = r"last 3 steps were skipped.*trainer\.max_skipped_steps=3; -1 never stops.*in checkpoints/cepo/demo"
    with pytest.raises(EngineError, match=words):
        health.require_updates()
    endless = Health(TrainerConfig(max_skipped_steps=-1))
    for step in range(100):
        endless.count_skipped(step, 1, 1)
        endless.require_updates()
    assert endless.skipped_in_a_row == 100
