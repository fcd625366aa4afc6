"""Two runs never share a folder, and a run that was killed keeps none."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from cepo.config.schema import TrainerConfig
from cepo.errors import CheckpointError
from cepo.train import main
from cepo.trainer.run_policy import LOCK_FILE, RunLock, RunPolicy

HOLD = """
import os, sys, time
from pathlib import Path
from cepo.trainer.run_policy import RunLock
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
            before = sorted(path.name for path in tmp_path.iterdir())
            who = f"in use by process {process.pid} on {socket.gethostname()}, since 20"
            with pytest.raises(CheckpointError, match=who):
                RunLock(tmp_path).acquire()
            settings = ["config=configs/microgeo/quickstart.yaml", f"trainer.save_checkpoint_path={tmp_path}"]
            assert main([*settings, "trainer.find_last_checkpoint=false"]) == 2
            assert who in caplog.text
            assert sorted(path.name for path in tmp_path.iterdir()) == before
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
    with RunPolicy(tmp_path / "run", TrainerConfig(), identity={}):
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
