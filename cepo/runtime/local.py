"""The backend of one device: its worker runs in this process, so that a debugger can step into it."""

from __future__ import annotations

from cepo.workers.worker import Worker


class LocalBackend(Worker):
    """Implements `cepo.trainer.protocol.Backend` with one worker in this process; its failure ends the trainer too."""
