"""Assigns rows to ranks, merges the ranks' results, and serialises the messages; images travel at most once per step."""

from __future__ import annotations

import dataclasses
import io
import pickle
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from cepo.data.batch import CriticBatch, OptimizerBatch, ScoringRow
from cepo.data.image_store import ImageStore
from cepo.models.interface import ImageInputs
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
        self._num_ranks = num_ranks
        self._prompts_per_update = prompts_per_update
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
        costs_of_updates: dict[int, dict[int, int]] = defaultdict(lambda: defaultdict(int))
        for row in rows:
            if row.prompt not in self._ranks:
                update = row.prompt // self._prompts_per_update
                costs_of_updates[update][row.prompt] += row.num_tokens
        for _, costs in sorted(costs_of_updates.items()):
            prompts = sorted(costs)
            groups = balance_groups([costs[prompt] for prompt in prompts], self._num_ranks)
            loads: list[int] = []
            for group in groups:
                loads.append(sum(costs[prompts[index]] for index in group))
            # Both sorts are stable, so that ties go to the lower rank.
            heaviest_first = sorted(range(self._num_ranks), key=lambda number: -loads[number])
            least_loaded_first = sorted(range(self._num_ranks), key=lambda rank: self._loads[rank])
            for number, rank in zip(heaviest_first, least_loaded_first, strict=True):
                self._loads[rank] += loads[number]
                for index in groups[number]:
                    self._ranks[prompts[index]] = rank


def balance_groups(costs: Sequence[int], num_ranks: int) -> list[list[int]]:
    """Returns the indices of each rank's groups, in ascending order, with balanced total costs.

    Longest processing time first: in order of falling cost, each group goes to the rank with the least load so far.
    Ties go to the rank with fewer groups, then to the lower rank. The largest load is at most
    `(4/3 - 1 / (3 num_ranks))` times the smallest possible one. With fewer groups than ranks some get none.
    """
    groups_of_ranks: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [0] * num_ranks

    def load_and_number(rank: int) -> tuple[int, int]:
        return loads[rank], len(groups_of_ranks[rank])

    by_falling_cost = sorted(range(len(costs)), key=lambda index: -costs[index])
    for index in by_falling_cost:
        rank = min(range(num_ranks), key=load_and_number)
        groups_of_ranks[rank].append(index)
        loads[rank] += costs[index]
    return [sorted(groups) for groups in groups_of_ranks]


def request_indices(requests: Sequence[GenerationRequest], settings: SamplingSettings, num_ranks: int) -> RankIndices:
    """Returns the indices of each rank's requests, balanced by the largest number of tokens that each may reach."""
    response_tokens = settings.max_response_length * settings.num_samples
    most_tokens = [request.num_prompt_tokens + response_tokens for request in requests]
    return balance_groups(most_tokens, num_ranks)


def select(items: Sequence[Result], indices_of_ranks: RankIndices) -> list[list[Result]]:
    parts: list[list[Result]] = []
    for indices in indices_of_ranks:
        parts.append([items[index] for index in indices])
    return parts


def in_order(parts: Sequence[Sequence[Result]], indices_of_ranks: RankIndices) -> list[Result]:
    """Merges the ranks' results and restores the original order of the items."""
    results: dict[int, Result] = {}
    for indices, part in zip(indices_of_ranks, parts, strict=True):
        results.update(zip(indices, part, strict=True))
    return [results[index] for index in range(len(results))]


def split_batches(batches: Sequence[Batch], assignment: Assignment, num_ranks: int) -> list[list[Batch]]:
    """Returns each rank's part of every batch, whose denominators remain totals; a repeated batch is split once."""
    parts_of_batches: dict[int, list[Batch]] = {}  # by the batch's identity
    parts_of_ranks: list[list[Batch]] = [[] for _ in range(num_ranks)]
    for batch in batches:
        identity = id(batch)
        if identity not in parts_of_batches:
            indices_of_ranks = assignment.indices_of(batch.rows)
            parts_of_batches[identity] = [batch.at(indices) for indices in indices_of_ranks]
        for rank, part in enumerate(parts_of_batches[identity]):
            parts_of_ranks[rank].append(part)
    return parts_of_ranks


class Sender:
    """Encodes messages for one receiver, and remembers until `forget` which images the receiver has.

    Sender and receiver must forget them before the same message, the first of a step. With `by_source` the receiver
    itself reads the images that name their source.
    """

    def __init__(self, *, by_source: bool) -> None:
        self.by_source = by_source
        self.sent: dict[int, ImageInputs] = {}

    def forget(self) -> None:
        self.sent.clear()

    def encode(self, value: object) -> bytes:
        buffer = io.BytesIO()
        _Pickler(buffer, self).dump(value)
        return buffer.getvalue()


def encode(value: object) -> bytes:
    """Encodes a worker's answer, which contains no images, for `pickle.loads`."""
    return Sender(by_source=False).encode(value)


class _Pickler(pickle.Pickler):
    def __init__(self, buffer: io.BytesIO, sender: Sender) -> None:
        super().__init__(buffer, protocol=5)
        self._sender = sender

    def persistent_id(self, obj: object) -> object:
        """Sends images by reference and anything else by value."""
        if isinstance(obj, ImageInputs):
            return self._image_reference(obj)
        if (
            isinstance(obj, GenerationRequest)
            and self._sender.by_source
            and obj.images
            and obj.image_source is not None
        ):
            return ("request", dataclasses.replace(obj, images=()))
        return None

    def _image_reference(self, images: ImageInputs) -> tuple[object, ...]:
        if self._sender.by_source and images.source is not None:
            return ("source", images.source)
        key = id(images)
        if key in self._sender.sent:
            return ("sent", key)
        self._sender.sent[key] = images  # keeps the images alive, so that no other object can get their id
        values = {field.name: getattr(images, field.name) for field in dataclasses.fields(images)}
        return ("new", key, values)

    def reducer_override(self, obj: object) -> object:
        """Pickles only a tensor's own elements; by default a slice would carry the whole storage of its source."""
        if isinstance(obj, Tensor):
            flat = obj.detach().cpu().contiguous().reshape(-1)
            # As bytes, because NumPy lacks bf16.
            content = flat.view(torch.uint8).numpy()
            return _tensor, (content, obj.dtype, tuple(obj.shape))
        return NotImplemented


class Receiver:
    """Decodes the messages of one `Sender`."""

    def __init__(self, store: ImageStore) -> None:
        self._store = store
        self._received: dict[int, ImageInputs] = {}

    def decode(self, message: bytes) -> Any:
        """Decodes a message. An image is the same object in all messages of a step."""
        unpickler = pickle.Unpickler(io.BytesIO(message))
        unpickler.persistent_load = self._referred  # type: ignore[method-assign]
        return unpickler.load()

    def forget(self) -> None:
        self._received.clear()
        self._store.forget()

    def _referred(self, pid: Any) -> Any:
        kind, *content = pid
        if kind == "source":
            (source,) = content
            return self._store.inputs(source)
        if kind == "request":
            request: GenerationRequest = content[0]
            assert request.image_source is not None
            return dataclasses.replace(request, images=self._store.images(request.image_source))
        if kind == "new":
            key, values = content
            self._received[key] = ImageInputs(**values)
            return self._received[key]
        (key,) = content
        return self._received[key]


def _tensor(flat: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    return torch.from_numpy(flat).view(dtype).reshape(shape)
