"""The reward stage: each group is decoded and scored as soon as the engine has finished it."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

import torch

from cepo.config import RunConfig
from cepo.data.dataset import Problem
from cepo.models.processing import Processing
from cepo.rewards import RewardPool
from cepo.rollout.base import Generation
from cepo.trainer import measures
from cepo.trainer.rollouts import RolloutBatch


class Rewarding:
    """Rewards of one round of problems, in any order of its groups. A context manager around generation and reward."""

    def __init__(
        self, problems: Sequence[Problem], config: RunConfig, processing: Processing, rewards: RewardPool
    ) -> None:
        self._problems, self._config, self._processing = problems, config, processing
        self._stream = rewards.stream()
        self._responses: dict[int, list[str]] = {}

    def __enter__(self) -> Rewarding:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stream.__exit__(kind, error, trace)

    def begin(self, index: int, group: Sequence[Generation]) -> None:
        """Sends the responses to problem `index` to the reward workers; returns at once."""
        skip = self._config.worker.reward.skip_special_tokens
        self._responses[index] = [
            self._processing.decode(generation.response_ids, skip_special_tokens=skip) for generation in group
        ]
        self._stream.add(
            index,
            [
                measures.reward_input(self._problems[index], response, len(generation.response_ids))
                for response, generation in zip(self._responses[index], group, strict=True)
            ],
        )

    def finish(self, batch: RolloutBatch) -> None:
        """Waits for all scores and tells right from wrong; a reward that raises or hangs costs its own sample.

        Groups that the backend has not announced while it generated are scored now.
        """
        size = batch.group_size
        for index in range(len(self._problems)):
            if index not in self._stream:
                self.begin(index, batch.generations[index * size : (index + 1) * size])
        outcome = self._stream.outcome()
        algorithm = self._config.algorithm
        batch.responses = [text for index in range(len(self._problems)) for text in self._responses[index]]
        batch.scores = outcome.scores
        batch.num_raised, batch.num_timed_out = outcome.num_raised, outcome.num_timed_out
        batch.rewards = torch.tensor([score["overall"] for score in batch.scores])
        batch.correct = measures.correctness(batch.scores, algorithm.correct_key, algorithm.correct_threshold)
