"""CEPO's delta, a difference of two log-probs, in bf16: its rounding error with float32 logits and with rounded ones."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from generator_cases import open_generator, picture, request
from torch import Tensor
from training_runs import encoded, whole

from cepo.data.batch import ScoringRow
from cepo.models.processing import Processing
from cepo.rollout.generator import SamplingSettings
from cepo.workers.actor import Actor
from cepo.workers.scoring_model import collate

pytestmark = pytest.mark.heavy

QUESTION = "Find the area of the triangle."
HINTS = {"correct": "\nHere is a sample answer: 12", "wrong": "\nHere is a sample answer: 47"}
BuildActor = Callable[..., Actor]
Views = dict[str, list[ScoringRow]]


@pytest.fixture(scope="module")
def views(realistic_folder: Path, tiny_processing: Processing) -> Views:
    """Sampled responses behind each hint."""
    prompts = [request(tiny_processing, QUESTION, [picture(seed)], seed=seed) for seed in range(4)]
    with contextlib.closing(open_generator("transformers", realistic_folder, tiny_processing)) as generator:
        groups = generator.generate(prompts, SamplingSettings(num_samples=8, max_response_length=32, ignore_eos=True))
    found: Views = {}
    for name, hint in HINTS.items():
        contexts = [encoded(tiny_processing, QUESTION + hint, picture(seed)) for seed in range(4)]
        found[name] = [
            ScoringRow(context=context, response_ids=one.response_ids)
            for context, group in zip(contexts, groups, strict=True)
            for one in group
        ]
    return found


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
    build_actor: BuildActor, realistic_folder: Path, views: Views
) -> None:
    """The model is in bf16, with largest logits of 16 to 32."""
    errors: dict[bool, float] = {}
    for fp32_logits in (True, False):
        actor = build_actor(
            folder=realistic_folder, fsdp__mp_param_dtype="bf16", model__fp32_logits=str(fp32_logits).lower()
        )
        (right, exact_right, largest), (wrong, exact_wrong, _) = (scored(actor, views[name]) for name in HINTS)
        assert float(((largest > 16) & (largest < 32)).double().mean()) > 0.9
        delta, exact = right - wrong, exact_right - exact_wrong
        assert float(exact.square().mean().sqrt()) > 0.1, "the hints say something"
        errors[fp32_logits] = float((delta - exact).square().mean().sqrt())
    assert errors[False] > 0.02, "nats"
    assert errors[False] / errors[True] >= 5
