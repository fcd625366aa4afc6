"""Implements the backend for many devices: it distributes the trainer's calls over ranks and merges the results."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Unpack

from torch import Tensor

from cepo.data.batch import CriticBatch, OptimizerBatch, ScoringOptions, ScoringRow
from cepo.metrics import Metrics, max_value, mean_value, merge_metrics
from cepo.models.inputs import ImageSource
from cepo.rollout.generator import Generation, GenerationRequest, OnFinished, SamplingSettings
from cepo.runtime import dispatch
from cepo.runtime.ray.cluster import connect
from cepo.runtime.ray.ranks import Ranks
from cepo.runtime.wire import Sender, encode
from cepo.sizing import Memory
from cepo.workers.worker import WorkerFacts

logger = logging.getLogger(__name__)


class RayBackend:
    """The backend with one worker process per device.

    Args:
        memory: what the run needs on a GPU; None if no GPU can be in use.
        image_probe: one row of the training set; ranks that can read it read all images themselves. None: no data set.

    Raises:
        ConfigError, EngineError, WorkerLostError: see `connect` and `Ranks`.
    """

    def __init__(self, facts: WorkerFacts, memory: Memory | None, image_probe: ImageSource | None) -> None:
        connect(facts.trainer)
        self.ranks = Ranks(facts.trainer, encode((facts, memory, image_probe)))
        self.generator_name: str = self.ranks.answers[0][0]
        self._senders = [Sender(by_source=reads) for _, reads in self.ranks.answers]
        self._ranks_per_engine = facts.worker.rollout.tensor_parallel_size
        self._prompts_per_update = facts.worker.actor.global_batch_size
        self._begin_step()
        self._bytes, self._tokens = [0] * self.ranks.number, [0] * self.ranks.number
        machines, size = sorted({location.machine for location in self.ranks.locations}), self._ranks_per_engine
        shared = "each with its own" if size == 1 else f"each {size} sharing a"
        logger.info(
            "%d workers on %s, %s %s engine", self.ranks.number, ", ".join(machines), shared, self.generator_name
        )

    def generate(
        self,
        requests: Sequence[GenerationRequest],
        settings: SamplingSettings,
        on_finished: OnFinished | None = None,
    ) -> list[list[Generation]]:
        self._begin_step()
        size = self._ranks_per_engine
        indices = dispatch.request_indices(requests, settings, self.ranks.number // size)
        arguments = [(part, settings) for part in dispatch.take(requests, indices) for _ in range(size)]

        def arrived(rank: int, groups: Sequence[list[Generation]]) -> None:
            if on_finished is not None and rank % size == 0:
                for index, group in zip(indices[rank // size], groups, strict=True):
                    on_finished(index, group)

        return dispatch.in_order(self.call("generate", arguments, arrived=arrived)[::size], indices)

    def score(self, rows: Sequence[ScoringRow], **options: Unpack[ScoringOptions]) -> list[Tensor]:
        return self._pass("score", rows, **options)

    def values(self, rows: Sequence[ScoringRow]) -> list[Tensor]:
        return self._pass("values", rows)

    def update(self, batches: Sequence[OptimizerBatch], *, step: int) -> Metrics:
        parts = dispatch.split_batches(batches, self._assignment, self.ranks.number)
        return merge_metrics([*self.call("update", [(part,) for part in parts], step=step), self._work()])

    def update_critic(self, batches: Sequence[CriticBatch], *, step: int) -> Metrics:
        parts = dispatch.split_batches(batches, self._assignment, self.ranks.number)
        return merge_metrics(self.call("update_critic", [(part,) for part in parts], step=step))

    def forget_work(self) -> None:
        self._everywhere("forget_work")
        self._work()

    def finish_step(self, step: int) -> None:
        self._everywhere("finish_step", step)

    def synchronise_rollout(self) -> None:
        self._everywhere("synchronise_rollout")

    def save(self, folder: Path) -> None:
        self._everywhere("save", folder.absolute())

    def load(self, folder: Path) -> None:
        self._everywhere("load", folder.absolute())

    def close(self) -> None:
        self.ranks.end()  # the workers close nothing: what they hold ends with their processes

    def _begin_step(self) -> None:
        """Forgets the last step's assignment and images, because each step numbers its prompts from 0."""
        number = self.ranks.number
        self._assignment = dispatch.Assignment(number, prompts_per_update=self._prompts_per_update)
        for sender in self._senders:
            sender.forget()

    def _pass(self, method: str, rows: Sequence[ScoringRow], **keywords: Any) -> list[Tensor]:
        indices = self._assignment.indices_of(rows)
        arguments = [(part,) for part in dispatch.take(rows, indices)]
        for rank, (part,) in enumerate(arguments):
            self._tokens[rank] += sum(row.num_tokens for row in part)
        return dispatch.in_order(self.call(method, arguments, **keywords), indices)

    def _everywhere(self, method: str, *arguments: object) -> None:
        self.call(method, [arguments] * self.ranks.number)

    def call(
        self,
        method: str,
        arguments: Sequence[tuple[Any, ...]],
        arrived: Callable[[int, Any], None] | None = None,
        **keywords: Any,
    ) -> list[Any]:
        """Calls a worker method on every rank with its own arguments and common keywords; see `Ranks.call`."""
        messages = [sender.encode((part, keywords)) for sender, part in zip(self._senders, arguments, strict=True)]
        self._bytes = [sent + len(message) for sent, message in zip(self._bytes, messages, strict=True)]
        return self.ranks.call(method, messages, arrived=arrived)

    def _work(self) -> Metrics:
        metrics = {
            "work/bytes_sent_per_rank": mean_value(sum(self._bytes) / self.ranks.number),
            "work/bytes_sent_max": max_value(max(self._bytes)),
            "work/tokens_scored_per_rank": mean_value(sum(self._tokens) / self.ranks.number),
            "work/tokens_scored_max": max_value(max(self._tokens)),
        }
        self._bytes, self._tokens = [0] * self.ranks.number, [0] * self.ranks.number
        return metrics
