"""Implements the critic on one device: it is scored and updated."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cepo.config.worker_schema import CriticConfig
from cepo.data.batch import CriticBatch, ScoringRow
from cepo.losses.value import value_loss, value_metrics
from cepo.metrics import Metrics, fraction
from cepo.models.processing import Processing
from cepo.models.without_waiting import to_device
from cepo.workers.batching import RankPass
from cepo.workers.building import build_value_model
from cepo.workers.pass_sizes import PassSizes
from cepo.workers.scoring_model import ValueModel
from cepo.workers.training import TrainableModel


class Critic(TrainableModel[CriticConfig, ValueModel, CriticBatch]):
    """A separate value model, with all weights trained. It reads the actor's tokens, with the actor's `processing`.

    Raises:
        ConfigError: the model cannot be loaded, or its tokens differ from the actor's.
    """

    name = "critic"

    def __init__(
        self,
        config: CriticConfig,
        processing: Processing,
        *,
        total_steps: int,
        seed: int,
        longest_row: int | None = None,
        chosen: PassSizes | None = None,
    ) -> None:
        module = build_value_model(config, processing, seed=seed)
        super().__init__(config, processing, module, total_steps=total_steps, longest_row=longest_row, chosen=chosen)

    @torch.no_grad()
    def values(self, rows: Sequence[ScoringRow]) -> list[Tensor]:
        """Returns each row's values before its response tokens, (response length,) float32 on the CPU."""
        self.begin_scoring()
        return self.results(rows, lambda part: self.module(self.collate(part)))

    def update(self, batches: Sequence[CriticBatch], *, step: int) -> Metrics:
        metrics = super().update(batches, step=step)
        self.module.encoder.forget()
        return metrics

    def _accumulate_gradient(self, batch: CriticBatch, weights: Tensor, part: RankPass) -> Metrics:
        flat_values = self.module(self.collate(part))  # (N,)
        if not part.indices:
            flat_values.sum().mul(0.0).backward()  # a filler's pass: the other ranks wait for its gradients
            return {}
        mask = to_device(batch.response_mask[part.indices], self.device)  # (B, T), like the three below
        old_values = to_device(batch.old_values[part.indices], self.device)
        returns = to_device(batch.returns[part.indices], self.device)
        token_weight = to_device(weights[part.indices], self.device)
        values = torch.zeros_like(old_values).masked_scatter(mask, flat_values)
        clip = self._config.cliprange_value
        token_losses = value_loss(values, old_values, returns, clip)
        loss = (token_losses * token_weight).sum()
        loss.backward()
        metrics = value_metrics(values.detach(), old_values, returns, mask, clip)
        # The weights of a batch's micro-batches sum to 1, so merging gives the mean loss of the optimizer steps.
        share_of_batch = len(part.indices) / batch.denominators.num_sequences
        metrics["critic/vf_loss"] = fraction(loss.detach(), share_of_batch)
        return metrics
