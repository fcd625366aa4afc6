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
from collections.abc import Mapping
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import psutil

import cepo

START_SECONDS = 60.0
_PACKAGE_PARENT = str(Path(cepo.__file__).resolve().parent.parent)
_CLOSE_SECONDS = 1.0
_MOST_REPLY_BYTES = 1 << 26
_LONGEST_LOOK_SECONDS = 1.0
_HEADER = struct.Struct("!i")
"""The length of a message, as `multiprocessing.connection.Connection` writes it up to 2 GiB."""


class WorkerProcess:
    """Runs `python -m cepo.rewards.serving`, which loads the functions that `setup` names (see `RewardPool`).

    It talks through a socket, separate from the standard streams: the output of a reward function goes to the trainer's
    standard error, and its standard input is empty.

    Attributes:
        functions: name and type of the functions, and whether they need images; None until they are loaded.
    """

    def __init__(self, setup: Mapping[str, object], *, timeout_seconds: float) -> None:
        self.functions: tuple[str, str, bool] | None = None
        self._connection, other_end = socket.socketpair()
        self._fault = ""
        python_path = [_PACKAGE_PARENT, *filter(None, [os.environ.get("PYTHONPATH")])]
        self._process = subprocess.Popen(
            # -P: a file in the working directory must not shadow a module of the worker.
            [sys.executable, "-P", "-m", "cepo.rewards.serving", str(other_end.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=2,
            pass_fds=[other_end.fileno()],
            # One thread: numeric libraries must not take the trainer's cores.
            env={**os.environ, "PYTHONPATH": os.pathsep.join(python_path), "OMP_NUM_THREADS": "1"},
            # A process group of its own, so that killing it also ends processes that the reward function started.
            start_new_session=True,
        )
        other_end.close()
        others = {
            "sys_path": [entry or os.getcwd() for entry in sys.path],
            "timeout_seconds": timeout_seconds,
            "start_seconds": START_SECONDS,
        }
        with contextlib.suppress(EOFError):  # it has ended; the caller learns this when it waits for the functions
            self._send({**setup, **others})

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def asked(self, message: object, seconds: float) -> tuple[str, Any]:
        """Sends a message and returns the reply; raises as `received` does, and what pickling raises."""
        self._send(message)
        return self.received(seconds)

    def received(self, seconds: float) -> tuple[str, Any]:
        """Returns the next message.

        Raises:
            TimeoutError: it has not arrived in time. A pause of this process and the worker's costs 1 s at most.
            EOFError: the process has ended, or something else than a message was written to the connection.
        """
        content, length, looked = bytearray(), 0, time.monotonic()
        while len(content) < _HEADER.size + length:
            self._connection.settimeout(max(min(seconds, _LONGEST_LOOK_SECONDS), 1e-3))
            try:
                part = self._connection.recv(_HEADER.size + length - len(content))
            except TimeoutError:
                part = None
            except OSError as error:
                raise EOFError from error
            if part == b"":
                raise EOFError
            content += part or b""
            length = self._length(content)
            now = time.monotonic()
            seconds -= min(now - looked, _LONGEST_LOOK_SECONDS)
            looked = now
            if seconds <= 0 and len(content) < _HEADER.size + length:
                raise TimeoutError
        try:
            status, value = pickle.loads(content[_HEADER.size :])
        except Exception as error:  # bytes of another origin can be any pickle, or none
            self._fault = "the reward wrote to the worker's connection"
            raise EOFError from error
        return status, value

    def _send(self, message: object) -> None:
        content = bytes(ForkingPickler.dumps(message))
        try:
            self._connection.settimeout(START_SECONDS)
            self._connection.sendall(_HEADER.pack(len(content)) + content)
        except OSError as error:
            raise EOFError from error

    def _length(self, content: bytearray) -> int:
        """Returns the length of the message that has begun to arrive, 0 if it is not known yet."""
        if len(content) < _HEADER.size:
            return 0
        (length,) = _HEADER.unpack_from(content)
        if not 0 <= length <= _MOST_REPLY_BYTES:
            self._fault = (
                f"the reward wrote to the worker's connection, or a reply has over {_MOST_REPLY_BYTES >> 20} MiB"
            )
            raise EOFError
        return length

    def stop(self) -> None:
        """Kills the process and all processes that it started."""
        started: list[psutil.Process] = []
        with contextlib.suppress(psutil.NoSuchProcess):
            started = psutil.Process(self.pid).children(recursive=True)  # some may have left the process group
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        for process in started:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def kill(self) -> str:
        """Kills the process and all processes that it started; describes how it ended."""
        # If the connection was closed by a crash, a short wait yields its exit code instead of our signal.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(0.05)
        self.stop()
        code = self._process.wait()
        self._connection.close()
        ending = f"signal {-code}" if code < 0 else f"code {code}"
        return self._fault or f"the worker process ended with {ending}"

    def hang_up(self) -> None:
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Asks an idle process to end, and kills it if it does not."""
        self.hang_up()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_CLOSE_SECONDS if self.functions else 0)
        self.kill()
