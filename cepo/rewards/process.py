"""Starts and kills a reward worker process and exchanges messages with it, on the parent's side."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import cepo
from cepo.leftovers import end_marked

MARK = "CEPO_REWARD_WORKER"
"""The environment variable that marks a worker and its child processes."""
START_SECONDS = 60.0
_PACKAGE_PARENT = str(Path(cepo.__file__).resolve().parent.parent)
_CLOSE_SECONDS = 1.0


class WorkerProcess:
    """Runs `python -m cepo.rewards.serving`, which loads the functions first and reports when it is `ready`.

    `setup` names the functions: `spec`, `kwargs`, `weights` and `answer_function` of `RewardPool`.

    `connection` carries pickles both ways and is separate from the standard streams: the output of a reward function
    goes to the trainer's standard error, and its standard input is empty.
    """

    def __init__(self, setup: Mapping[str, Any], *, timeout_seconds: float) -> None:
        self.ready = False
        self.deadline = time.monotonic() + START_SECONDS
        self.connection, other_end = Pipe()
        self._mark = uuid.uuid4().hex
        python_path = [_PACKAGE_PARENT, *filter(None, [os.environ.get("PYTHONPATH")])]
        self._process = subprocess.Popen(
            # -P: a file in the working directory must not shadow a module of the worker.
            [sys.executable, "-P", "-m", "cepo.rewards.serving", str(other_end.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=2,
            pass_fds=[other_end.fileno()],
            # One thread: numeric libraries must not take the trainer's cores.
            env={**os.environ, "PYTHONPATH": os.pathsep.join(python_path), "OMP_NUM_THREADS": "1", MARK: self._mark},
            # A separate process group, so that killing it also ends processes that the reward function started.
            start_new_session=True,
        )
        other_end.close()
        others = {
            "sys_path": [entry or os.getcwd() for entry in sys.path],
            "timeout_seconds": timeout_seconds,
            "start_seconds": START_SECONDS,
        }
        self.send({**setup, **others})

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def send(self, message: object) -> bool:
        """Sends a message; returns False if the process has ended. Pickling errors are raised."""
        try:
            self.connection.send(message)
        except OSError:
            return False
        return True

    def kill(self) -> str:
        """Kills the process and all processes that it started; describes how it ended."""
        # If the connection was closed by a crash, a short wait yields its exit code instead of our signal.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(0.05)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        code = self._process.wait()
        end_marked(MARK, self._mark)
        self.connection.close()
        return (
            f"the worker process ended with signal {-code}"
            if code < 0
            else f"the worker process ended with code {code}"
        )

    def hang_up(self) -> None:
        """Asks an idle process to end."""
        self.connection.close()

    def close(self) -> None:
        """Asks an idle process to end, and kills it if it does not."""
        self.hang_up()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_CLOSE_SECONDS if self.ready else 0)
        self.kill()
