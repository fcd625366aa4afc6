"""What the fuzz tests share: only errors of this package may come out, and within a time limit."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from cepo.errors import CepoError

SECONDS = 60.0
"""A hang, and not a slow machine, takes longer."""


@contextmanager
def only_our_errors(*, naming: str = "") -> Iterator[None]:
    """Lets errors of this package pass that name `naming`; any other exception, an empty message or a hang fails the test."""

    def stop(_: int, __: FrameType | None) -> None:
        raise AssertionError(f"not done after {SECONDS:g} s")

    handler_before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    except CepoError as error:
        if not str(error).strip() or naming not in str(error):
            raise AssertionError(f"{type(error).__name__} does not name {naming or 'anything'}: {error}") from error
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler_before)
