from __future__ import annotations

from typing import Any

import pytest
import torch
from gpu_places import (
    GRADIENT_LIMITS,
    LOG_PROB_LIMITS,
    Place,
    build_actor,
    draw_adapter,
    gaps,
    gradient_of,
    rows_for,
    within,
)

from cepo.models.segments import SegmentLayout, attend_by_blocks, attend_by_parts, attend_to_mask, packed_mask


@pytest.mark.parametrize(
    ("size", "dtype", "compiles"),
    [("part", "fp32", "false"), ("part", "fp32", "true"), ("part", "bf16", "true"), ("whole", "bf16", "true")],
)
def test_packed_log_probs_and_gradients_are_the_padded_ones(
    place: Place, size: str, dtype: str, compiles: str, figure: Any
) -> None:
    shape = getattr(place, size)
    if size == "whole" and shape is place.part:
        pytest.skip("the trained size is that of parts")
    if place.device == "cpu":
        compiles = "false"  # tests/workers/test_compiled_layers.py
    folder = place.checkpoint(shape, dtype)
    packed = build_actor(folder, dtype=dtype, padding_free="true", model__compile_layers=compiles)
    padded = build_actor(folder, dtype=dtype, padding_free="false", model__compile_layers="false")
    for actor in (packed, padded):
        draw_adapter(actor)
    rows = rows_for(shape, folder)
    scores = packed.score(rows)
    padded_scores = padded.score(rows)
    differences = figure(f"{shape.name} {dtype} gap in nats: mean, 99th, largest", gaps(scores, padded_scores))
    assert (packed.passes.packed, padded.passes.packed) == (True, False), "the packed path gave way to padded rows"
    assert packed.tokens_computed < 0.7 * padded.tokens_computed
    assert within(differences, LOG_PROB_LIMITS[dtype])
    if dtype == "bf16":
        exact = build_actor(folder, dtype="fp32", padding_free="false", model__compile_layers="false")
        draw_adapter(exact)
        exact_scores = exact.score(rows)
        del exact
        error = figure(f"{shape.name} bf16, packed against float32", gaps(scores, exact_scores))
        usual_error = figure(f"{shape.name} bf16, padded against float32", gaps(padded_scores, exact_scores))
        assert within(error[:2], [1.25 * gap for gap in usual_error[:2]]), "packing adds to the rounding of bf16"
    first_group = rows[: shape.group_size]
    gradient = gradient_of(packed, first_group)
    expected = gradient_of(padded, first_group)
    assert float(expected.norm()) > 0
    distance = float((gradient - expected).norm() / expected.norm())
    assert figure(f"{shape.name} {dtype} gradient distance", distance) < GRADIENT_LIMITS[dtype]
    assert packed.passes.packed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_block_attention_is_that_of_attention_by_parts(
    place: Place, width: int, dtype: torch.dtype, figure: Any
) -> None:
    """The case has 2 queries to a key."""
    # A prompt, two contexts, and two responses behind each; the last segment fills the row to 4 blocks of 128.
    layout = SegmentLayout(
        starts=(0, 150, 190, 260, 311, 350, 420, 490),
        branch_ends=(490, 311, 260, 311, 490, 420, 490),
    ).filled_to(128)
    draw = torch.Generator().manual_seed(0)
    shapes = [(1, heads, layout.num_tokens, width) for heads in (16, 8, 8)]
    inputs = [torch.randn(shape, generator=draw).to(dtype) for shape in shapes]
    expected_inputs = [tensor.double().requires_grad_() for tensor in inputs]
    expected = attend_by_parts(expected_inputs[0], expected_inputs[1], expected_inputs[2], layout, width**-0.5)
    with_gradient = place.device == "cuda"
    device_inputs = [tensor.to(place.device).requires_grad_(with_gradient) for tensor in inputs]
    if with_gradient:
        attended = attend_by_blocks(device_inputs[0], device_inputs[1], device_inputs[2], layout, width**-0.5)
    else:  # on a CPU FlexAttention has no gradient, and is not compiled for rows of any length
        mask = packed_mask(layout, device_inputs[0].device)
        attended = attend_to_mask(device_inputs[0], device_inputs[1], device_inputs[2], mask, width**-0.5)
    limit = 1e-4 if dtype is torch.float32 else 3e-2
    gap = float((attended.detach().cpu().double() - expected.detach()).abs().max())
    assert figure(f"attention gap, width {width}, {dtype}", gap) < limit
    if not with_gradient:
        return
    weight = torch.randn(expected.shape, generator=draw, dtype=torch.float64)
    expected_gradients = torch.autograd.grad((expected * weight).sum(), expected_inputs)
    gradients = torch.autograd.grad((attended * weight.to(attended)).sum(), device_inputs)
    for gradient, reference in zip(gradients, expected_gradients, strict=True):
        assert float((gradient.cpu().double() - reference).norm() / reference.norm()) < limit
