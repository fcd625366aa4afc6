"""Seconds and tokens of each stage of a step."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from cepo.metrics import Metrics, sum_value


class StageClock:
    """Adds up wall seconds and tokens by stage name, from one `drain` to the next."""

    def __init__(self) -> None:
        self._metrics: Metrics = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Times the body as part of stage `name`; stages may repeat, but not nest within themselves."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._add(f"timing_s/{name}", time.perf_counter() - start)

    def count_tokens(self, name: str, tokens: int) -> None:
        """Counts tokens that stage `name` worked on, contexts included where they were computed."""
        self._add(f"tokens/{name}", tokens)

    def drain(self) -> Metrics:
        """What was added up since the last call."""
        metrics, self._metrics = self._metrics, {}
        return metrics

    def _add(self, name: str, value: float) -> None:
        added = sum_value(value)
        self._metrics[name] = self._metrics[name].merge(added) if name in self._metrics else added
