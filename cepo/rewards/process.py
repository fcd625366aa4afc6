"""Starts and kills a reward worker process and exchanges messages with it, on the parent's side."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import cepo
from cepo.leftovers import end_marked

MARK = "CEPO_REWARD_WORKER"
"""The environment variable that marks a worker and its child processes."""
START_SECONDS = 60.0
_PACKAGE_PARENT = str(Path(cepo.__file__).resolve().parent.parent)
_CLOSE_SECONDS = 1.0
_MOST_REPLY_BYTES = 1 << 26
_LONGEST_LOOK_SECONDS = 1.0
_HEADER = struct.Struct("!i")
"""The length of a message, as `multiprocessing.connection.Connection` writes it up to 2 GiB."""


class WorkerProcess:
    """Runs `python -m cepo.rewards.serving`, which loads the functions first and reports when it is `ready`.

    `setup` names the functions: `spec`, `kwargs`, `weights` and `answer_function` of `RewardPool`.

    `connection`, a socket, carries pickles both ways and is separate from the standard streams: the output of a reward function
    goes to the trainer's standard error, and its standard input is empty.
    """

    def __init__(self, setup: Mapping[str, Any], *, timeout_seconds: float) -> None:
        self.ready = False
        self.allow(START_SECONDS)
        self.connection, other_end = socket.socketpair()
        self._received = bytearray()
        self._fault = ""
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

    def allow(self, seconds: float) -> None:
        """Starts the clock of the next message."""
        self.seconds_left, self._looked = seconds, time.monotonic()

    def is_overdue(self) -> bool:
        """Returns whether the allowed time is over. Between two looks 1 s at most passes, so that a pause costs none."""
        now = time.monotonic()
        self.seconds_left -= min(now - self._looked, _LONGEST_LOOK_SECONDS)
        self._looked = now
        return self.seconds_left <= 0

    def send(self, message: object) -> bool:
        """Sends a message; returns False if the process has ended or does not read. Pickling errors are raised."""
        content = bytes(ForkingPickler.dumps(message))
        try:
            self.connection.settimeout(START_SECONDS)
            self.connection.sendall(_HEADER.pack(len(content)) + content)
            self.connection.settimeout(None)
        except OSError:
            return False
        return True

    def receive(self) -> tuple[str, Any] | None:
        """Returns a message if all of it has arrived, else None; never waits.

        Raises:
            EOFError: the process has ended, or something else than a message was written to the connection.
        """
        length = self._length()
        while len(self._received) < _HEADER.size + length:
            try:
                part = self.connection.recv(_HEADER.size + length - len(self._received), socket.MSG_DONTWAIT)
            except BlockingIOError:
                return None
            except ConnectionError as error:
                raise EOFError from error
            if not part:
                raise EOFError
            self._received += part
            length = self._length()
        content = bytes(self._received[_HEADER.size :])
        self._received.clear()
        try:
            status, value = pickle.loads(content)
        except Exception as error:  # bytes of another origin can be any pickle, or none
            self._fault = "the reward wrote to the worker's connection"
            raise EOFError from error
        return status, value

    def _length(self) -> int:
        """Returns the length of the message that has begun to arrive, 0 if it is not known yet."""
        if len(self._received) < _HEADER.size:
            return 0
        (length,) = _HEADER.unpack_from(self._received)
        if not 0 <= length <= _MOST_REPLY_BYTES:
            self._fault = (
                f"the reward wrote to the worker's connection, or a reply has over {_MOST_REPLY_BYTES >> 20} MiB"
            )
            raise EOFError
        return length

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
        if self._fault:
            return self._fault
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
