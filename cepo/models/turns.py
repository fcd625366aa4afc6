"""A turn of a conversation."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Turn:
    """What one side said: `role` is system, user or assistant, `text` has one `<image>` per image and one `<video>` per video."""

    role: str
    text: str
