"""Writes lines to the terminal. Names and texts that others chose cannot control it: control characters are replaced."""

from __future__ import annotations

import logging
import sys

_DIRECTIONS = (*range(0x202A, 0x202F), *range(0x2066, 0x206A))
"""Characters that change the direction of writing, with which a name can pass for another one."""
_REPLACED = dict.fromkeys(
    (number for number in (*range(0x20), *range(0x7F, 0xA0), *_DIRECTIONS) if chr(number) not in "\t\n"),
    "\N{REPLACEMENT CHARACTER}",
)


def without_controls(text: str, encoding: str = "utf-8") -> str:
    """Replaces control characters, and what the encoding lacks by question marks."""
    return text.translate(_REPLACED).encode(encoding, "replace").decode(encoding)


def print_plain(text: str, *, to_stderr: bool = False) -> None:
    """Prints lines as they are, `without_controls`."""
    stream = sys.stderr if to_stderr else sys.stdout
    stream.write(without_controls(text, stream.encoding or "utf-8") + "\n")


class LogHandler(logging.Handler):
    """Prints a record of the log as a line with its time on standard error, which a live view may have replaced."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s", datefmt="%H:%M:%S"))

    def emit(self, record: logging.LogRecord) -> None:
        try:
            print_plain(self.format(record), to_stderr=True)
        except Exception:
            self.handleError(record)
