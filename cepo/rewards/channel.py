"""Messages between the pool and its workers: pickles over a pipe, each after its length in 8 bytes."""

from __future__ import annotations

import os
import pickle
import struct
from dataclasses import dataclass, field
from typing import Any

_LENGTH = struct.Struct(">Q")


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Why a sample has no score.

    Attributes:
        reason: one line.
        details: the user's own frames and the exception.
        breaks_contract: the function returned, but no score.
    """

    reason: str
    details: str = field(repr=False)
    breaks_contract: bool = False


def send_message(descriptor: int, message: object) -> None:
    """Writes one message. Raises `OSError` where the other side has gone, pickling errors before anything is written."""
    payload = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    remaining = memoryview(_LENGTH.pack(len(payload)) + payload)
    while remaining:
        remaining = remaining[os.write(descriptor, remaining) :]


def receive_message(descriptor: int) -> Any:
    """Waits for one message. Raises `EOFError` where the other side has gone."""
    (length,) = _LENGTH.unpack(_read_exactly(descriptor, _LENGTH.size))
    return pickle.loads(_read_exactly(descriptor, length))


class MessageBuffer:
    """Collects bytes as they come and hands out the messages that are complete."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, received: bytes) -> list[Any]:
        self._bytes += received
        messages: list[Any] = []
        while len(self._bytes) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(self._bytes)[0]
            if len(self._bytes) < end:
                break
            messages.append(pickle.loads(bytes(self._bytes[_LENGTH.size : end])))
            del self._bytes[:end]
        return messages


def _read_exactly(descriptor: int, num_bytes: int) -> bytes:
    received = bytearray()
    while len(received) < num_bytes:
        piece = os.read(descriptor, min(num_bytes - len(received), 1 << 20))
        if not piece:
            raise EOFError("the other side of the pipe has closed it")
        received += piece
    return bytes(received)
