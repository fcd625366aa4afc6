"""Which rank works on which rows, and how their results come together again. Pure: no process is asked here."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from cepo.data.batch import CriticBatch, DistillationRows, OptimizerBatch, ScoringRow
from cepo.rollout.base import GenerationRequest, SamplingSettings
from cepo.runtime.balance import balance_groups

Result = TypeVar("Result")
Batch = TypeVar("Batch", OptimizerBatch, CriticBatch)

Places = Sequence[Sequence[int]]
"""For each rank the indices of its rows, ascending."""


class Assignment:
    """Prompts to ranks, for one step: whatever pass comes first decides, and all later ones follow it.

    So the rows of a prompt share their prefix and their pictures on one device, and an update finds the states that an
    earlier pass kept. Tokens are balanced within each optimizer step's prompts, because ranks wait for each other there.

    Args:
        prompts_per_update: prompts of one optimizer step; prompt `p` belongs to optimizer step `p // prompts_per_update`.
    """

    def __init__(self, num_ranks: int, *, prompts_per_update: int) -> None:
        self._num_ranks, self._prompts_per_update = num_ranks, prompts_per_update
        self._ranks: dict[int, int] = {}
        self._loads = [0] * num_ranks

    def places(self, rows: Sequence[ScoringRow]) -> Places:
        """Indices of `rows` for each rank; prompts seen for the first time are given to ranks by their tokens."""
        self._assign(rows)
        places: list[list[int]] = [[] for _ in range(self._num_ranks)]
        for index, row in enumerate(rows):
            places[self._ranks[row.prompt]].append(index)
        return places

    def _assign(self, rows: Sequence[ScoringRow]) -> None:
        updates: dict[int, dict[int, int]] = defaultdict(lambda: defaultdict(int))
        for row in rows:
            if row.prompt not in self._ranks:
                updates[row.prompt // self._prompts_per_update][row.prompt] += row.num_tokens
        for _, costs in sorted(updates.items()):
            self._assign_update(costs)

    def _assign_update(self, costs: Mapping[int, int]) -> None:
        prompts = sorted(costs)
        groups = balance_groups([costs[prompt] for prompt in prompts], self._num_ranks)
        loads = [sum(costs[prompts[index]] for index in group) for group in groups]
        heaviest_first = sorted(range(self._num_ranks), key=lambda number: (-loads[number], number))
        least_loaded_first = sorted(range(self._num_ranks), key=lambda rank: (self._loads[rank], rank))
        for number, rank in zip(heaviest_first, least_loaded_first, strict=True):
            self._loads[rank] += loads[number]
            self._ranks |= {prompts[index]: rank for index in groups[number]}


def request_places(requests: Sequence[GenerationRequest], settings: SamplingSettings, num_ranks: int) -> Places:
    """Indices of the requests for each rank, balanced by the tokens each may come to."""
    longest = settings.max_response_length * settings.num_samples
    return balance_groups([request.num_prompt_tokens + longest for request in requests], num_ranks)


def take(items: Sequence[Result], places: Places) -> list[list[Result]]:
    """Each rank's items."""
    return [[items[index] for index in indices] for indices in places]


def in_order(parts: Sequence[Sequence[Result]], places: Places) -> list[Result]:
    """The ranks' results, each back in its item's place."""
    found = {
        index: result
        for indices, part in zip(places, parts, strict=True)
        for index, result in zip(indices, part, strict=True)
    }
    return [found[index] for index in range(len(found))]


def own_places(places: Places) -> dict[int, tuple[int, int]]:
    """Index of a row among all -> (its rank, its index among that rank's)."""
    return {index: (rank, own) for rank, indices in enumerate(places) for own, index in enumerate(indices)}


@dataclasses.dataclass(frozen=True)
class KeptPlaces:
    """Where the rows of the last passes that kept states are, by their place in those passes."""

    teacher: Mapping[int, tuple[int, int]]
    reference: Mapping[int, tuple[int, int]]


def split_optimizer_batches(
    batches: Sequence[OptimizerBatch], assignment: Assignment, kept: KeptPlaces, num_ranks: int
) -> list[list[OptimizerBatch]]:
    """Each rank's part of every batch; denominators stay totals over all ranks."""
    return _split(
        batches, assignment, num_ranks, part=lambda batch, indices, rank: _optimizer_part(batch, indices, rank, kept)
    )


def split_critic_batches(
    batches: Sequence[CriticBatch], assignment: Assignment, num_ranks: int
) -> list[list[CriticBatch]]:
    """As `split_optimizer_batches`, for the critic."""
    return _split(batches, assignment, num_ranks, part=_critic_part)


def _split(
    batches: Sequence[Batch],
    assignment: Assignment,
    num_ranks: int,
    *,
    part: Callable[[Batch, list[int], int], Batch],
) -> list[list[Batch]]:
    """Each rank's batches. One that repeats, in another epoch, is split once."""
    split: dict[int, list[Batch]] = {}
    for batch in batches:
        if id(batch) not in split:
            places = assignment.places(batch.rows)
            split[id(batch)] = [part(batch, list(indices), rank) for rank, indices in enumerate(places)]
    return [[split[id(batch)][rank] for batch in batches] for rank in range(num_ranks)]


def _critic_part(batch: CriticBatch, indices: list[int], rank: int) -> CriticBatch:
    return dataclasses.replace(
        batch,
        rows=[batch.rows[index] for index in indices],
        old_values=batch.old_values[indices],
        returns=batch.returns[indices],
        response_mask=batch.response_mask[indices],
    )


def _optimizer_part(batch: OptimizerBatch, indices: list[int], rank: int, kept: KeptPlaces) -> OptimizerBatch:
    reference, distillation = batch.reference_log_probs, batch.distillation
    return dataclasses.replace(
        batch,
        rows=[batch.rows[index] for index in indices],
        old_log_probs=batch.old_log_probs[indices],
        advantages=batch.advantages[indices],
        response_mask=batch.response_mask[indices],
        reference_log_probs=None if reference is None else reference[indices],
        reference_index=None
        if batch.reference_index is None
        else [_own(batch.reference_index[index], rank, kept.reference) for index in indices],
        distillation=None
        if distillation is None
        else DistillationRows(
            divergence=distillation.divergence,
            token_weight=distillation.token_weight[indices],
            state_index=[_own(distillation.state_index[index], rank, kept.teacher) for index in indices],
        ),
    )


def _own(place: int, rank: int, kept: Mapping[int, tuple[int, int]]) -> int:
    """A place in a pass over all ranks as the rank's own; -1, for a row without kept states, stays."""
    if place < 0:
        return place
    where, own = kept[place]
    assert where == rank, f"the states of place {place} are on rank {where}, its row on rank {rank}"
    return own
