"""In bf16, with logits as large as in trained models: packed rows differ from padded ones by rounding alone, and the error of
CEPO's delta, a difference of two log-probs, with float32 logits and with rounded ones."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from generator_cases import open_generator, picture, request
from torch import Tensor
from training_runs import BuildActor, encoded, whole
from transformers import AttentionInterface

from cepo.data.batch import ScoringRow
from cepo.models.processing import Processing
from cepo.models.segments import ATTENTION_NAME, segment_attention
from cepo.rollout.generator import SamplingSettings
from cepo.workers.actor_critic import Actor
from cepo.workers.passes import forest_of
from cepo.workers.scoring_model import CollatedRows, collate

pytestmark = pytest.mark.heavy

QUESTION = "Find the area of the triangle."
HINTS = ("", "\nHere is a sample answer: 12", "\nHere is a sample answer: 47")
SEEDS = (1, 2)
"""Of the images."""


@pytest.fixture(scope="module")
def views(realistic_folder: Path, tiny_processing: Processing) -> list[list[ScoringRow]]:
    """Responses to the images, sampled from the plain context, behind it and behind each hint."""
    prompts = [request(tiny_processing, QUESTION, [picture(seed)], seed=seed) for seed in SEEDS]
    settings = SamplingSettings(num_samples=8, max_response_length=32, ignore_eos=True)
    with contextlib.closing(open_generator("transformers", realistic_folder, tiny_processing)) as generator:
        groups = generator.generate(prompts, settings)

    def behind(hint: str) -> list[ScoringRow]:
        contexts = [encoded(tiny_processing, QUESTION + hint, picture(seed)) for seed in SEEDS]
        pairs = zip(contexts, groups, strict=True)
        return [ScoringRow(context=one, response_ids=each.response_ids) for one, group in pairs for each in group]

    return [behind(hint) for hint in HINTS]


def position_that_is_one_too_high(batch: CollatedRows) -> CollatedRows:
    """Every response stands one position behind its place."""
    layout = batch.segments
    assert layout is not None
    positions = batch.position_ids.clone()
    for index, start in enumerate(layout.starts[:-1]):
        if layout.branch_ends[index] == layout.starts[index + 1]:
            positions[:, :, start : layout.starts[index + 1]] += 1
    return replace(batch, position_ids=positions)


def by_formula(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, *, scaling: float, **_: Any
) -> tuple[Tensor, None]:
    """Causal attention in float32, which rounds in other places than a kernel."""
    grouped = query.float().unflatten(1, (key.shape[1], -1))
    scores = grouped @ key.float().unsqueeze(2).mT * scaling
    later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    attended = scores.masked_fill(later, float("-inf")).softmax(dim=-1) @ value.float().unsqueeze(2)
    return attended.flatten(1, 2).to(query.dtype).transpose(1, 2).contiguous(), None


def size(gap: Tensor) -> Tensor:
    """(2) mean and 99th percentile in nats."""
    gap = gap.abs().double()
    return torch.stack([gap.mean(), gap.quantile(0.99)])


def padded_and_noise(actor: Actor, rows: list[ScoringRow], processing: Processing) -> tuple[Tensor, Tensor]:
    """Log-probs of padded rows, and the size of their difference from padded rows by the formula in another layout."""

    def padded(some: list[ScoringRow]) -> list[Tensor]:
        batch = collate(some, processing=processing, device=actor.device)
        return list(actor.module(batch)[0].split([len(row.response_ids) for row in some]))

    actor.module.eval()
    with torch.no_grad():
        whole = torch.cat(padded(rows))
        halves: list[Tensor] = [torch.empty(0)] * len(rows)
        AttentionInterface.register(ATTENTION_NAME, by_formula)
        try:
            halves[::2], halves[1::2] = padded(rows[::2]), padded(rows[1::2])
        finally:
            AttentionInterface.register(ATTENTION_NAME, segment_attention)
    return whole, size(torch.cat(halves) - whole)


@pytest.mark.parametrize("fp32_logits", ["true", "false"])
def test_packed_rows_differ_by_rounding_and_a_fault_by_more(
    build_actor: BuildActor,
    realistic_folder: Path,
    tiny_processing: Processing,
    views: list[list[ScoringRow]],
    fp32_logits: str,
) -> None:
    rows = [row for view in views for row in view]
    actor = build_actor(folder=realistic_folder, fsdp__mp_param_dtype="bf16", model__fp32_logits=fp32_logits)
    whole, noise = padded_and_noise(actor, rows, tiny_processing)
    assert 0 < float(noise[0]) < 0.2, "another layout rounds in other places"
    batch = collate(rows, forest_of(rows, tiny_processing), processing=tiny_processing, device=actor.device)
    with torch.no_grad():
        assert (size(actor.module(batch)[0] - whole) <= 3 * noise + 1e-3).all()
        found = size(actor.module(position_that_is_one_too_high(batch))[0] - whole)
        assert (found > 3 * noise + 1e-3).any()


def scored(actor: Actor, rows: list[ScoringRow]) -> tuple[Tensor, Tensor, Tensor]:
    """The log-probs, those in float64 of the same hidden states and weights, and the largest logits."""
    batch = collate(rows, processing=actor._processing, device=actor.device)
    with torch.no_grad():
        found, (hidden,) = actor.module(batch)
        weight = whole(actor.module.base.lm_head.weight).to(hidden.dtype)
        logits = hidden.double() @ weight.double().t()
    exact = logits.log_softmax(dim=1).gather(1, batch.targets[:, None])[:, 0]
    assert hidden.dtype is torch.bfloat16
    return found.double(), exact, logits.amax(dim=1)


def test_float32_logits_cut_the_error_of_delta_by_more_than_5(
    build_actor: BuildActor, realistic_folder: Path, views: list[list[ScoringRow]]
) -> None:
    """The model is in bf16, with largest logits of 16 to 32."""
    errors: dict[bool, float] = {}
    for fp32_logits in (True, False):
        actor = build_actor(
            folder=realistic_folder, fsdp__mp_param_dtype="bf16", model__fp32_logits=str(fp32_logits).lower()
        )
        (right, exact_right, largest), (wrong, exact_wrong, _) = (scored(actor, rows) for rows in views[1:])
        assert float(((largest > 16) & (largest < 32)).double().mean()) > 0.9
        delta, exact = right - wrong, exact_right - exact_wrong
        assert float(exact.square().mean().sqrt()) > 0.1, "the hints say something"
        errors[fp32_logits] = float((delta - exact).square().mean().sqrt())
    assert errors[False] > 0.02, "nats"
    assert errors[False] / errors[True] >= 5
