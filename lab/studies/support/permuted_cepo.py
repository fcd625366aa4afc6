"""Registers a control of the study: cepo's weights on other tokens (`algorithm.adv_estimator=permuted_cepo`)."""

from __future__ import annotations

import dataclasses

import torch

from cepo.algorithms import register_estimator
from cepo.algorithms.cepo import Cepo
from cepo.types import TokenBatch, TokenSignal


@register_estimator("permuted_cepo")
class PermutedCepo(Cepo):
    """cepo's advantages, permuted at random within each response, with another permutation for each step and row."""

    def signal(self, batch: TokenBatch, *, step: int) -> TokenSignal:
        signal = super().signal(batch, step=step)
        assert signal.advantages is not None
        advantages, drawn = signal.advantages.clone(), torch.Generator().manual_seed(step)
        for row, mask in enumerate(batch.response_mask):
            own = advantages[row, mask]
            advantages[row, mask] = own[torch.randperm(len(own), generator=drawn)]
        return dataclasses.replace(signal, advantages=advantages)
