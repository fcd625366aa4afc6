"""Attention over a packed row of segments, each of which sees its ancestors and itself and nothing else.

The segments of a pass stand one behind the other, depth first, in a row of batch size 1. Whatever a model does token by token
(embeddings, norms, linear layers, adapters) needs to know nothing of that; only attention gets the layout, as the keyword
argument `segments` that transformers hands through from the model's forward pass to its attention function. A
recomputed layer gets the same argument again.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, cached_property
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

ATTENTION_NAME = "shared_segments"
"""The name under which transformers knows this attention. It builds no mask for a name that it has no mask function for."""

BLOCK_SIZE = 128
"""Tokens per side of a block of FlexAttention."""


class Part(NamedTuple):
    """Tokens that see tokens; `first` where no part before has these queries."""

    queries: slice
    keys: slice
    causal: bool
    first: bool


class SegmentLayout:
    """Where the segments of a packed row stand.

    Not a dataclass: FSDP rebuilds those that reach its modules, layer by layer, and with them what is derived here once.

    Args:
        starts: first token of each segment, and behind them the row's length.
        parents: of each segment, -1 for none.
        branch_ends: end of each segment's last descendant; descendants follow a segment directly.

    Attributes:
        block_masks: FlexAttention's form of the layout by device, made where it is first needed.
    """

    def __init__(self, *, starts: tuple[int, ...], parents: tuple[int, ...], branch_ends: tuple[int, ...]) -> None:
        self.starts, self.parents, self.branch_ends = starts, parents, branch_ends
        self.block_masks: dict[torch.device, Any] = {}

    @property
    def num_tokens(self) -> int:
        """Length of the packed row."""
        return self.starts[-1]

    def parts(self) -> Iterator[Part]:
        """Together every pair of a token and one that it sees, each pair once.

        Every segment sees itself causally; then the descendants of a segment, as one range, see all of it.
        """
        for index, start in enumerate(self.starts[:-1]):
            stop, end, is_root = self.starts[index + 1], self.branch_ends[index], self.parents[index] < 0
            yield Part(queries=slice(start, stop), keys=slice(start, stop), causal=True, first=is_root)
            if end > stop:
                yield Part(queries=slice(stop, end), keys=slice(start, stop), causal=False, first=is_root)

    @cached_property
    def segment_of_token(self) -> Int64[Tensor, " L"]:
        """Each token's segment."""
        lengths = torch.tensor(self.starts).diff()
        return torch.repeat_interleave(torch.arange(len(lengths)), lengths)

    @cached_property
    def sees(self) -> Bool[Tensor, "S S"]:
        """Whether tokens of a segment (row) see a segment (column): ancestors and itself."""
        table = torch.eye(len(self.parents), dtype=torch.bool)
        for index, parent in enumerate(self.parents):
            if parent >= 0:
                table[index] |= table[parent]
        return table


def segment_attention(
    module: Any,
    query: Float[Tensor, "1 H L D"],
    key: Float[Tensor, "1 K L D"],
    value: Float[Tensor, "1 K L D"],
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    segments: SegmentLayout | None = None,
    **settings: Any,
) -> tuple[Float[Tensor, "1 L H D"], None]:
    """transformers' attention function: as `sdpa` where the call names no layout.

    With a layout the row is the packed one. On a CPU that is flash attention part by part, on other devices FlexAttention.
    """
    if segments is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **settings)
    assert query.shape[2] == segments.num_tokens, f"{query.shape[2]} tokens, a layout of {segments.num_tokens}"
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if query.device.type == "cpu":
        attended = attend_by_parts(query, key, value, segments, scale)
    else:
        attended = attend_by_blocks(query, key, value, segments, scale)
    return attended.transpose(1, 2).contiguous(), None


def attend_by_parts(
    query: Float[Tensor, "1 H L D"],
    key: Float[Tensor, "1 K L D"],
    value: Float[Tensor, "1 K L D"],
    layout: SegmentLayout,
    scale: float,
) -> Float[Tensor, "1 H L D"]:
    """Softmax attention of each token over what it sees, from flash attention over `layout.parts()`.

    With `o_p` and `l_p` the output and the log of the softmax's denominator that part p alone gives a token,
    `l = logsumexp_p l_p` and `o = sum_p exp(l_p - l) o_p`. No key is copied and no mask is built. In the backward pass each
    part's kernel gets the whole `o` and `l`, with which it returns exactly its share of the gradient.
    """
    result: Any = _AttentionByParts.apply(query, key, value, layout, scale)
    return result


class _AttentionByParts(torch.autograd.Function):
    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, layout: SegmentLayout, scale: float
    ) -> Tensor:
        flash: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        output = torch.empty(query.shape, dtype=_accumulator(query))
        log_weights = torch.empty(query.shape[:3], dtype=_accumulator(query))
        for part in layout.parts():
            partial, partial_weights = flash(
                query[:, :, part.queries], key[:, :, part.keys], value[:, :, part.keys], 0.0, part.causal, scale=scale
            )
            known = log_weights[:, :, part.queries]
            if part.first:
                output[:, :, part.queries] = partial
                known.copy_(partial_weights)
            else:
                share = torch.sigmoid(partial_weights - known).unsqueeze(-1)
                output[:, :, part.queries].lerp_(partial.to(output.dtype), share)
                torch.logaddexp(known, partial_weights, out=known)
        result = output.to(query.dtype)
        ctx.save_for_backward(query, key, value, result, log_weights)
        ctx.layout, ctx.scale = layout, scale
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        flash_backward: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        query, key, value, output, log_weights = ctx.saved_tensors
        sums = [torch.zeros(tensor.shape, dtype=_accumulator(query)) for tensor in (query, key, value)]
        for part in ctx.layout.parts():
            shares = flash_backward(
                gradient[:, :, part.queries],
                query[:, :, part.queries],
                key[:, :, part.keys],
                value[:, :, part.keys],
                output[:, :, part.queries],
                log_weights[:, :, part.queries],
                0.0,
                part.causal,
                scale=ctx.scale,
            )
            for total, place, share in zip(sums, (part.queries, part.keys, part.keys), shares, strict=True):
                total[:, :, place] += share
        return *(total.to(query.dtype) for total in sums), None, None


def _accumulator(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def attend_by_blocks(
    query: Float[Tensor, "1 H L D"],
    key: Float[Tensor, "1 K L D"],
    value: Float[Tensor, "1 K L D"],
    layout: SegmentLayout,
    scale: float,
) -> Float[Tensor, "1 H L D"]:
    """As `attend_by_parts`, by FlexAttention, which skips blocks of tokens that do not see each other.

    Not measured on a GPU yet; on a CPU it is a dense computation that serves to test the mask.
    """
    if query.device not in layout.block_masks:
        layout.block_masks[query.device] = block_mask(layout, query.device)
    attend: Any = _flex_attention(compiled=query.device.type != "cpu")
    return attend(
        query,
        key,
        value,
        block_mask=layout.block_masks[query.device],
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def block_mask(layout: SegmentLayout, device: torch.device) -> Any:
    """The layout for FlexAttention, from a table of blocks x segments: no tensor of tokens x tokens is built."""
    from torch.nn.attention.flex_attention import BlockMask

    segment_of_token, sees = layout.segment_of_token, layout.sees
    num_blocks = -(-layout.num_tokens // BLOCK_SIZE)
    holds = torch.zeros(num_blocks, len(sees))
    holds[torch.arange(layout.num_tokens) // BLOCK_SIZE, segment_of_token] = 1
    some = (holds @ sees.float() @ holds.T > 0).tril()
    every = (holds @ (~sees).float() @ holds.T == 0).tril(diagonal=-1)
    owner, table = segment_of_token.to(device), sees.to(device)
    last = layout.num_tokens - 1

    def sees_token(batch: Tensor, head: Tensor, query_index: Tensor, key_index: Tensor) -> Tensor:
        query_owner, key_owner = owner[query_index.clamp(max=last)], owner[key_index.clamp(max=last)]
        return (key_index <= query_index) & table[query_owner, key_owner]

    partial_counts, partial_indices = _listed(some & ~every, device)
    full_counts, full_indices = _listed(every, device)
    return BlockMask.from_kv_blocks(
        partial_counts,
        partial_indices,
        full_counts,
        full_indices,
        BLOCK_SIZE=BLOCK_SIZE,
        mask_mod=sees_token,
        seq_lengths=(layout.num_tokens, layout.num_tokens),
    )


def _listed(table: Bool[Tensor, "Q K"], device: torch.device) -> tuple[Tensor, Tensor]:
    """Per row how many entries are set and, those first, the columns."""
    columns = table.int().argsort(dim=1, descending=True, stable=True)
    return table.sum(dim=1)[None, None].int().to(device), columns[None, None].int().to(device)


@cache
def _flex_attention(*, compiled: bool) -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=True) if compiled else flex_attention
