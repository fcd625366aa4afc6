"""Tests whether a Ray cluster answers at an address, without Ray, which would wait minutes for a missing one."""

from __future__ import annotations

import os
import re
import socket

ANSWER_SECONDS = 3.0
_ADDRESS = re.compile(r"(?:ray://)?\[?(?P<host>[^/\]]+)\]?:(?P<port>\d{1,5})")
_SETTINGS = 4
_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, _SETTINGS, 0, 0, 0, 0, 0))
"""The greeting of an HTTP/2 client (RFC 9113, section 3.4): a fixed text and an empty frame of settings."""


def why_no_answer(address: str) -> str | None:
    """Returns why no Ray cluster can be at `host:port` or `ray://host:port`; None if one can, or for another form.

    Ray's ports speak gRPC, whose server answers a greeting with a frame of settings (three bytes of length, then the
    frame's type). Under TLS only the connection is tested.
    """
    found = _ADDRESS.fullmatch(address)
    if found is None:
        return None
    try:
        connection = socket.create_connection((found["host"], int(found["port"])), timeout=ANSWER_SECONDS)
    except (OSError, OverflowError) as error:
        return str(error)
    with connection:
        if os.environ.get("RAY_USE_TLS", "0") not in ("", "0"):
            return None
        try:
            connection.sendall(_GREETING)
            answer = connection.recv(4)
        except OSError as error:
            return f"what takes connections there does not answer as Ray does: {error}"
    return None if answer[3:] == bytes((_SETTINGS,)) else "what answers there is not Ray"
