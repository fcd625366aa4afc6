"""Scores finished parts of a batch while its other parts are still being sampled."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

from cepo.rewards.contract import RewardOutcome

Samples = Sequence[Mapping[str, Any]]


class RewardStream:
    """Scores parts of a batch in a thread as they arrive; the outcome is that of one call for the whole batch.

    It is a context manager. Leaving it before `outcome` is called stops the remaining work.

    Args:
        judge: returns the verdicts on some samples; ends early with an error once its second argument returns True.
        combine: combines all verdicts into the outcome.
    """

    def __init__(
        self,
        judge: Callable[[Samples, Callable[[], bool]], list[Any]],
        combine: Callable[[list[Any]], RewardOutcome],
    ) -> None:
        self._judge, self._combine = judge, combine
        self._waiting: queue.SimpleQueue[tuple[int, Samples] | None] = queue.SimpleQueue()
        self._places: set[int] = set()
        self._verdicts: dict[int, list[Any]] = {}
        self._error: BaseException | None = None
        self._is_given_up = False
        self._thread: threading.Thread | None = None

    def __contains__(self, place: int) -> bool:
        return place in self._places

    def add(self, place: int, samples: Samples) -> None:
        """Queues the part of the batch at `place` for scoring and returns at once."""
        assert place not in self._places, f"part {place} was added twice"
        self._places.add(place)
        self._waiting.put((place, samples))
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="cepo-rewards", daemon=True)
            self._thread.start()

    def outcome(self) -> RewardOutcome:
        """Waits for all parts and returns their scores in the order of their places; raises like `RewardPool.score`."""
        self._end()
        if self._error is not None:
            raise self._error
        return self._combine([verdict for place in sorted(self._places) for verdict in self._verdicts[place]])

    def __enter__(self) -> RewardStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_given_up = True
        self._end()

    def _end(self) -> None:
        if self._thread is not None:
            self._waiting.put(None)
            self._thread.join()
            self._thread = None

    def _work(self) -> None:
        try:
            is_open = True
            while is_open:
                parts = [self._waiting.get()]
                while not self._waiting.empty():  # score all parts that have arrived in one call
                    parts.append(self._waiting.get())
                is_open = None not in parts
                self._score([part for part in parts if part is not None])
        except BaseException as error:
            self._error = error

    def _score(self, parts: list[tuple[int, Samples]]) -> None:
        if not parts or self._is_given_up:
            return
        verdicts = iter(self._judge([one for _, samples in parts for one in samples], lambda: self._is_given_up))
        for place, samples in parts:
            self._verdicts[place] = [next(verdicts) for _ in samples]
