"""Restricts, for any method, which tokens learn: none of cut responses, and only those with the highest entropy."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from cepo.config.algorithm_schema import AlgorithmConfig
from cepo.metrics import Metrics, mean_of
from cepo.trainer.asking import Rollouts
from cepo.types import TokenSignal


def finished_rows(rollouts: Rollouts) -> Tensor:
    """Returns (B,) True on rows whose response was not cut by the length limit."""
    return torch.tensor([generation.finished for generation in rollouts.generations])


def restricted(
    signal: TokenSignal, rollouts: Rollouts, live: Tensor, entropies: Tensor | None, algorithm: AlgorithmConfig
) -> TokenSignal:
    """Removes from the signal the tokens that `algorithm.overlong_filter` and `algorithm.top_entropy` exclude.

    `top_entropy` is the share to keep of the live rows' tokens: those drawn from the distributions with the highest
    entropy. Ties at the threshold are kept. Denominators of the loss still count all tokens. Sources: DAPO (Yu et al.
    2025) for cut responses; Wang et al. 2025 (arXiv 2506.01939) for entropy, who average over kept tokens alone.

    Args:
        live: (B,) True on rows that learn.
        entropies: (B, T) in nats; None without `top_entropy`.
    """
    kept = rollouts.response_mask
    metrics: Metrics = {}
    if algorithm.overlong_filter:
        kept = kept & finished_rows(rollouts).unsqueeze(1)
    if entropies is not None:
        learning = kept & live.unsqueeze(1)
        found = entropies[learning]
        if len(found):
            first = len(found) - max(1, round(algorithm.top_entropy * len(found)))
            kept = kept & (entropies >= found.sort().values[first])
        metrics = {
            "rollout/vocabulary_entropy": mean_of(entropies, learning),
            "rollout/learning_tokens": mean_of(kept.float(), learning),
        }
    distillation = signal.distillation
    if distillation is not None:
        distillation = dataclasses.replace(distillation, token_weight=distillation.token_weight.where(kept, 0.0))
    return dataclasses.replace(
        signal,
        advantages=signal.advantages.where(kept, 0.0),
        metrics={**signal.metrics, **metrics},
        distillation=distillation,
    )
