"""Decodes the next token of unfinished responses with a transformers model's own forward pass."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(kw_only=True)
class Row:
    """One unfinished response. `cache` is the transformers cache of its prompt, shared by all samples of the prompt."""

    request: int
    sample: int
    uniforms: Tensor
    next_position: int
    length: int
    cache: Any = field(repr=False)
    logits: Tensor = field(repr=False)
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    finished: bool = False


def is_plain(cache: Any) -> bool:
    """Returns whether each layer keeps all keys and values, so that prompts of any lengths can share a padded cache."""
    from transformers.cache_utils import DynamicLayer

    return all(type(layer) is DynamicLayer for layer in cache.layers)


def keys_and_values(cache: Any) -> list[tuple[Tensor, Tensor]]:
    """Returns keys and values per layer, each (1, heads, prompt length, width)."""
    return [(layer.keys, layer.values) for layer in cache.layers]


def decodable_together(rows: Sequence[Row]) -> list[list[Row]]:
    """Groups rows by prompt if padding would affect a layer with a window or a recurrent state; else in one group."""
    if not rows or is_plain(rows[0].cache):
        return [list(rows)] if rows else []
    return [list(group) for _, group in itertools.groupby(rows, key=lambda row: row.request)]


class PlainDecoding:
    """Decodes with the model's own forward pass, with prompts padded on the left."""

    def __init__(self, model: Any, rows: Sequence[Row], *, three_axes: bool) -> None:
        self._model, self._three_axes = model, three_axes
        self._mask: Tensor | None
        self._cache, self._mask = _join(rows, model.config.get_text_config())

    def logits(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Computes one token per row at its position, and returns the logits of the next, (rows, vocabulary)."""
        if self._mask is not None:
            self._mask = torch.cat([self._mask, self._mask.new_ones(len(tokens), 1)], dim=1)
        output = self._model(
            input_ids=tokens[:, None],
            attention_mask=self._mask,
            position_ids=positions.expand(3, -1)[:, :, None] if self._three_axes else positions[:, None],
            past_key_values=self._cache,
            use_cache=True,
        )
        return output.logits[:, -1]

    def select(self, rows: Tensor) -> None:
        """Drops all other rows."""
        self._cache.reorder_cache(rows)
        self._mask = None if self._mask is None else self._mask[rows]


class SamplesDecoding(PlainDecoding):
    """Decodes the samples of one prompt with the model's own forward pass, without padding, for any kind of cache."""

    def __init__(self, model: Any, rows: Sequence[Row], *, three_axes: bool) -> None:
        self._model, self._three_axes = model, three_axes
        self._mask = None
        self._cache = copy.deepcopy(rows[0].cache)
        self._cache.reorder_cache(torch.zeros(len(rows), dtype=torch.long, device=rows[0].logits.device))


def _join(rows: Sequence[Row], text_config: Any) -> tuple[Any, Tensor]:
    """Concatenates the rows' prompt caches, padded on the left; also returns the mask (rows, longest prompt)."""
    from transformers import DynamicCache

    longest = max(row.length for row in rows)
    lengths = torch.tensor([row.length for row in rows], device=rows[0].logits.device)
    mask = (torch.arange(longest, device=lengths.device) >= longest - lengths[:, None]).long()
    cache = DynamicCache(config=text_config)
    known = {id(row.cache): keys_and_values(row.cache) for row in rows}
    for layer in range(len(rows[0].cache.layers)):
        keys, values = (
            torch.cat(
                [
                    torch.nn.functional.pad(known[id(row.cache)][layer][part], (0, 0, longest - row.length, 0))
                    for row in rows
                ]
            )
            for part in (0, 1)
        )
        cache.update(keys, values, layer)
    return cache, mask
