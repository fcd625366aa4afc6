"""Lists how long a command says nothing, in a pipe or on a terminal.

    python3 -m lab.output_gaps -- cepo quickstart
    python3 -m lab.output_gaps --terminal -- cepo quickstart

prints the command's lines with the seconds since its start, and its longest silences with the line before each.
"""

from __future__ import annotations

import argparse
import os
import pty
import re
import subprocess
import sys
import time
from dataclasses import dataclass

_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\r")
_READ_BYTES = 65536


@dataclass(frozen=True)
class Silence:
    """Seconds without output, and the last line before them."""

    seconds: float
    after: str


def silences(command: list[str], *, on_terminal: bool) -> tuple[int, list[Silence]]:
    """Runs a command, repeats its output, and returns its exit code and all its silences."""
    if on_terminal:
        reading, writing = pty.openpty()
    else:
        reading, writing = os.pipe()
    start = time.monotonic()
    process = subprocess.Popen(command, stdout=writing, stderr=writing, stdin=subprocess.DEVNULL)
    os.close(writing)
    measured: list[Silence] = []
    last_time = start
    last_line = "the start"
    while True:
        try:
            content = os.read(reading, _READ_BYTES)
        except OSError:  # Linux's end of a terminal
            content = b""
        now = time.monotonic()
        measured.append(Silence(now - last_time, last_line))
        if not content:
            return process.wait(), measured
        last_time = now
        lines = [line for line in _CONTROL.sub("\n", content.decode("utf-8", "replace")).split("\n") if line.strip()]
        if lines:
            last_line = lines[-1].strip()
        if not on_terminal:
            for line in lines:
                sys.stdout.write(f"{now - start:7.1f}  {line}\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--terminal", action="store_true", help="on a terminal instead of a pipe")
    parser.add_argument("--most", type=int, default=5, help="number of silences to list")
    parser.add_argument("command", nargs="+")
    options = parser.parse_args()
    code, measured = silences(options.command, on_terminal=options.terminal)
    longest = sorted(measured, key=lambda silence: silence.seconds, reverse=True)
    sys.stdout.write(f"exit code {code}; longest silences:\n")
    for silence in longest[: options.most]:
        sys.stdout.write(f"{silence.seconds:7.1f} s after: {silence.after[:100]}\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
