"""Converts the exceptions of a command to a message and an exit code."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

from rich.console import Console

from cepo.errors import CepoError

_USAGE_ERROR = 2


def guarded(parser: argparse.ArgumentParser, argv: Sequence[str], command: Callable[[argparse.Namespace], None]) -> int:
    """Parses the command line and runs a command; errors of either give a message and exit code 2."""
    try:
        arguments = parser.parse_args(argv)
    except SystemExit as stop:  # argparse has printed its message, or the help
        return int(stop.code or 0)
    return reported(parser.prog, lambda: command(arguments))


def reported(program: str, work: Callable[[], None]) -> int:
    """Calls `work`; returns 0, or 2 with a message on standard error if cepo or the file system raised an error."""
    try:
        work()
    except (CepoError, OSError) as error:
        Console(stderr=True).print(f"{program}: {error}", soft_wrap=True, highlight=False, markup=False)
        return _USAGE_ERROR
    return 0
