"""Writes to the terminal. Names and texts that others chose cannot control it: their control characters are replaced."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import rich.console
from rich.segment import Segment

_DIRECTIONS = (*range(0x202A, 0x202F), *range(0x2066, 0x206A))
"""Characters that change the direction of writing, with which a name can pass for another one."""
_REPLACED = dict.fromkeys(
    (number for number in (*range(0x20), *range(0x7F, 0xA0), *_DIRECTIONS) if chr(number) not in "\t\n"),
    "\N{REPLACEMENT CHARACTER}",
)


class SafeConsole(rich.console.Console):
    """A console of rich; only its own styles and movements reach the terminal as control characters."""

    def render(self, renderable: Any, options: Any = None) -> Iterable[Segment]:
        """Renders as rich does, without the control characters of texts."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=segment.text.translate(_REPLACED))


class LogFormatter(logging.Formatter):
    """Formats a record of the log as a line with its time, without control characters."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s", datefmt="%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        """Returns the line."""
        return super().format(record).translate(_REPLACED)
