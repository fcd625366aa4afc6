"""The parent's side of one reward worker process: start, talk, kill."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import cepo

START_SECONDS = 60.0
_PACKAGE_PARENT = str(Path(cepo.__file__).resolve().parent.parent)
_CLOSE_SECONDS = 1.0


class WorkerProcess:
    """A running `python -m cepo.rewards.serving`. It is `ready` once it has said so; until then it loads the function.

    `connection` carries pickles both ways. It is none of the standard streams: what a reward function prints goes to the
    trainer's standard error, and it reads nothing.
    """

    def __init__(
        self, spec: str, kwargs: Mapping[str, Any], *, weights: Sequence[float] | None = None, timeout_seconds: float
    ) -> None:
        self.ready = False
        self.deadline = time.monotonic() + START_SECONDS
        self.connection, other_end = Pipe()
        python_path = [_PACKAGE_PARENT, *filter(None, [os.environ.get("PYTHONPATH")])]
        self._process = subprocess.Popen(
            # -P: a file of the working directory must not stand in for a module of the worker.
            [sys.executable, "-P", "-m", "cepo.rewards.serving", str(other_end.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=2,
            pass_fds=[other_end.fileno()],
            # Scoring is one thread's work: numeric libraries must not take the trainer's cores.
            env={**os.environ, "PYTHONPATH": os.pathsep.join(python_path), "OMP_NUM_THREADS": "1"},
            # A group of its own, so that killing it takes along whatever a reward function has started.
            start_new_session=True,
        )
        other_end.close()
        setup = {
            "spec": spec,
            "kwargs": dict(kwargs),
            "weights": weights,
            "sys_path": [entry or os.getcwd() for entry in sys.path],
            "timeout_seconds": timeout_seconds,
            "start_seconds": START_SECONDS,
        }
        self.send(setup)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def send(self, message: object) -> bool:
        """False where the process has gone. Errors of pickling are the caller's."""
        try:
            self.connection.send(message)
        except OSError:
            return False
        return True

    def kill(self) -> str:
        """Ends the process and its group at once; returns how the process ended, in words."""
        # After the connection's end a short wait tells a crash's own code from our signal.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(0.05)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        code = self._process.wait()
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
        """Asks an idle process to end, and kills it where it does not."""
        self.hang_up()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_CLOSE_SECONDS if self.ready else 0)
        self.kill()
