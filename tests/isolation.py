"""What a test leaves alone: the user's caches, and this process's threads, log level and signal handler."""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch


@contextmanager
def own_caches(folder: Path) -> Iterator[None]:
    """Inside, converted data files and what was found out about them are kept in `folder`, and in no cache of the user's."""
    from datasets import config

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_DATASETS_CACHE", str(folder))
        patch.setattr(config, "HF_DATASETS_CACHE", str(folder))
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield


@contextmanager
def restored_process(*, threads: int | None = 1) -> Iterator[None]:
    """Inside, so many threads (None: as many as before); afterwards threads, log level and signal handler are as they were."""
    before, level, handler = torch.get_num_threads(), logging.getLogger("cepo").level, signal.getsignal(signal.SIGTERM)
    if threads is not None:
        torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
        logging.getLogger("cepo").setLevel(level)
        signal.signal(signal.SIGTERM, handler)
