"""Handles Ctrl-C and SIGTERM. They end a run at once while it loads its libraries, and are never lost afterwards.

A part of the work that should be finished first postpones the first signal; a second one is never postponed.
"""

from __future__ import annotations

import atexit
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import NoReturn

from cepo.terminal import progress

EXIT_CODES = (130, 143)
"""Exit codes after Ctrl-C and after SIGTERM."""

logger = logging.getLogger(__name__)

_is_loading = False
_heard: int | None = None
_postponed_for: str | None = None


@contextmanager
def handled() -> Generator[None]:
    """Handles SIGINT and SIGTERM inside this context, in the main thread, which alone receives signals.

    An ignored signal remains ignored, because shells start background jobs that way.
    """
    global _heard
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _heard = None
    earlier_handlers: dict[signal.Signals, signal.Handlers | int | Callable[..., object] | None] = {}
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:
            earlier_handlers[number] = signal.signal(number, _handle)
    try:
        yield
    finally:
        for number, handler in earlier_handlers.items():
            signal.signal(number, handler)
        _heard = None


@contextmanager
def loading() -> Generator[None]:
    """Ends the process at the first signal inside this context, in which libraries are loaded and no work has started.

    An exception would leave libraries half imported, which causes unrelated errors or a crash.
    """
    global _is_loading
    was_loading = _is_loading
    _is_loading = True
    try:
        yield
    finally:
        _is_loading = was_loading


def is_heard() -> bool:
    """Returns whether a signal has come, so that an error may be what a library made of it."""
    return _heard is not None


def raise_if_lost() -> None:
    """Raises a `KeyboardInterrupt` that a library has swallowed. In callbacks and destructors it is only printed."""
    if _heard is not None:
        raise KeyboardInterrupt


@contextmanager
def postponed(what: str) -> Generator[None]:
    """Only notes a first signal inside this context, and logs what happens first; `raise_if_lost` then raises it."""
    global _postponed_for
    outer = _postponed_for
    _postponed_for = what
    try:
        yield
    finally:
        _postponed_for = outer


def exit_code() -> int:
    """Returns the exit code that names the last signal: 143 after SIGTERM, else 130."""
    after_interrupt, after_termination = EXIT_CODES
    return after_termination if _heard == signal.SIGTERM else after_interrupt


def exit_process(code: int) -> NoReturn:
    """Ends the process, after an interruption with the `atexit` functions alone: interrupted libraries can crash later."""
    if code in EXIT_CODES:
        atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage]
        _leave(code)
    sys.exit(code)


def _handle(number: int, _: object) -> None:
    global _heard
    is_first = _heard is None
    _heard = number
    if _is_loading:
        sys.stderr.write("interrupted while libraries were being loaded; no work had started\n")
        _leave(exit_code())
    if is_first and _postponed_for is not None:
        logger.warning("%s heard: %s; a second one ends at once", signal.Signals(number).name, _postponed_for)
        return
    raise KeyboardInterrupt


def _leave(code: int) -> NoReturn:
    progress.end_view()
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)
