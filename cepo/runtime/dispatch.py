"""Assigns rows to ranks and merges the ranks' results; all functions here are pure."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Sequence
from typing import TypeVar

from cepo.data.batch import CriticBatch, OptimizerBatch, ScoringRow
from cepo.rollout.generator import GenerationRequest, SamplingSettings

Result = TypeVar("Result")
Batch = TypeVar("Batch", OptimizerBatch, CriticBatch)

RankIndices = Sequence[Sequence[int]]  # of each rank's rows, in ascending order


class Assignment:
    """Assigns the prompts of one step to ranks, in the first pass with a prompt and for all later passes.

    All rows of a prompt thus share their prefix and images on one device, and an update finds the hidden states that an
    earlier pass kept there. Tokens are balanced among the prompts of each optimizer step, at whose end ranks wait; prompt
    `p` belongs to step `p // prompts_per_update`.
    """

    def __init__(self, num_ranks: int, *, prompts_per_update: int) -> None:
        self._num_ranks, self._prompts_per_update = num_ranks, prompts_per_update
        self._ranks: dict[int, int] = {}
        self._loads = [0] * num_ranks

    def indices_of(self, rows: Sequence[ScoringRow]) -> RankIndices:
        """Returns the indices of `rows` for each rank, assigning new prompts by their token counts."""
        self._assign(rows)
        indices_of_ranks: list[list[int]] = [[] for _ in range(self._num_ranks)]
        for index, row in enumerate(rows):
            indices_of_ranks[self._ranks[row.prompt]].append(index)
        return indices_of_ranks

    def _assign(self, rows: Sequence[ScoringRow]) -> None:
        updates: dict[int, dict[int, int]] = defaultdict(lambda: defaultdict(int))
        for row in rows:
            if row.prompt not in self._ranks:
                updates[row.prompt // self._prompts_per_update][row.prompt] += row.num_tokens
        for _, costs in sorted(updates.items()):
            prompts = sorted(costs)
            groups = balance_groups([costs[prompt] for prompt in prompts], self._num_ranks)
            loads = [sum(costs[prompts[index]] for index in group) for group in groups]
            heaviest_first = sorted(zip(loads, groups, strict=True), key=lambda each: -each[0])  # stable
            least_loaded_first = sorted(range(self._num_ranks), key=self._loads.__getitem__)
            for (load, group), rank in zip(heaviest_first, least_loaded_first, strict=True):
                self._loads[rank] += load
                self._ranks |= {prompts[index]: rank for index in group}


def balance_groups(costs: Sequence[int], num_ranks: int) -> list[list[int]]:
    """Returns the indices of each rank's groups, in ascending order, with balanced total costs.

    Longest processing time first: in order of falling cost, each group goes to the rank with the least load so far.
    Ties go to the rank with fewer groups, then to the lower rank. The largest load is at most
    `(4/3 - 1 / (3 num_ranks))` times the smallest possible one. With fewer groups than ranks some get none.
    """
    groups: list[list[int]] = [[] for _ in range(num_ranks)]
    waiting = [(0, 0, rank) for rank in range(num_ranks)]
    for index in sorted(range(len(costs)), key=lambda index: (-costs[index], index)):
        load, count, rank = heapq.heappop(waiting)
        groups[rank].append(index)
        heapq.heappush(waiting, (load + costs[index], count + 1, rank))
    return [sorted(group) for group in groups]


def request_indices(requests: Sequence[GenerationRequest], settings: SamplingSettings, num_ranks: int) -> RankIndices:
    """Returns the indices of each rank's requests, balanced by the largest number of tokens that each may reach."""
    longest = settings.max_response_length * settings.num_samples
    return balance_groups([request.num_prompt_tokens + longest for request in requests], num_ranks)


def take(items: Sequence[Result], indices_of_ranks: RankIndices) -> list[list[Result]]:
    return [[items[index] for index in indices] for indices in indices_of_ranks]


def in_order(parts: Sequence[Sequence[Result]], indices_of_ranks: RankIndices) -> list[Result]:
    """Merges the ranks' results and restores the original order of the items."""
    found = {
        index: result
        for indices, part in zip(indices_of_ranks, parts, strict=True)
        for index, result in zip(indices, part, strict=True)
    }
    return [found[index] for index in range(len(found))]


def split_batches(batches: Sequence[Batch], assignment: Assignment, num_ranks: int) -> list[list[Batch]]:
    """Returns each rank's part of every batch, whose denominators remain totals; a repeated batch is split once."""
    split: dict[int, list[Batch]] = {}
    for batch in batches:
        if id(batch) not in split:
            split[id(batch)] = [batch.at(indices) for indices in assignment.indices_of(batch.rows)]
    return [[split[id(batch)][rank] for batch in batches] for rank in range(num_ranks)]
