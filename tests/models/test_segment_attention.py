"""Attention over packed segments against attention with the whole mask."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.nn.attention.flex_attention import BlockMask

from cepo.models.segments import SegmentLayout, attend_by_parts, attend_to_mask, compiled, packed_mask

FLEX = torch.ops.higher_order.flex_attention


def random_layout(seed: int, *, num_segments: int, longest: int) -> SegmentLayout:
    """A forest in depth-first order: each segment hangs below one of the last segment's ancestors, itself or none."""
    draw = random.Random(seed)
    parents = [-1]
    path = [0]
    for index in range(1, num_segments):
        path = path[: draw.randint(0, len(path))]
        parents.append(path[-1] if path else -1)
        path = [*path, index]
    starts = [0, *itertools.accumulate(draw.randint(1, longest) for _ in parents)]
    ends = starts[1:]
    for index in range(num_segments - 1, 0, -1):
        if parents[index] >= 0:
            ends[parents[index]] = max(ends[parents[index]], ends[index])
    return SegmentLayout(starts=tuple(starts), branch_ends=tuple(ends))


def whole_mask(layout: SegmentLayout) -> Tensor:
    """(L, L), from the definition alone: a token sees itself and what stands before it in its own or an ancestor's segment."""
    starts = torch.tensor(layout.starts)
    sizes = starts.diff()
    ancestors = (starts[:-1, None] < torch.tensor(layout.branch_ends)).tril()
    return ancestors.repeat_interleave(sizes, 0).repeat_interleave(sizes, 1).tril()


def tensors(layout: SegmentLayout, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = ((1, 6, layout.num_tokens, 8), (1, 2, layout.num_tokens, 8), (1, 2, layout.num_tokens, 8))
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def dense(query: Tensor, key: Tensor, value: Tensor, layout: SegmentLayout) -> Tensor:
    weights = query @ key.repeat_interleave(3, dim=1).transpose(2, 3) * 0.3
    weights = weights.masked_fill(~whole_mask(layout), float("-inf")).softmax(dim=3)
    return weights @ value.repeat_interleave(3, dim=1)


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 6e-2)])
@pytest.mark.parametrize("seed", range(4))
def test_attention_by_parts_is_that_of_the_whole_mask(seed: int, dtype: torch.dtype, limit: float) -> None:
    layout = random_layout(seed, num_segments=9, longest=12)
    query, key, value = tensors(layout, dtype)
    exact_inputs = [tensor.detach().double().requires_grad_() for tensor in (query, key, value)]
    exact_query, exact_key, exact_value = exact_inputs
    output = attend_by_parts(query, key, value, layout, 0.3)
    exact_output = dense(exact_query, exact_key, exact_value, layout)
    assert float((output - exact_output).detach().abs().max()) < limit

    generator = torch.Generator().manual_seed(5)
    weight = torch.randn(output.shape, generator=generator, dtype=torch.float64)
    loss = (output * weight.to(dtype)).sum()
    exact_loss = (exact_output * weight).sum()
    gradients = torch.autograd.grad(loss, (query, key, value))
    exact_gradients = torch.autograd.grad(exact_loss, exact_inputs)
    for gradient, exact_gradient in zip(gradients, exact_gradients, strict=True):
        relative_gap = (gradient - exact_gradient).norm() / exact_gradient.norm()
        assert float(relative_gap) < limit


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_the_packed_mask_shows_what_the_whole_mask_shows(seed: int) -> None:
    layout = random_layout(seed, num_segments=7, longest=150)
    mask = packed_mask(layout, torch.device("cpu"))
    assert mask.kv_num_blocks.shape[2] == -(-layout.num_tokens // 128) >= 3
    query, key, value = [tensor.detach() for tensor in tensors(layout, torch.float32)]
    attended = attend_to_mask(query, key, value, mask, 0.3)
    expected = dense(query, key, value, layout)
    assert float((attended - expected).abs().max()) < 1e-5


def seen_by_blocks(layout: SegmentLayout) -> tuple[Tensor, Tensor]:
    """(Q, K): whether any pair, and whether every pair of two blocks' tokens is visible, from the whole mask."""
    number = -(-layout.num_tokens // 128)
    beyond = (0, 128 * number - layout.num_tokens) * 2
    mask = whole_mask(layout)
    filled_with_false = torch.nn.functional.pad(mask, beyond, value=False)
    filled_with_true = torch.nn.functional.pad(mask, beyond, value=True)
    any_pair = filled_with_false.view(number, 128, number, 128).any(3).any(1)
    every_pair = filled_with_true.view(number, 128, number, 128).all(3).all(1)
    return any_pair, every_pair


@pytest.mark.parametrize(
    ("starts", "ends"),
    [
        # A branch that ends one token into a block, with a block's first token, right before it, and in its middle.
        ((0, 1, 129, 300), (300, 129, 300)),
        ((0, 127, 257, 385), (385, 257, 385)),
        ((0, 128, 256, 257, 384), (384, 256, 257, 384)),
        ((0, 100, 129, 255, 256, 383), (100, 256, 256, 256, 383)),
        ((0, 61, 250, 511, 640), (640, 511, 511, 640)),
    ],
)
def test_the_block_table_at_odd_starts_lists_visible_blocks(starts: tuple[int, ...], ends: tuple[int, ...]) -> None:
    layout = SegmentLayout(starts=starts, branch_ends=ends)
    mask = packed_mask(layout, torch.device("cpu")).for_row(layout.num_tokens)
    some, every = seen_by_blocks(layout)
    assert mask.full_kv_num_blocks is not None
    assert mask.full_kv_indices is not None
    partial = BlockMask.from_kv_blocks(mask.kv_num_blocks, mask.kv_indices).to_dense()[0, 0].bool()
    full = BlockMask.from_kv_blocks(mask.full_kv_num_blocks, mask.full_kv_indices).to_dense()[0, 0].bool()
    by_torch = BlockMask.from_kv_blocks(
        mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices
    )
    for name in ("q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices"):
        assert torch.equal(getattr(mask, name), getattr(by_torch, name)), name
        # FlexAttention's kernels add a column's number to the address of a row, whatever the tensor's strides.
        assert getattr(mask, name).stride() == getattr(by_torch, name).stride(), name
    assert not bool((partial & full).any())
    assert torch.equal(partial | full, some)
    below = torch.ones_like(some).tril(-1)
    below[-1] = False  # in the last row of blocks stands padding, which a full block would let see
    assert torch.equal(full & below, every & below)
    assert bool((every | ~full).all())


def test_a_layout_is_filled_by_one_segment_that_nobody_sees() -> None:
    layout = random_layout(1, num_segments=7, longest=40)
    filled = layout.filled_to(128)
    assert filled.num_tokens % 128 == 0
    assert 0 < filled.num_tokens - layout.num_tokens < 128
    mask = whole_mask(layout)
    filled_mask = whole_mask(filled)
    assert torch.equal(filled_mask[: layout.num_tokens, : layout.num_tokens], mask)
    assert not filled_mask[layout.num_tokens :, : layout.num_tokens].any()
    assert bool(filled_mask.diagonal().all())
    assert filled.filled_to(128) is filled


@pytest.mark.heavy
def test_compiled_attention_is_compiled_once_for_6_layouts() -> None:
    """Its scale and blocks are constants, and kernels in float32 take blocks that fit into a small card."""
    calls: list[torch.fx.Node] = []

    def counting(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        (call,) = [node for node in graph.graph.nodes if node.target is FLEX]
        calls.append(call)
        return graph

    attend = compiled(counting)
    with torch.no_grad():
        for seed, longest in enumerate((40, 90, 150, 60, 200, 120)):
            layout = random_layout(seed, num_segments=7, longest=longest).filled_to(128)
            assert layout.num_tokens > 128
            query, key, value = [tensor.detach() for tensor in tensors(layout, torch.float32)]
            mask = packed_mask(layout, torch.device("cpu"))
            attended = attend(query, key, value, mask, 0.3)
            expected = dense(query, key, value, layout)
            assert float((attended - expected).abs().max()) < 1e-5
        (of_all_layouts,) = calls
        length = of_all_layouts.args[0].meta["example_value"].shape[2]
        assert isinstance(length, torch.SymInt), "any number of blocks"
        assert statically_known_true(length % 128 == 0), "the kernels need no masks at a row's end"
        # Another model in the same process: half the heads, another width and scale.
        attend(query[:, :4, :, :4], key[..., :4], value[..., :4], mask, 0.7)
        attend(query.bfloat16(), key.bfloat16(), value.bfloat16(), mask, 0.3)

    of_all_layouts, of_other_model, in_bf16 = calls
    assert of_all_layouts.args[5] == 0.3
    assert of_other_model.args[5] == 0.7
    for in_float32 in (of_all_layouts, of_other_model):
        assert in_float32.args[4][-3:-1] == (128, 128)
        options = in_float32.args[6]
        assert options["fwd_BLOCK_M"] == 64, "little shared memory"
        assert options["fwd_num_stages"] == 1
    assert not {"fwd_BLOCK_M", "fwd_num_stages"} & in_bf16.args[6].keys()
