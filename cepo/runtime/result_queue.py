"""Passes finished groups of responses from the ranks to the driver, while the ranks sample others."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence

import ray
from ray.exceptions import RayError
from ray.util.queue import Queue
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cepo.errors import WorkerLostError
from cepo.rollout.generator import Generation, OnFinished
from cepo.runtime.dispatch import encode

Arrived = Callable[[int, int, list[Generation]], None]
"""Called with a rank, the index of a request among the rank's, and its responses."""


def start_queue() -> Queue:
    """Starts a queue in a process of its own on the driver's machine, so that ranks do not wait for the driver."""
    driver_node = ray.get_runtime_context().get_node_id()
    scheduling = NodeAffinitySchedulingStrategy(driver_node, soft=False)
    return Queue(actor_options={"num_cpus": 0, "scheduling_strategy": scheduling})


class ResultQueue:
    """The driver's end of the queue into which ranks put finished groups."""

    def __init__(self, queue: Queue) -> None:
        self.queue = queue
        self._call = 0

    def begin(self) -> int:
        """Returns the number of the next call; groups of an earlier one, which an exception has ended, are dropped."""
        self._call += 1
        return self._call

    def take(self, arrived: Arrived) -> None:
        """Hands on all groups that have been reported; raises `WorkerLostError` if the queue's process has died."""
        try:
            messages = self.queue.get_nowait_batch(self.queue.qsize())
        except RayError as error:
            raise WorkerLostError(f"the process that passes on finished responses has died: {error}") from error
        for message in messages:
            call, rank, index, group = pickle.loads(message)
            if call == self._call:
                arrived(rank, index, group)

    def close(self) -> None:
        self.queue.shutdown(force=True)


def reporter(queue: Queue, call: int, rank: int) -> OnFinished:
    """Returns what a rank's engine calls for each finished group."""

    def report(index: int, group: Sequence[Generation]) -> None:
        queue.put(encode((call, rank, index, group)))

    return report
