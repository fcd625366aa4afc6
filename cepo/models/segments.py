"""Attention over a packed row of segments, each of which sees its ancestors and itself and nothing else.

The segments of a pass stand one behind the other, depth first, in a row of batch size 1. Whatever a model does token by token
(embeddings, norms, linear layers, adapters) needs to know nothing of that; only attention gets the layout, as the keyword
argument `segments` that transformers hands through from the model's forward pass to its attention function. A
recomputed layer gets the same argument again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, cached_property
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

ATTENTION_NAME = "shared_segments"
"""The name under which transformers knows this attention. It builds no mask for a name that it has no mask function for."""

BLOCK_SIZE = 128
"""Tokens per side of a block of FlexAttention."""


_SCORES_AT_ONCE = 2**26
"""Of `attend_by_formula`; float32: 256 MiB."""

_BY_FORMULA = ContextVar("by_formula", default=False)


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
    def branch_end_of_token(self) -> Int64[Tensor, " L"]:
        """Where the branch of each token's segment ends: the token is seen by itself and what follows up to there."""
        return torch.repeat_interleave(torch.tensor(self.branch_ends), torch.tensor(self.starts).diff())

    def filled_to(self, multiple: int) -> SegmentLayout:
        """This layout with a last segment of its own, if one is needed to make the row's length a multiple."""
        end = -(-self.num_tokens // multiple) * multiple
        if end == self.num_tokens:
            return self
        return SegmentLayout(
            starts=(*self.starts, end), parents=(*self.parents, -1), branch_ends=(*self.branch_ends, end)
        )


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
    """transformers' attention function: as `sdpa` where the call names no layout, unless `attention_by_formula` is on.

    With a layout the row is the packed one. On a CPU that is flash attention part by part, on other devices FlexAttention.
    """
    if segments is None and _BY_FORMULA.get() and attention_mask is None:
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        return attend_by_formula(query, key, value, scale).transpose(1, 2).contiguous(), None
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


@contextmanager
def attention_by_formula() -> Iterator[None]:
    """Inside, rows without a layout are computed by `attend_by_formula`: another rounding of the same numbers."""
    token = _BY_FORMULA.set(True)
    try:
        yield
    finally:
        _BY_FORMULA.reset(token)


def attend_by_formula(
    query: Float[Tensor, "R H L D"], key: Float[Tensor, "R K L D"], value: Float[Tensor, "R K L D"], scale: float
) -> Float[Tensor, "R H L D"]:
    """Causal softmax attention in float32, some queries at a time, in the type of the query."""
    rows, heads, length, _ = query.shape
    grouped = query.unflatten(1, (key.shape[1], -1))
    keys, values = key.float().unsqueeze(2), value.float().unsqueeze(2)
    attended = torch.empty_like(grouped)
    place = torch.arange(length, device=query.device)
    step = max(1, _SCORES_AT_ONCE // (rows * heads * length))
    for start in range(0, length, step):
        stop = min(start + step, length)
        scores = grouped[..., start:stop, :].float() @ keys[..., :stop, :].mT * scale
        scores.masked_fill_(place[:stop] > place[start:stop, None], float("-inf"))
        attended[..., start:stop, :] = scores.softmax(dim=-1) @ values[..., :stop, :]
    return attended.flatten(1, 2)


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

    Compiled on a GPU; on a CPU it is a dense computation without gradient, which serves to test the mask.

    Raises:
        RuntimeError: the device's compiler cannot make the kernels, those of the backward pass included; before any gradient
            is computed with them, if the first call is one without gradient.
    """
    if query.device not in layout.block_masks:
        layout.block_masks[query.device] = block_mask(layout, query.device)
    mask = layout.block_masks[query.device]
    if query.device.type == "cpu":
        return attend_to_mask(query, key, value, mask, scale)
    if not torch.is_grad_enabled():
        _require_gradients(query.device, query.dtype, query.shape[1], key.shape[1], query.shape[3], scale)
    return compiled("inductor")(query, key, value, mask, scale)


def attend_to_mask(query: Tensor, key: Tensor, value: Tensor, mask: Any, scale: float) -> Tensor:
    """FlexAttention with grouped queries."""
    from torch.nn.attention.flex_attention import flex_attention

    attended: Any = flex_attention(query, key, value, block_mask=mask, scale=scale, enable_gqa=True)
    return attended


def attend_blocks_to_mask(
    query: Float[Tensor, "1 H N 128 D"], key: Float[Tensor, "1 K N 128 D"], value: Tensor, mask: Any, scale: float
) -> Float[Tensor, "1 H L D"]:
    """`attend_to_mask` of whole blocks, whose length L = 128 N the compiler then knows to be a multiple of 128."""
    return attend_to_mask(query.flatten(2, 3), key.flatten(2, 3), value.flatten(2, 3), mask, scale)


@cache
def compiled(backend: Any) -> Callable[[Tensor, Tensor, Tensor, Any, float], Tensor]:
    """`attend_to_mask` for rows of whole blocks as a compiled function, which is compiled once for all lengths of rows.

    It gets the tokens block by block: of a length that is any number its kernels would check at each block whether it
    reaches over the row's end.

    The first call compiles for its own sizes and the next one for all others. `dynamic=True` would make even the scale a
    variable, which the kernels' templates take as a constant; `specialize_float` keeps it one where two models differ in it.
    Beyond the limit on recompilations, and at a part it cannot compile, the compiler would go on without compiling, with all
    tokens x tokens: `fullgraph` makes that an error, and the limit leaves room for two models, types and modes.
    """
    attend: Any = torch.compile(attend_blocks_to_mask, fullgraph=True, backend=backend)

    def attended(query: Tensor, key: Tensor, value: Tensor, mask: Any, scale: float) -> Tensor:
        blocks = [tensor.unflatten(2, (-1, BLOCK_SIZE)) for tensor in (query, key, value)]
        with torch._dynamo.config.patch(specialize_float=True, recompile_limit=64):
            return attend(*blocks, mask, scale)

    return attended


@cache
def _require_gradients(
    device: torch.device, dtype: torch.dtype, heads: int, key_heads: int, width: int, scale: float
) -> None:
    """Runs both passes on two blocks: a kernel that is too large for the device is found here and not in an update."""
    layout = SegmentLayout(starts=(0, 2 * BLOCK_SIZE), parents=(-1,), branch_ends=(2 * BLOCK_SIZE,))
    shapes = [(1, number, layout.num_tokens, width) for number in (heads, key_heads, key_heads)]
    with torch.enable_grad():
        inputs = [torch.zeros(shape, device=device, dtype=dtype, requires_grad=True) for shape in shapes]
        output = compiled("inductor")(inputs[0], inputs[1], inputs[2], block_mask(layout, device), scale)
        torch.autograd.grad(output.sum(), inputs)


def block_mask(layout: SegmentLayout, device: torch.device) -> Any:
    """The layout for FlexAttention: a token sees another that is not behind it and whose branch it is in.

    From two numbers per block; no tensor of tokens x tokens is built.
    """
    from torch.nn.attention.flex_attention import BlockMask

    ends = layout.branch_end_of_token
    num_blocks = -(-layout.num_tokens // BLOCK_SIZE)
    missing = num_blocks * BLOCK_SIZE - layout.num_tokens
    ends = torch.cat([ends, ends.new_full((missing,), num_blocks * BLOCK_SIZE)])
    by_block = ends.view(num_blocks, BLOCK_SIZE)
    first_query = torch.arange(num_blocks)[:, None] * BLOCK_SIZE
    some = (by_block.amax(dim=1) > first_query).tril()
    every = (by_block.amin(dim=1) >= first_query + BLOCK_SIZE).tril(diagonal=-1)
    branch_end = ends.int().to(device)

    def sees_token(batch: Tensor, head: Tensor, query_index: Tensor, key_index: Tensor) -> Tensor:
        return (key_index <= query_index) & (query_index < branch_end[key_index])

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
