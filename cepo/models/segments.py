"""Computes attention over a packed row of segments. A segment attends to its ancestors and, causally, to itself.

The segments of a pass follow each other depth first in a row of batch size 1. Operations on single tokens (embeddings,
norms, linear layers, adapters) do not depend on the layout. Only attention receives it, as the keyword argument
`segments`, which transformers forwards to its attention function. A recomputed layer receives it again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from cepo.errors import EngineError
from cepo.models.without_waiting import to_device

if TYPE_CHECKING:
    from torch import nn
    from torch.nn.attention.flex_attention import BlockMask

ATTENTION_NAME = "shared_segments"
"""The name of this attention in transformers, which builds no mask because no mask function has this name."""

BLOCK_SIZE = 128
"""The side of a FlexAttention block in tokens."""

_LARGEST_GAP = {torch.float32: 1e-3, torch.bfloat16: 3e-2, torch.float16: 3e-2}
"""What packed attention and its gradients may differ by from float64, of their norm; an H100 had 1e-6 and 8e-3."""


class Part(NamedTuple):
    """A range of queries that attends to a range of keys."""

    queries: slice
    keys: slice
    causal: bool


class SegmentLayout:
    """Describes the positions and branches of the segments in a packed row.

    It is not a dataclass, because FSDP rebuilds dataclass arguments at every layer, which would lose the cached values.

    Args:
        starts: first token of each segment, followed by the row's length.
        branch_ends: end of each segment's last descendant; descendants follow a segment directly.

    Attributes:
        masks: FlexAttention's mask for each device, built at its first use.
    """

    def __init__(self, *, starts: tuple[int, ...], branch_ends: tuple[int, ...]) -> None:
        self.starts = starts
        self.branch_ends = branch_ends
        self.masks: dict[torch.device, PackedMask] = {}

    @property
    def num_tokens(self) -> int:
        return self.starts[-1]

    def mask_on(self, device: torch.device) -> PackedMask:
        if device not in self.masks:
            self.masks[device] = packed_mask(self, device)
        return self.masks[device]

    def for_compiled_layer(self, device: torch.device) -> RowParts | PackedMask:
        """Returns the layout as tensors, which a compiler takes as arguments of a layer."""
        if device.type != "cpu":
            return self.mask_on(device)
        for tensor in self.row_parts:
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
        return self.row_parts

    @cached_property
    def row_parts(self) -> RowParts:
        return RowParts(torch.tensor(self.starts), torch.tensor(self.branch_ends))

    def parts(self) -> Iterator[Part]:
        """Yields parts that together cover every visible (query, key) pair exactly once.

        Each segment attends to itself causally; the descendants of a segment, as one range, attend to all of it.
        """
        for start, stop, end in zip(self.starts, self.starts[1:], self.branch_ends, strict=False):
            yield Part(queries=slice(start, stop), keys=slice(start, stop), causal=True)
            if end > stop:
                yield Part(queries=slice(stop, end), keys=slice(start, stop), causal=False)

    @cached_property
    def branch_end_of_token(self) -> Int64[Tensor, " L"]:
        """The end of each token's branch: only the token itself and later tokens before that end see it."""
        lengths = torch.tensor(self.starts).diff()
        return torch.repeat_interleave(torch.tensor(self.branch_ends), lengths)

    def filled_to(self, multiple: int) -> SegmentLayout:
        """Returns the layout padded to a multiple of `multiple` tokens by a last root segment, if one is needed."""
        num_blocks = -(-self.num_tokens // multiple)  # rounded up
        end = num_blocks * multiple
        if end == self.num_tokens:
            return self
        return SegmentLayout(starts=(*self.starts, end), branch_ends=(*self.branch_ends, end))


def segment_attention(
    module: nn.Module,
    query: Float[Tensor, "1 H L D"],
    key: Float[Tensor, "1 K L D"],
    value: Float[Tensor, "1 K L D"],
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    segments: SegmentLayout | RowParts | PackedMask | None = None,
    **settings: Any,
) -> tuple[Float[Tensor, "1 L H D"], None]:
    """Computes attention for transformers: packed attention with `segments`, else `sdpa`.

    Packed attention is flash attention part by part on a CPU and FlexAttention on other devices. A layer that is
    compiled gets `SegmentLayout.for_compiled_layer` as its segments.
    """
    if segments is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **settings)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if isinstance(segments, PackedMask):
        attended = attend_to_mask(query, key, value, segments, scale)
        return attended.transpose(1, 2).contiguous(), None
    if isinstance(segments, RowParts):
        attended, _ = _attended(query, key, value, *segments, scale)
        return attended.transpose(1, 2).contiguous(), None
    assert query.shape[2] == segments.num_tokens, f"{query.shape[2]} tokens, a layout of {segments.num_tokens}"
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
    """Computes packed softmax attention on a CPU by merging flash attention over each of `layout.parts()`.

    With a token's output `o_p` of part p and the log `l_p` of its softmax denominator, `l = logsumexp_p l_p` and
    `o = sum_p exp(l_p - l) o_p`. In the backward pass each part's kernel gets the merged `o` and `l`, so it returns
    exactly its share of the gradient.
    """
    attended, _ = _attended(query, key, value, *layout.row_parts, scale)
    return attended


class RowParts(NamedTuple):
    """A layout as tensors on the CPU: its parts stay opaque to the compiler of a layer."""

    starts: Int64[Tensor, " S+1"]
    branch_ends: Int64[Tensor, " S"]

    def layout(self) -> SegmentLayout:
        return SegmentLayout(starts=tuple(self.starts.tolist()), branch_ends=tuple(self.branch_ends.tolist()))


@torch.library.custom_op("cepo::attend_by_parts", mutates_args=())
def _attended(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor, branch_ends: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Returns the attended values, and the logs of the softmax denominators, (1, H, L)."""
    flash: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    output = torch.zeros(query.shape, dtype=_accumulator(query))  # (1, H, L, D)
    log_weights = torch.full(query.shape[:3], float("-inf"), dtype=_accumulator(query))  # (1, H, L)
    for part in RowParts(starts, branch_ends).layout().parts():
        part_query = query[:, :, part.queries]
        part_key = key[:, :, part.keys]
        part_value = value[:, :, part.keys]
        part_output, part_weights = flash(part_query, part_key, part_value, 0.0, part.causal, scale=scale)
        merged_weights = log_weights[:, :, part.queries]  # of the parts before this one
        share = torch.sigmoid(part_weights - merged_weights).unsqueeze(-1)  # 1 for the first part of a query
        output[:, :, part.queries].lerp_(part_output.to(output.dtype), share)
        torch.logaddexp(merged_weights, part_weights, out=merged_weights)
    result = output.to(query.dtype)
    return result, log_weights


@torch.library.custom_op("cepo::attend_by_parts_backward", mutates_args=())
def _gradients(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    log_weights: Tensor,
    starts: Tensor,
    branch_ends: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    flash_backward: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    to_query = torch.zeros(query.shape, dtype=_accumulator(query))
    to_key = torch.zeros(key.shape, dtype=_accumulator(query))
    to_value = torch.zeros(value.shape, dtype=_accumulator(query))
    for part in RowParts(starts, branch_ends).layout().parts():
        part_to_query, part_to_key, part_to_value = flash_backward(
            gradient[:, :, part.queries],
            query[:, :, part.queries],
            key[:, :, part.keys],
            value[:, :, part.keys],
            output[:, :, part.queries],
            log_weights[:, :, part.queries],
            0.0,
            part.causal,
            scale=scale,
        )
        to_query[:, :, part.queries] += part_to_query
        to_key[:, :, part.keys] += part_to_key
        to_value[:, :, part.keys] += part_to_value
    return to_query.to(query.dtype), to_key.to(query.dtype), to_value.to(query.dtype)


@_attended.register_fake
def _(query: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    return output, torch.empty(query.shape[:3], dtype=_accumulator(query), device=query.device)


@_gradients.register_fake
def _(_: Tensor, query: Tensor, key: Tensor, value: Tensor, *__: Any) -> tuple[Tensor, ...]:
    return tuple(torch.empty(tensor.shape, dtype=query.dtype, device=query.device) for tensor in (query, key, value))


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, starts, branch_ends, ctx.scale = inputs
    ctx.save_for_backward(query, key, value, *output, starts, branch_ends)


def _gradients_of_parts(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    return *_gradients(gradient, *ctx.saved_tensors, ctx.scale), None, None, None


_attended.register_autograd(_gradients_of_parts, setup_context=_keep_for_backward)


def _accumulator(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def attend_by_blocks(
    query: Float[Tensor, "1 H L D"],
    key: Float[Tensor, "1 K L D"],
    value: Float[Tensor, "1 K L D"],
    layout: SegmentLayout,
    scale: float,
) -> Float[Tensor, "1 H L D"]:
    """Computes packed attention by compiled FlexAttention, which skips blocks without visible pairs.

    The result is that of `attend_by_parts`. `require_packed_attention` must have run before the first pass: what it
    computes for a trial would count as the pass's own, and a recomputed pass, which has no trial, would differ.
    """
    return compiled("inductor")(query, key, value, layout.mask_on(query.device), scale)


def attend_to_mask(query: Tensor, key: Tensor, value: Tensor, mask: PackedMask, scale: float) -> Tensor:
    from torch.nn.attention.flex_attention import flex_attention

    options: Any = None
    if query.dtype is torch.float32:
        # In float32 the default kernel for head width 128 takes 115,328 bytes of shared memory on sm_120, and more on
        # sm_86 and sm_89, which have 101,376. With these options it takes at most 86,016 there, for widths up to 256.
        options = {"fwd_BLOCK_M": 64, "fwd_num_stages": 1}
    attended: Any = flex_attention(
        query, key, value, block_mask=mask.for_row(query.shape[2]), scale=scale, enable_gqa=True, kernel_options=options
    )
    return attended


_TRIAL = SegmentLayout(starts=(0, 150, 270, 3 * BLOCK_SIZE), branch_ends=(3 * BLOCK_SIZE, 270, 3 * BLOCK_SIZE))
"""The layout of the trial before the first pass: a prompt with two branches, which begin and end inside blocks."""

PackedAttention = Callable[[Tensor, Tensor, Tensor, "PackedMask", float], Tensor]
"""A function of query, key, value, block mask and scale that returns what the query attends to."""


@cache
def compiled(backend: str | Callable[..., object]) -> PackedAttention:
    """Returns `attend_to_mask` compiled for rows of any number of whole blocks.

    The tokens are passed as blocks (1, heads, L / 128, 128, D), because for an arbitrary length the kernels would
    compare each block with the row's end. The number of blocks is a variable from the first call on, so that no later
    row is compiled again, between a pass and its recomputation least of all. The kernel templates need a constant
    scale, which `dynamic=True` or two models of different scales would make a variable without `specialize_float`.
    Beyond the recompilation limit, or if compilation fails, the compiler would fall back to a dense computation;
    `fullgraph` makes that an error.
    """

    def attend_blocks(query: Tensor, key: Tensor, value: Tensor, mask: PackedMask, scale: float) -> Tensor:
        query_tokens = query.flatten(2, 3)  # (1, heads, L, D)
        key_tokens = key.flatten(2, 3)
        value_tokens = value.flatten(2, 3)
        return attend_to_mask(query_tokens, key_tokens, value_tokens, mask, scale)

    compiled_attention: Any = torch.compile(attend_blocks, fullgraph=True, backend=backend)

    def attend(query: Tensor, key: Tensor, value: Tensor, mask: PackedMask, scale: float) -> Tensor:
        blocks = (-1, BLOCK_SIZE)
        query_blocks = query.unflatten(2, blocks)  # (1, heads, L / 128, 128, D)
        key_blocks = key.unflatten(2, blocks)
        value_blocks = value.unflatten(2, blocks)
        for tensor in (query_blocks, key_blocks, value_blocks):
            torch._dynamo.maybe_mark_dynamic(tensor, 2)
        with torch._dynamo.config.patch(specialize_float=True, recompile_limit=64):
            return compiled_attention(query_blocks, key_blocks, value_blocks, mask, scale)

    return attend


def require_packed_attention(decoder: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Compiles packed attention for the sizes of the decoder's attention layers, before the first pass.

    Raises:
        EngineError: the compiler cannot build the kernels of both directions for this device, or they compute something
            else.
    """
    for module in decoder.modules():
        sizes = _sizes_of_attention(module)
        if sizes is not None:
            _require_gradients(device, dtype, *sizes)


class _AttentionSizes(NamedTuple):
    heads: int
    key_heads: int
    width: int
    scale: float


def _sizes_of_attention(module: Any) -> _AttentionSizes | None:
    """Returns the sizes of one of transformers' attention layers; None for other modules."""
    if not (hasattr(module, "head_dim") and hasattr(module, "scaling") and hasattr(module, "config")):
        return None
    config = module.config
    key_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return _AttentionSizes(config.num_attention_heads, key_heads, module.head_dim, module.scaling)


@cache
def _require_gradients(
    device: torch.device, dtype: torch.dtype, heads: int, key_heads: int, width: int, scale: float
) -> None:
    """Compares output and gradients on three blocks with `attend_by_parts` in float64, before the first update.

    A kernel that is too large for the device fails here, and one that computes something else is found.
    """
    draw = torch.Generator().manual_seed(0)
    inputs: list[Tensor] = []
    for number_of_heads in (heads, key_heads, key_heads):
        tokens = torch.randn(1, number_of_heads, _TRIAL.num_tokens, width, generator=draw)
        inputs.append(tokens.to(dtype))

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return compiled("inductor")(query, key, value, packed_mask(_TRIAL, device), scale)

    def attend_exactly(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return attend_by_parts(query, key, value, _TRIAL, scale)

    try:
        computed = _with_gradients(attend, inputs, device, dtype)
    except RuntimeError as error:  # a kernel that this device, driver or torch build cannot run
        raise _cannot_pack(f"{type(error).__name__}: {error}") from error
    expected = _with_gradients(attend_exactly, inputs, torch.device("cpu"), torch.float64)
    for name, tensor, reference in zip(("output", "query", "key", "value"), computed, expected, strict=True):
        gap = float((tensor.cpu() - reference).norm() / reference.norm())
        if not gap <= _LARGEST_GAP[dtype]:  # also if it is no number
            what = "attention" if name == "output" else f"attention's gradient of the {name}"
            raise _cannot_pack(f"{what} differs by {gap:.1e} of its norm from that in float64")


def _with_gradients(
    attend: Callable[[Tensor, Tensor, Tensor], Tensor], inputs: list[Tensor], device: torch.device, dtype: torch.dtype
) -> list[Tensor]:
    """Returns what queries attend to, and the gradients of its sum in queries, keys and values."""
    query, key, value = (tensor.to(device, dtype).requires_grad_() for tensor in inputs)
    attended = attend(query, key, value)
    return [attended.detach(), *torch.autograd.grad(attended.sum(), [query, key, value])]


def _cannot_pack(reason: str) -> EngineError:
    return EngineError(
        f"packed rows cannot be computed here ({reason}); set worker.actor.padding_free=false, and "
        "worker.critic.padding_free=false for a method with a critic"
    )


class PackedMask(NamedTuple):
    """The tensors of FlexAttention's mask, whose numbers of blocks a compiler can treat as variables, unlike the integers
    in a `BlockMask`. Counts are (1, 1, Q) and indices (1, 1, Q, K), from each block of queries or, in `q_`, of keys.
    """

    branch_end: Tensor  # (L,) of each token, with L in whole blocks
    kv_num_blocks: Tensor
    kv_indices: Tensor
    full_kv_num_blocks: Tensor
    full_kv_indices: Tensor
    q_num_blocks: Tensor
    q_indices: Tensor
    full_q_num_blocks: Tensor
    full_q_indices: Tensor

    def for_row(self, num_tokens: int) -> BlockMask:
        """Returns the mask of a row of so many tokens, which a compiled function calls itself."""
        from torch.nn.attention.flex_attention import BlockMask

        branch_end, *tables = self

        def sees_token(batch: Tensor, head: Tensor, query_index: Tensor, key_index: Tensor) -> Tensor:
            return (key_index <= query_index) & (query_index < branch_end[key_index])

        return BlockMask((num_tokens, num_tokens), *tables, (BLOCK_SIZE, BLOCK_SIZE), sees_token)  # pyright: ignore[reportCallIssue]


def packed_mask(layout: SegmentLayout, device: torch.device) -> PackedMask:
    """Builds the mask in which a token sees itself and the earlier tokens whose branch it belongs to.

    The kind of each pair of blocks follows from the smallest and largest branch end in the block of keys.
    """
    ends = layout.branch_end_of_token  # (L,)
    num_blocks = -(-layout.num_tokens // BLOCK_SIZE)  # rounded up
    num_padding = num_blocks * BLOCK_SIZE - layout.num_tokens
    padded_ends = torch.cat([ends, ends.new_full((num_padding,), num_blocks * BLOCK_SIZE)])
    ends_by_block = padded_ends.view(num_blocks, BLOCK_SIZE)
    first_query = torch.arange(num_blocks)[:, None] * BLOCK_SIZE  # (query blocks, 1)
    # (query blocks, key blocks): whether some pair of tokens is visible, and whether every pair is
    some = (ends_by_block.amax(dim=1) > first_query).tril()
    every = (ends_by_block.amin(dim=1) >= first_query + BLOCK_SIZE).tril(diagonal=-1)
    partial = some & ~every
    tables: list[Tensor] = []
    for table in (partial, every, partial.mT, every.mT):
        tables += _listed(table)
    on_device = [to_device(tensor, device) for tensor in (padded_ends.int(), *tables)]
    for tensor in on_device:
        for axis, size in enumerate(tensor.shape):
            if size > 1:
                torch._dynamo.maybe_mark_dynamic(tensor, axis)
    return PackedMask(*on_device)


def _listed(table: Bool[Tensor, "Q K"]) -> tuple[Tensor, Tensor]:
    """Returns for each row the number of set entries, and the columns with set entries first."""
    counts = table.sum(dim=1)
    columns = table.int().argsort(dim=1, descending=True, stable=True)
    # FlexAttention's tables have axes for batch and heads in front. Its kernels take a row of a table as contiguous, but
    # the columns of a transposed table come transposed: the gradients of keys and values would be those of other blocks.
    return counts[None, None].int(), columns[None, None].int().contiguous()
