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


def duration(seconds: float) -> str:
    """Formats a duration as `42 s`, `3:07 min` or `1:02:05 h`."""
    total_minutes, whole_seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(total_minutes, 60)
    if hours:
        return f"{hours}:{minutes:02d}:{whole_seconds:02d} h"
    if minutes:
        return f"{minutes}:{whole_seconds:02d} min"
    return f"{whole_seconds} s"


class _LineFormat(logging.Formatter):
    """Writes the time, the level unless it is INFO, the library unless it is this one, and the message."""

    def __init__(self) -> None:
        super().__init__(datefmt="%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        parts = [self.formatTime(record, self.datefmt)]
        if record.levelno != logging.INFO:
            parts.append(record.levelname)
        library = record.name.partition(".")[0]
        if library != "cepo":
            parts.append(f"{library}:")
        parts.append(record.getMessage())
        line = " ".join(parts)
        if record.exc_info:
            line = f"{line}\n{self.formatException(record.exc_info)}"
        return line


class LogHandler(logging.Handler):
    """Prints a record of the log as a line on standard error, which a live view may have replaced."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(_LineFormat())

    def emit(self, record: logging.LogRecord) -> None:
        try:
            print_plain(self.format(record), to_stderr=True)
        except Exception:
            self.handleError(record)
