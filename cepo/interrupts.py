"""Handles Ctrl-C and SIGTERM. They end a run at once while libraries are imported, and are never lost afterwards."""

from __future__ import annotations

import atexit
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from cepo import progress

EXIT_INTERRUPTED = 130
_IMPORT_FRAMES = "<frozen importlib._bootstrap>"

_has_begun = False
_is_pending = False


@contextmanager
def handled() -> Iterator[None]:
    """Handles SIGINT and SIGTERM inside this context and restores the previous handlers afterwards.

    Outside the main thread, which alone receives signals, it does nothing. An ignored signal remains ignored, because
    shells start background jobs that way.
    """
    global _has_begun, _is_pending
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _has_begun = _is_pending = False
    heard = [number for number in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, _handle) for number in heard}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def work_has_begun() -> None:
    """Declares that there is something to clean up: from now on an interruption raises even during an import."""
    global _has_begun
    _has_begun = True


def raise_if_lost() -> None:
    """Raises a `KeyboardInterrupt` that a library has swallowed. In callbacks and destructors it is only printed."""
    if _is_pending:
        raise KeyboardInterrupt


def exit_process(code: int) -> NoReturn:
    """Ends the process with `code`.

    After an interruption it runs only the `atexit` functions, because interrupted libraries can crash while the
    interpreter shuts down.
    """
    if code == EXIT_INTERRUPTED:
        atexit._run_exitfuncs()
        _leave(code)
    sys.exit(code)


def _handle(number: int, frame: FrameType | None) -> None:
    global _is_pending
    if not _has_begun and _is_importing(frame):
        # An exception here would leave libraries half imported, which causes unrelated errors or a crash.
        sys.stderr.write("interrupted while libraries were being loaded; no work had started\n")
        _leave(EXIT_INTERRUPTED)
    _is_pending = True
    raise KeyboardInterrupt


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename == _IMPORT_FRAMES:
            return True
        frame = frame.f_back
    return False


def _leave(code: int) -> NoReturn:
    progress.end_view()
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)
