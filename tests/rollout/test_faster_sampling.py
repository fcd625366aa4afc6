"""Speculation and FP8 weights of vLLM: what they change in responses, and what they must not change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from generator_cases import reference_logits, reference_model

from cepo.losses.importance import importance_weights
from cepo.rollout.generator import GenerationRequest


def rounded_to_fp8(model: Any) -> Any:
    """The model with the linear weights of its layers in e4m3, with one scale per weight matrix, as vLLM keeps them."""
    largest = torch.finfo(torch.float8_e4m3fn).max
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and ".layers." in name:
            scale = module.weight.abs().max() / largest
            module.weight.copy_((module.weight / scale).to(torch.float8_e4m3fn).float() * scale)
    return model


@torch.no_grad()
def test_truncated_weights_correct_for_fp8_sampling(requests: list[GenerationRequest], tiny_model_folder: Path) -> None:
    """Exact over the vocabulary: sum of P_engine(v) min(rho, 2) f(v) is the mean of f under the trainer.

    Without the weight it is off by more than a hundred times as much. rho stays below 2, so nothing is cut off.
    """
    response = [70, 71, 72, 73, 74, 75, 76, 77]
    exact: Any = reference_model(tiny_model_folder)
    trainer = reference_logits(exact, tiny_model_folder, requests[0], response).double().log_softmax(-1)
    rounded = rounded_to_fp8(exact)
    engine = reference_logits(rounded, tiny_model_folder, requests[0], response).double().log_softmax(-1)
    probs_of_trainer = trainer.exp()
    probs_of_engine = engine.exp()
    gap = (probs_of_engine * (trainer - engine).abs()).sum(-1).mean()
    assert 1e-4 < gap < 0.2
    rho = importance_weights(trainer, engine, kind="truncate", threshold=2.0)
    assert rho.max() < 2
    generator = torch.Generator().manual_seed(1)
    gains = torch.randn(trainer.shape, generator=generator, dtype=torch.float64)
    expected = (probs_of_trainer * gains).sum(-1)
    weighted = (probs_of_engine * rho * gains).sum(-1)
    unweighted = (probs_of_engine * gains).sum(-1)
    error = (weighted - expected).abs().mean()
    error_without_weight = (unweighted - expected).abs().mean()
    assert error < 1e-6 < error_without_weight / 100
