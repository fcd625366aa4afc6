"""Two runs never share a folder, and a run that was killed keeps none."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from cepo.errors import CheckpointError
from cepo.train import main
from cepo.trainer.run_lock import LOCK_FILE, RunLock, _may_live

HOLD = """
import sys, time
from pathlib import Path
from cepo.trainer.run_lock import RunLock
lock = RunLock(Path(sys.argv[1]))
lock.acquire()
print("held", flush=True)
sys.stdin.readline()
lock.release()
"""


def holder(folder: Path) -> subprocess.Popen[str]:
    """Another process that holds the folder until its input ends."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_a_second_run_is_refused_by_the_holders_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    process = holder(tmp_path)
    before = sorted(path.name for path in tmp_path.iterdir())
    who = f"in use by process {process.pid} on {socket.gethostname()}, since 20"
    with pytest.raises(CheckpointError, match=who):
        RunLock(tmp_path).acquire()
    settings = ["config=configs/microgeo/quickstart.yaml", f"trainer.save_checkpoint_path={tmp_path}"]
    assert main([*settings, "trainer.find_last_checkpoint=false"]) == 2
    assert who in caplog.text
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    process.communicate("\n", timeout=30)
    RunLock(tmp_path).acquire()


def test_a_killed_processs_lock_is_taken_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    process = holder(tmp_path)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=30)
    assert (tmp_path / LOCK_FILE).is_file()
    with RunLock(tmp_path) as lock:
        assert f"was left by process {process.pid}" in caplog.text
        assert json.loads((tmp_path / LOCK_FILE).read_text())["pid"] == os.getpid()
        lock.acquire()  # once more changes nothing
    assert list(tmp_path.iterdir()) == []


def test_a_child_of_a_killed_run_does_not_hold_its_folder(tmp_path: Path) -> None:
    forking = HOLD.replace(
        'print("held", flush=True)', "import os\nif os.fork(): print('held', flush=True)\nelse: time.sleep(60)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", forking, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        process.kill()
        process.wait(timeout=30)
        RunLock(tmp_path).acquire()
    finally:
        os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.parametrize("left", [b"", b"no json", b"[1]", b'{"pid": "x"}', b"\xff\xfe"])
def test_an_illegible_lock_that_nobody_holds_is_taken(tmp_path: Path, left: bytes) -> None:
    (tmp_path / LOCK_FILE).write_bytes(left)
    with RunLock(tmp_path):
        assert json.loads((tmp_path / LOCK_FILE).read_text())["pid"] == os.getpid()


def test_a_folder_that_does_not_exist_is_not_made_by_the_lock(tmp_path: Path) -> None:
    with RunLock(tmp_path / "run"):
        assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("host", "pid", "refused"),
    [
        ("elsewhere", 2**22 + 1, True),
        (None, 1, True),
        (None, "illegible", True),
        (None, 2**22 + 1, False),
        (None, os.getpid(), False),  # left by an earlier process of this number
    ],
    ids=["another machine", "alive", "illegible", "gone", "this process's own number"],
)
def test_without_locks_a_holder_that_may_live_is_respected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str | None, pid: int | str, refused: bool
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr("fcntl.lockf", no_locks)
    text = json.dumps({"host": host or socket.gethostname(), "pid": pid, "since": "2026-01-01"})
    (tmp_path / LOCK_FILE).write_text(text)
    if refused:
        with pytest.raises(CheckpointError, match=rf"process {pid} on .*remove .*{LOCK_FILE}"):
            RunLock(tmp_path).acquire()
        assert (tmp_path / LOCK_FILE).read_text() == text
    else:
        with RunLock(tmp_path):
            assert json.loads((tmp_path / LOCK_FILE).read_text())["pid"] == os.getpid()


def test_without_locks_another_users_process_may_live(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def of_another_user(pid: int, number: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "kill", of_another_user)
    assert _may_live({"host": socket.gethostname(), "pid": 2**22 + 1})
