"""Temporary folders of killed processes are removed at the next start, those of living ones never."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cepo.files.temp_folders import OwnFolder, remove_left_behind

MAKE = """
import sys
from cepo.files.temp_folders import OwnFolder
print(OwnFolder('test').path, flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def maker() -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", MAKE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_a_killed_processs_folder_goes_at_the_next_start(maker: subprocess.Popen[str]) -> None:
    assert maker.stdout is not None
    folder = Path(maker.stdout.readline().strip())
    (folder / "file").touch()
    with OwnFolder("test") as own_folder:
        assert f"-{os.getpid()}-" in own_folder.name
        assert folder.is_dir()  # its process lives
        maker.send_signal(signal.SIGKILL)
        maker.communicate(timeout=30)
        assert (folder / "file").is_file()
        remove_left_behind()
        assert not folder.exists()
        assert own_folder.is_dir()
    assert not own_folder.exists()


def test_a_locked_folder_of_an_unseen_process_stays() -> None:
    import fcntl

    folder = Path(f"/tmp/cepo-test-{2**22 + 1}-unseen")
    folder.mkdir()
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        remove_left_behind()
        assert folder.is_dir()
    finally:
        os.close(descriptor)
    remove_left_behind()
    assert not folder.exists()
