"""Whether a Ray cluster answers at an address, without Ray: joining one that is gone takes minutes of silence."""

from __future__ import annotations

import re
import socket

ANSWER_SECONDS = 3.0
_ADDRESS = re.compile(r"(?:ray://)?\[?(?P<host>[^/\]]+)\]?:(?P<port>\d{1,5})")


def why_no_answer(address: str) -> str | None:
    """Why nothing takes a connection at `host:port` or `ray://host:port`; None where something does, or for another form."""
    found = _ADDRESS.fullmatch(address)
    if found is None:
        return None
    try:
        socket.create_connection((found["host"], int(found["port"])), timeout=ANSWER_SECONDS).close()
    except (OSError, OverflowError) as error:
        return str(error)
    return None
