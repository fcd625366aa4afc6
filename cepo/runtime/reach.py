"""Tests whether a Ray cluster answers at an address, without Ray, which would wait minutes if there is none."""

from __future__ import annotations

import os
import re
import socket

ANSWER_SECONDS = 3.0
_ADDRESS = re.compile(r"(?:ray://)?\[?(?P<host>[^/\]]+)\]?:(?P<port>\d{1,5})")
_SETTINGS = 4
_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, _SETTINGS, 0, 0, 0, 0, 0))
"""The preface of an HTTP/2 client (RFC 9113, section 3.4): a fixed text and an empty SETTINGS frame."""


def why_no_answer(address: str) -> str | None:
    """Returns the reason why no Ray cluster can be at an address, or None if there may be one.

    Addresses of the forms `host:port` and `ray://host:port` are tested; for others the result is None. Ray's ports use
    gRPC, whose server answers the preface with a SETTINGS frame (three bytes of length, then the frame's type). With
    TLS only the connection is tested.
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
