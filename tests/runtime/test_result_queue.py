"""Finished groups on their way from the ranks to the driver."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any, cast

import numpy
import pytest
from ray.exceptions import RayError

from cepo.errors import WorkerLostError
from cepo.rollout.generator import Generation, OnFinished, SamplingSettings
from cepo.runtime.dispatch import encode
from cepo.runtime.rank_process import RankProcess
from cepo.runtime.result_queue import ResultQueue, reporter


class ListQueue:
    """Ray's queue without a process of its own."""

    def __init__(self) -> None:
        self.items: list[bytes] = []

    def put(self, item: bytes) -> None:
        self.items.append(item)

    def qsize(self) -> int:
        return len(self.items)

    def get_nowait_batch(self, number: int) -> list[bytes]:
        batch = self.items[:number]
        self.items = self.items[number:]
        return batch


def response(token: int) -> Generation:
    return Generation.of([token, 0], [-0.5, -0.25], finished=True)


def taken(arrivals: ResultQueue) -> list[tuple[int, int, list[int]]]:
    """What the driver gets: rank, index of the request, and the first token of each response."""
    groups: list[tuple[int, int, list[int]]] = []
    arrivals.take(
        lambda rank, index, group: groups.append(
            (rank, index, [int(generation.response_ids[0]) for generation in group])
        )
    )
    return groups


def test_groups_arrive_once_with_their_rank_and_request() -> None:
    queue = ListQueue()
    arrivals = ResultQueue(cast("Any", queue))
    call = arrivals.begin()
    reporter(cast("Any", queue), call, 3)(1, [response(7), response(8)])
    assert taken(arrivals) == [(3, 1, [7, 8])]
    reporter(cast("Any", queue), call, 0)(0, [response(9)])
    assert taken(arrivals) == [(0, 0, [9])]
    assert taken(arrivals) == []


def test_groups_of_a_call_that_an_error_ended_are_dropped() -> None:
    queue = ListQueue()
    arrivals = ResultQueue(cast("Any", queue))
    earlier = arrivals.begin()
    reporter(cast("Any", queue), earlier, 0)(0, [response(7)])
    arrivals.begin()
    assert taken(arrivals) == []


def test_a_lost_queue_is_a_lost_worker() -> None:
    """Then the run starts new workers from its last checkpoint."""

    def lost() -> int:
        raise RayError("the actor died")

    arrivals = ResultQueue(cast("Any", SimpleNamespace(qsize=lost, get_nowait_batch=list)))
    with pytest.raises(WorkerLostError, match="passes on finished responses has died: the actor died"):
        arrivals.take(lambda *_: None)


@pytest.mark.parametrize("reports", [True, False])
def test_a_rank_reports_each_group_while_it_samples_others(reports: bool) -> None:
    """Of ranks with one engine only the first does. The answer of the call has no responses."""
    queue = ListQueue()
    sizes_seen: list[int] = []

    def generate(requests: list[str], settings: SamplingSettings, on_finished: OnFinished | None) -> None:
        assert settings.num_samples == 1
        for index, request in enumerate(requests):
            if on_finished is not None:
                on_finished(index, [response(len(request))])
            sizes_seen.append(queue.qsize())

    rank = RankProcess("", "")
    rank._worker = cast("Any", SimpleNamespace(generate=generate))
    rank._receiver = cast("Any", SimpleNamespace(forget=lambda: None, decode=pickle.loads))
    rank._arrivals = cast("Any", queue)
    message = encode((["a", "bcd"], SamplingSettings(num_samples=1, max_response_length=2)))
    assert pickle.loads(rank.generate(message, 1, reports=reports)) is None
    assert sizes_seen == ([1, 2] if reports else [0, 0])
    arrivals = ResultQueue(cast("Any", queue))
    assert arrivals.begin() == 1
    assert taken(arrivals) == ([(0, 0, [1]), (0, 1, [3])] if reports else [])


def test_log_probs_keep_the_bits_of_the_engine() -> None:
    """Engines compute in float32; a Python float would take 4 times the memory and say no more."""
    sampled = numpy.float32(-0.1)
    assert Generation.of([1], [float(sampled)], finished=True).log_probs[0] == sampled
