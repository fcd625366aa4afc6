"""The reward stage: each group is decoded and scored as soon as the engine has finished it."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

from cepo.config import RunConfig
from cepo.data.dataset import Problem
from cepo.models.processing import Processing
from cepo.rewards.contract import RewardOutcome
from cepo.rewards.pool import RewardPool
from cepo.rollout.base import Generation
from cepo.trainer import measures


class Rewarding:
    """Rewards of one round of problems, in any order of its groups. A context manager around generation and reward."""

    def __init__(
        self, problems: Sequence[Problem], config: RunConfig, processing: Processing, rewards: RewardPool
    ) -> None:
        self._problems, self._config, self._processing = problems, config, processing
        self._rewards, self._stream = rewards, rewards.stream()
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

    def finish(self, groups: Sequence[Sequence[Generation]]) -> tuple[list[str], RewardOutcome]:
        """Waits for all scores; the decoded responses and their scores, problem by problem.

        Groups that the backend has not announced while it generated are scored now.

        Raises:
            RewardError: no response has got a score, in this round and all before it.
        """
        for index, group in enumerate(groups):
            if index not in self._stream:
                self.begin(index, group)
        outcome = self._stream.outcome()
        self._rewards.require_a_score(outcome)
        return [text for index in range(len(groups)) for text in self._responses[index]], outcome
