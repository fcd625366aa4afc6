"""Checks rows in a process of their own: `python -m cepo.data.check_process`, started by `CheckProcess`, never by hand.

It is a fresh interpreter, not a fork (this process has threads and devices) and not a `multiprocessing` child (which
would run the user's main script again).
"""

from __future__ import annotations

import logging
import os
import pickle
import signal
import subprocess
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

import cepo
from cepo.config.schema import DataConfig
from cepo.data.measures import CheckedRow, states_of
from cepo.data.rows import RowReader
from cepo.errors import ConfigError, DataError
from cepo.foreign_files import noting_opened_files
from cepo.models.processing import Processing
from cepo.trees import Tree

_LONGEST_REASON = 1000


@dataclass(frozen=True, kw_only=True)
class CheckSetup:
    """What a process needs to check rows as this one does: the arguments of `RowReader`, and those of its `Processing`."""

    source: str
    columns: Sequence[str]
    config: DataConfig
    processing: Tree


@dataclass(kw_only=True)
class CheckedChunk:
    """What a process found of a chunk of rows.

    Attributes:
        rows: of the first rows; all of them, unless there is an `error` or a `failure`.
        error: a setting that turned out to be at fault at the next row.
        failure: the traceback of an exception that none of ours expects.
        messages: what was logged meanwhile: name of the logger, level, text.
    """

    rows: list[CheckedRow] = field(default_factory=list[CheckedRow])
    error: ConfigError | None = None
    failure: str | None = None
    messages: list[tuple[str, int, str]] = field(default_factory=list[tuple[str, int, str]])


def checked_row(reader: RowReader, row: Tree | DataError) -> CheckedRow:
    """Measures a row; one that could not be read is bad. Raises `ConfigError` if a setting is at fault and not the row."""
    with noting_opened_files() as files:
        try:
            if isinstance(row, DataError):
                raise row
            measure, reason = reader.measure(row), ""
        except DataError as error:
            measure, reason = None, str(error)[:_LONGEST_REASON]
    return CheckedRow(measure, reason, states_of(files))


class CheckProcess:
    """A process that checks chunks of rows, one after the other."""

    def __init__(self, setup: CheckSetup) -> None:
        self._connection, other_end = Pipe()
        python_path = [str(Path(cepo.__file__).resolve().parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        local = os.path.isdir(setup.processing["path"])
        offline = {} if local else {"HF_HUB_OFFLINE": "1"}  # this process has just loaded those files
        self.process = subprocess.Popen(
            # -P: a file in the working directory must not shadow a module of the process.
            [sys.executable, "-P", "-m", "cepo.data.check_process", str(other_end.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[other_end.fileno()],
            env={
                **os.environ,
                **offline,
                "PYTHONPATH": os.pathsep.join(python_path),
                "OMP_NUM_THREADS": "1",
                "CUDA_VISIBLE_DEVICES": "",
            },
            start_new_session=True,  # Ctrl-C reaches this process alone, which then kills those
        )
        other_end.close()
        with suppress(OSError):  # it has ended; the caller learns this when it waits for the first reply
            self._connection.send(setup)

    def send(self, rows: bytes) -> None:
        """Sends a chunk of rows, pickled; raises `OSError` if the process has ended."""
        self._connection.send_bytes(rows)

    def wait_until_ready(self) -> None:
        """Waits until the process has loaded the tokenizer; raises `EOFError` or `OSError` if it has ended."""
        self._connection.recv()

    def received(self) -> CheckedChunk:
        """Returns what was found of the chunk that was sent last; raises `EOFError` or `OSError` if the process has ended."""
        return self._connection.recv()

    def kill(self) -> None:
        """Kills the process and what it started, and returns at once."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def ending(self) -> str:
        """Kills the process and describes how it had ended before."""
        with suppress(subprocess.TimeoutExpired):  # a crash is over in a moment
            self.process.wait(0.5)
        self.kill()
        code = self.process.wait()
        return f"signal {-code}" if code < 0 else f"code {code}"

    def close(self) -> None:
        """Frees what a killed process leaves; no other thread may wait for a reply."""
        self.process.wait()
        self._connection.close()


class _Messages(logging.Handler):
    """Collects what is logged, because the parent reports it."""

    def __init__(self) -> None:
        super().__init__()
        self.collected: list[tuple[str, int, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.collected.append((record.name, record.levelno, record.getMessage()))


def main() -> None:
    """Answers chunks of rows until the parent has ended or kills this process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    descriptor = int(sys.argv[1])
    os.set_inheritable(descriptor, False)
    with suppress(OSError):  # makes Linux kill this process rather than the trainer when memory runs out
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    connection = Connection(descriptor)
    with suppress(EOFError, ConnectionError):
        _serve(connection)
    os.killpg(0, signal.SIGKILL)  # the renderer of chat templates too


def _serve(connection: Connection) -> None:
    setup: CheckSetup = connection.recv()
    reader = RowReader(setup.source, setup.columns, setup.config, Processing(**setup.processing))
    messages = _Messages()
    logging.basicConfig(level=logging.WARNING, handlers=[messages])
    logging.getLogger("cepo").setLevel(logging.INFO)
    connection.send(None)
    while True:
        rows = pickle.loads(connection.recv_bytes())
        chunk = _checked_chunk(reader, rows)
        chunk.messages, messages.collected = messages.collected, []
        connection.send(chunk)


def _checked_chunk(reader: RowReader, rows: Sequence[Tree | DataError]) -> CheckedChunk:
    chunk = CheckedChunk()
    try:
        for row in rows:
            chunk.rows.append(checked_row(reader, row))
    except ConfigError as error:
        chunk.error = error
    except Exception:
        chunk.failure = traceback.format_exc()
    return chunk


if __name__ == "__main__":
    main()
