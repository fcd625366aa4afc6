"""Converts the exceptions of a command to a message and an exit code."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence

from cepo.errors import CepoError
from cepo.terminal import SafeConsole

_USAGE_ERROR = 2


def guarded(parser: argparse.ArgumentParser, argv: Sequence[str], command: Callable[[argparse.Namespace], None]) -> int:
    """Parses the command line and runs a command; errors of either give a message and exit code 2.

    An option may also be written like a setting: `out=FILE` for `--out FILE`.
    """
    options = set(re.findall(r"--([\w-]+)", parser.format_usage()))
    words = [f"--{word}" if "=" in word and word.partition("=")[0] in options else word for word in argv]
    try:
        arguments = parser.parse_args(words)
    except SystemExit as stop:  # argparse has printed its message, or the help
        return int(stop.code or 0)
    return reported(parser.prog, lambda: command(arguments))


def reported(program: str, work: Callable[[], None]) -> int:
    """Calls `work`; returns 0, or 2 with a message on standard error if cepo or the file system raised an error."""
    try:
        work()
    except (CepoError, OSError) as error:
        SafeConsole(stderr=True).print(f"{program}: {error}", soft_wrap=True, highlight=False, markup=False)
        return _USAGE_ERROR
    return 0
