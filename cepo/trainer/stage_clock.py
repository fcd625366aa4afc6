"""Measures how long each stage of a training step takes, and how many tokens it handles."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager

from cepo.metrics import Metrics, merge_metrics, sum_value
from cepo.terminal.progress import Progress


class StageClock:
    """Sums wall-clock seconds and tokens of each stage between two calls of `drain`."""

    def __init__(self) -> None:
        self._metrics: Metrics = {}

    @contextmanager
    def stage(self, name: str) -> Generator[None]:
        """Times the body as part of stage `name`. Stages may repeat, but a stage must not contain itself."""
        start = time.perf_counter()
        try:
            with Progress(name, None):
                yield
        finally:
            self._add(f"timing_s/{name}", time.perf_counter() - start)

    def count_tokens(self, name: str, tokens: int) -> None:
        """Counts tokens that stage `name` processed, including those of contexts if it computed them."""
        self._add(f"tokens/{name}", tokens)

    def drain(self) -> Metrics:
        metrics = self._metrics
        self._metrics = {}
        return metrics

    def _add(self, name: str, value: float) -> None:
        self._metrics = merge_metrics([self._metrics, {name: sum_value(value)}])
