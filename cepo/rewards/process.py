"""The parent's side of one reward worker process: start, talk, kill."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import cepo
from cepo.rewards.channel import MessageBuffer, send_message

START_SECONDS = 60.0
_PACKAGE_PARENT = str(Path(cepo.__file__).resolve().parent.parent)
_CLOSE_SECONDS = 1.0


class WorkerProcess:
    """A running `python -m cepo.rewards.worker`. It is `ready` once it has said so; until then it loads the function."""

    def __init__(
        self, spec: str, kwargs: Mapping[str, Any], *, weights: Sequence[float] | None = None, timeout_seconds: float
    ) -> None:
        self.ready = False
        self.deadline = time.monotonic() + START_SECONDS
        self._buffer = MessageBuffer()
        python_path = [_PACKAGE_PARENT, *filter(None, [os.environ.get("PYTHONPATH")])]
        self._process = subprocess.Popen(
            # -P: a file of the working directory must not stand in for a module of the worker.
            [sys.executable, "-P", "-m", "cepo.rewards.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            # Scoring is one thread's work: numeric libraries must not take the trainer's cores.
            env={**os.environ, "PYTHONPATH": os.pathsep.join(python_path), "OMP_NUM_THREADS": "1"},
            # A group of its own, so that killing it takes along whatever a reward function has started.
            start_new_session=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._requests = self._process.stdin
        self._replies = self._process.stdout
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

    def fileno(self) -> int:
        """The descriptor to wait on for replies."""
        return self._replies.fileno()

    def send(self, message: object) -> bool:
        """False where the process has gone. Errors of pickling are the caller's."""
        try:
            send_message(self._requests.fileno(), message)
        except OSError:
            return False
        return True

    def receive(self) -> list[Any] | None:
        """The messages that have become complete; None where the process has closed the pipe: it ends or has ended."""
        received = os.read(self._replies.fileno(), 1 << 20)
        return self._buffer.feed(received) if received else None

    def kill(self) -> str:
        """Ends the process and its group at once; returns how the process ended, in words."""
        # After the pipe's end a short wait tells a crash's own code from our signal.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(0.05)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        code = self._process.wait()
        self._requests.close()
        self._replies.close()
        return (
            f"the worker process ended with signal {-code}"
            if code < 0
            else f"the worker process ended with code {code}"
        )

    def hang_up(self) -> None:
        """Asks an idle process to end."""
        self._requests.close()

    def close(self) -> None:
        """Asks an idle process to end, and kills it where it does not."""
        self.hang_up()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_CLOSE_SECONDS if self.ready else 0)
        self.kill()
