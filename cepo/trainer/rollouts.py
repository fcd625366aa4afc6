"""Defines rollouts: prompts with their rewarded responses, as tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from cepo.algorithms.masking import at_last_token, response_mask_of, with_rows
from cepo.data.batch import OWN_VIEW, ScoringRow
from cepo.data.prompts import Problem
from cepo.metrics import Metric, Metrics
from cepo.models.interface import EncodedPrompt
from cepo.rollout.generator import Generation


@dataclass(frozen=True, kw_only=True)
class Rollouts:
    """Prompts and their rewarded responses. Row `b` of every tensor is response `b % G` to prompt `b // G`."""

    step: int
    problems: Sequence[Problem]
    prompts: Sequence[EncodedPrompt]
    generations: Sequence[Generation]
    responses: Sequence[str]
    scores: Sequence[Mapping[str, float]]  # the reward function's fields for each row
    correct: Tensor
    num_raised: int = 0  # number of responses whose reward failed, here and below
    num_timed_out: int = 0
    reward_baselines: Tensor | None = None  # (B,) of the prompt's greedy response, for methods with this baseline
    metrics: Metrics = field(default_factory=dict[str, Metric])  # of online filtering

    @property
    def group_size(self) -> int:
        """G, the number of rollouts per prompt."""
        return len(self.generations) // len(self.problems)

    @cached_property
    def rewards(self) -> Tensor:
        """(B,) the total reward of each response."""
        return torch.tensor([score["overall"] for score in self.scores])

    @cached_property
    def group_ids(self) -> Tensor:
        """(B,) the prompt number of each row."""
        return torch.arange(len(self.problems)).repeat_interleave(self.group_size)

    @cached_property
    def response_mask(self) -> Tensor:
        """(B, T) True on response tokens, where T is the length of the longest response."""
        return response_mask_of(torch.tensor([len(generation.response_ids) for generation in self.generations]))

    @cached_property
    def finished(self) -> Tensor:
        """(B,) False on responses that the length limit cut."""
        return torch.tensor([generation.finished for generation in self.generations])

    @cached_property
    def sampled_log_probs(self) -> Tensor:
        """(B, T) the rollout engine's own log-probs of the sampled tokens, 0 on padding."""
        return self.padded([torch.as_tensor(generation.log_probs) for generation in self.generations])

    @cached_property
    def token_level_rewards(self) -> Tensor:
        """(B, T) the outcome reward at the last response token, 0 elsewhere."""
        return at_last_token(self.rewards, self.response_mask)

    def rows_of(self, number: int) -> range:
        return range(number * self.group_size, (number + 1) * self.group_size)

    def padded(self, rows: Sequence[Tensor]) -> Tensor:
        """Returns each row's values, one per response token, as a (B, T) tensor with 0 on padding."""
        return with_rows(torch.zeros(self.response_mask.shape), dict(enumerate(rows)))

    def scoring_row(self, row: int, context: EncodedPrompt | None = None, *, view: str = OWN_VIEW) -> ScoringRow:
        """Returns the row to score: its response after the student's prompt, or after the context of a view."""
        number = row // self.group_size
        return ScoringRow(
            context=context or self.prompts[number],
            response_ids=self.generations[row].response_ids,
            prompt=number,
            row=row,
            view=view,
        )
