"""Checks rows in a process of their own: `python -m cepo.data.check_program`, started by `CheckProcess`, never by hand.

It is a fresh interpreter, not a fork (its parent has threads and devices) and not a `multiprocessing` child (which would
run the user's main script again).
"""

from __future__ import annotations

import logging
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

from cepo.data.check_process import CheckedChunk, checked_row
from cepo.data.rows import RowReader
from cepo.errors import ConfigError, DataError
from cepo.files.trees import Tree
from cepo.models.processing import Processing


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
    source, columns, rules, arguments = connection.recv()
    reader = RowReader(source, columns, rules, Processing(**arguments))
    messages = _Messages()
    logging.basicConfig(level=logging.WARNING, handlers=[messages])
    logging.getLogger("cepo").setLevel(logging.INFO)
    connection.send(None)
    while True:
        rows = pickle.loads(connection.recv_bytes())
        chunk = _checked_chunk(reader, rows)
        chunk.messages = messages.collected
        messages.collected = []
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
