"""Starts processes that check rows as this one does, and says what passes between them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import Pipe
from pathlib import Path

import cepo
from cepo.data.measures import CheckedRow, states_of
from cepo.data.row_settings import RowRules
from cepo.data.rows import RowReader
from cepo.errors import ConfigError, DataError
from cepo.files.safe_files import noting_opened_files
from cepo.files.trees import Tree
from cepo.models.processing import Processing

_LONGEST_REASON = 1000


@dataclass(frozen=True, kw_only=True)
class CheckSetup:
    """What a process needs to check rows as this one does: the arguments of `RowReader`."""

    source: str
    columns: Sequence[str]
    rules: RowRules
    processing: Processing


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
            measure = reader.measure(row)
            reason = ""
        except DataError as error:
            measure = None
            reason = str(error)[:_LONGEST_REASON]
    return CheckedRow(measure, reason, states_of(files))


class CheckProcess:
    """A process that runs `cepo.data.check_program`, which checks chunks of rows one after the other."""

    def __init__(self, setup: CheckSetup) -> None:
        self._connection, other_end = Pipe()
        package_parent = Path(cepo.__file__).resolve().parent.parent
        python_path = [str(package_parent)]
        if os.environ.get("PYTHONPATH"):
            python_path.append(os.environ["PYTHONPATH"])
        arguments = setup.processing.arguments
        local = os.path.isdir(arguments["path"])
        offline = {} if local else {"HF_HUB_OFFLINE": "1"}  # this process has just loaded those files
        self.process = subprocess.Popen(
            # -P: a file in the working directory must not shadow a module of the process.
            [sys.executable, "-P", "-m", "cepo.data.check_program", str(other_end.fileno())],
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
            self._connection.send((setup.source, list(setup.columns), setup.rules, arguments))

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
