"""Keys and values of rows that are decoded together, in memory that is taken once for the whole decode."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

if TYPE_CHECKING:
    from torch import Tensor

KeysAndValues = Sequence[tuple["Tensor", "Tensor"]]
"""Per layer, each (1, heads, prompt length, width)."""


class _RoomyLayer(DynamicLayer):
    """A layer that writes a new token's keys and values behind the earlier ones; `DynamicLayer` copies all of them instead."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        super().__init__()
        self.is_initialized, self.dtype, self.device = True, keys.dtype, keys.device
        self.keys, self.values, self._length = keys, values, 0

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """The keys and values so far with the new ones behind them, (rows, heads, length, width)."""
        assert self.keys is not None and self.values is not None
        start, self._length = self._length, self._length + key_states.shape[2]
        self.keys[:, :, start : self._length] = key_states
        self.values[:, :, start : self._length] = value_states
        return self.keys[:, :, : self._length], self.values[:, :, : self._length]

    def get_seq_length(self) -> int:
        return self._length

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps the rows `indices`; their keys and values move to the first places of the same memory."""
        assert self.keys is not None and self.values is not None
        for name, whole in (("keys", self.keys), ("values", self.values)):
            kept = whole[: len(indices)]
            kept[:, :, : self._length] = whole[indices, :, : self._length]
            setattr(self, name, kept)


class DecodeCache:
    """What the forward pass of one more token per row needs of the tokens before it.

    Prompts are padded on the left. `states` is transformers' view of the keys and values. Where a layer looks back over a
    limited window, transformers' own storage and masks are kept.

    Args:
        prompts: the distinct prompts' keys and values.
        prompt_of_row: which of them each row continues.
        new_tokens: tokens that a row may get at most.
        text_config: of the language model.
    """

    def __init__(
        self, prompts: Sequence[KeysAndValues], prompt_of_row: Sequence[int], *, new_tokens: int, text_config: Any
    ) -> None:
        lengths = [prompt[0][0].shape[2] for prompt in prompts]
        self._length = max(lengths)
        first = prompts[0][0][0]
        rows = torch.tensor(prompt_of_row, device=first.device)
        self.states = DynamicCache(config=text_config)
        self._full_attention = all(type(layer) is DynamicLayer for layer in self.states.layers)
        for layer in range(len(prompts[0])):
            keys, values = (self._padded([prompt[layer][part] for prompt in prompts]) for part in (0, 1))
            if self._full_attention:
                shape = (len(rows), keys.shape[1], self._length + new_tokens, keys.shape[3])
                self.states.layers[layer] = _RoomyLayer(keys.new_empty(shape), values.new_empty(shape))
            self.states.update(keys[rows], values[rows], layer)
        self._mask: Tensor | None = None
        if min(lengths) < self._length:
            blanks = self._length - torch.tensor(lengths, device=first.device)[rows]
            seen = torch.arange(self._length + new_tokens, device=first.device) >= blanks[:, None]
            self._mask = seen.long() if not self._full_attention else _additive(seen, first.dtype)

    def next_mask(self) -> Tensor | None:
        """Makes room for one more token per row; the mask of that pass, None where nothing is padded."""
        self._length += 1
        return None if self._mask is None else self._mask[..., : self._length]

    def select(self, rows: Tensor) -> None:
        """Goes on with these rows alone."""
        self.states.batch_select_indices(rows)
        if self._mask is not None:
            self._mask = self._mask[rows]

    def _padded(self, parts: Sequence[Tensor]) -> Tensor:
        pad = torch.nn.functional.pad
        return torch.cat([pad(part, (0, 0, self._length - part.shape[2], 0)) for part in parts])


def _additive(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """(rows, 1, 1, length), made once: transformers takes a mask of four axes as it is, and a boolean one costs every layer."""
    mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill(~seen, torch.finfo(dtype).min)
    return mask[:, None, None]
