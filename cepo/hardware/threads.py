"""Limits the threads of a run on this machine's processors, so that it does not compete with other programs."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from cepo.hardware.devices import num_processors

_LIMIT = "OMP_NUM_THREADS"
_LOAD = Path("/proc/loadavg")


def limit_threads(recorded: int | None = None) -> str | None:
    """Sets OMP_NUM_THREADS to the number of free processors if other programs use some, and says so.

    Spinning threads that share a processor slow each other down several times over. `recorded` is the number of threads
    with which the run began: a resumed run keeps it, because another one changes the rounding of sums. Does nothing if the
    user has set the limit or torch, which reads it once, is loaded.
    """
    usable, present, busy = num_processors(), os.cpu_count() or 1, busy_processors()
    free = min(usable, recorded or max(1, round(usable * (1 - busy / present))))
    if _LIMIT in os.environ or "torch" in sys.modules or free == present:
        return None
    os.environ[_LIMIT] = str(free)
    if recorded:
        why = "as many as when the run began"
    elif free < usable:
        why = f"as other programs keep about {busy:.0f} of {present} processors busy"
    else:
        why = f"as this process may use {usable} of {present} processors"
    return f"threads: {free}, {why}; set {_LIMIT} to choose another number"


def busy_processors() -> float:
    """Returns how many processors other programs use: the mean of the last minute, and not more than run just now."""
    try:
        minute, _, _, tasks = _LOAD.read_text(encoding="ascii").split()[:4]
    except OSError:  # not Linux
        return os.getloadavg()[0]
    return min(float(minute), max(0, int(tasks.partition("/")[0]) - 1))
