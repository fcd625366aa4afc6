"""Writes a page again whenever the files of a run have changed."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence

from cepo.errors import DataError
from cepo.terminal.lines import print_plain

_SECONDS_BETWEEN_LOOKS = 2.0
_LEAST_REST = 10
"""Times as long as the last page took: what follows a run takes a tenth of a core at most."""


def follow(state_of_files: Callable[[], object], write: Callable[[], Sequence[str]]) -> None:
    """Calls `write` and prints its lines whenever `state_of_files` has changed, until Ctrl-C.

    A `DataError` of either means that nothing is there yet, or that a trainer is writing the file; it is printed once.
    """
    state_of_page: object = None
    waited_for = ""
    try:
        while True:
            start = time.monotonic()
            try:
                state = state_of_files()
                if state != state_of_page:
                    print_plain("\n".join(write()))
                    sys.stdout.flush()
                    state_of_page = state
                waited_for = ""
            except DataError as error:
                if str(error) != waited_for:
                    waited_for = str(error)
                    print_plain(f"waiting: {waited_for}", to_stderr=True)
            time.sleep(max(_SECONDS_BETWEEN_LOOKS, _LEAST_REST * (time.monotonic() - start)))
    except KeyboardInterrupt:
        return
