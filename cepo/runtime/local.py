"""Implements the backend for one device: its worker runs in this process, so that a debugger can step into it."""

from __future__ import annotations

from cepo.workers.worker import Worker


class LocalBackend(Worker):
    """The backend with one worker in this process, whose failure ends the trainer too."""
