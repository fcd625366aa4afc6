"""The backend of one device: its worker in this process, so that a debugger sees everything."""

from __future__ import annotations

from cepo.workers.worker import Worker


class LocalBackend(Worker):
    """One worker as the whole `cepo.trainer.protocol.Backend`. Nothing is restarted: what ends it ends the trainer too."""
