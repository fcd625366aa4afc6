"""Runs a command on a pseudo-terminal, as a user at a keyboard does."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
INTERRUPT = b"\x03"


def run_on_terminal(
    command: Sequence[str],
    *,
    folder: Path,
    environment: Mapping[str, str],
    press_after: tuple[str, bytes] | None = None,
    stdout: IO[Any] | None = None,
    timeout: float = 120,
) -> tuple[int, str]:
    """Returns the exit code and all bytes that reached the terminal of 100 x 40 characters, as text.

    Args:
        press_after: a text, and what is typed once it has appeared.
        stdout: where standard output goes in place of the terminal.
    """
    mine, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
    process = subprocess.Popen(
        command,
        cwd=folder,
        env={**environment, "TERM": "xterm-256color"},
        stdin=theirs,
        stdout=stdout or theirs,
        stderr=theirs,
        start_new_session=True,
        preexec_fn=lambda: _at_a_keyboard(theirs),
    )
    os.close(theirs)
    seen = b""
    pending = press_after
    deadline = time.monotonic() + timeout
    try:
        while time.monotonic() < deadline:
            try:
                chunk = os.read(mine, 65536)
            except OSError:  # how Linux says that nobody holds the other end any more
                break
            seen += chunk
            if pending is not None and pending[0].encode() in seen:
                os.write(mine, pending[1])
                pending = None
        return process.wait(timeout=max(deadline - time.monotonic(), 1)), seen.decode("utf-8", "replace")
    finally:
        process.kill()
        process.wait()
        os.close(mine)


def _at_a_keyboard(terminal: int) -> None:
    fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)
    # A shell that starts a command in the background has it ignore Ctrl-C, which its children inherit.
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def plain(shown: str) -> str:
    """Returns what was shown without colours and movements of the cursor."""
    return _CONTROL.sub("", shown)
