"""Implements the critic on one device: it predicts the value before each response token and is trained on returns."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cepo.config.schema import CriticConfig
from cepo.data.batch import CriticBatch, ScoringRow
from cepo.losses.objective import token_weights, value_loss, value_metrics
from cepo.metrics import Metrics, fraction, mean_value, merge_metrics
from cepo.models.processing import Processing
from cepo.progress import shown
from cepo.workers.distributed import data_parallel_mesh, on_first_rank, reshard, this_device
from cepo.workers.loading import build_value_model
from cepo.workers.optimizing import build_optimizer, clipped_step, set_learning_rate, zero_gradients
from cepo.workers.passes import Passes, RankPass
from cepo.workers.swapping import PhaseOffload


class Critic:
    """A separate value model under FSDP2, with all weights trained. Each rank has one and calls it like `Actor`.

    Args:
        config: `worker.critic` with its nulls resolved (`cepo.config.resolved_critic`).
        processing: the actor's, because the critic reads the same tokens.
        total_steps, longest_row: see `Actor`.
        seed: for the value head's initial weights.

    Raises:
        ConfigError: the model cannot be loaded, or its tokens differ from the actor's.
    """

    def __init__(
        self,
        config: CriticConfig,
        processing: Processing,
        *,
        total_steps: int,
        seed: int,
        longest_row: int | None = None,
    ) -> None:
        self._config, self._total_steps = config, total_steps
        self.device = this_device()
        mesh = data_parallel_mesh(config.fsdp.fsdp_size)
        self.module = build_value_model(config, processing, mesh=mesh, device=self.device, seed=seed)
        self.passes = Passes(config, processing, self.module, device=self.device, longest_row=longest_row)
        self.optimizer = build_optimizer(self.module, config.optim)
        self.offload = PhaseOffload(self.module, self.optimizer, config.offload, config.fsdp, self.device)

    @torch.no_grad()
    def values(self, rows: Sequence[ScoringRow]) -> list[Tensor]:
        """Returns each row's values before its response tokens, (response length,) float32 on the CPU."""
        self.offload.load_weights()
        self.module.eval()
        results: dict[int, Tensor] = {}
        for part in shown(self.passes.cut(rows, self._config.micro_batch_size_per_device_for_experience), "values"):
            lengths = [len(row.response_ids) for row in part.rows]
            values = self.module(self.passes.collate(part)).cpu().split(lengths)
            # Entries beyond the indices belong to the filler.
            results |= dict(zip(part.indices, values, strict=False))
        reshard(self.module)
        return [results[index] for index in range(len(rows))]

    def update(self, batches: Sequence[CriticBatch], *, step: int) -> Metrics:
        """Takes one optimizer step per batch at the learning rate of the 0-based training step."""
        learning_rate = set_learning_rate(self.optimizer, self._config.optim, step=step, total_steps=self._total_steps)
        self.offload.load_weights()
        self.offload.load_optimizer()
        parts = [self._optimizer_step(batch) for batch in batches]
        self.module.encoder.forget()
        self.offload.offload_optimizer()
        return merge_metrics([*parts, on_first_rank({"critic/lr": mean_value(learning_rate)})])

    def forget_gradients(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def rest(self) -> None:
        self.offload.offload_weights()

    def _optimizer_step(self, batch: CriticBatch) -> Metrics:
        self.module.train()
        zero_gradients(self.optimizer)
        weights = token_weights(batch.response_mask, self._config.loss_avg_mode, batch.denominators)
        size = self._config.micro_batch_size_per_device_for_update
        passes = shown(self.passes.cut(batch.rows, size), "updating the critic")
        parts = [self._accumulate_gradient(batch, weights, part) for part in passes]
        parts.append(clipped_step(self.optimizer, max_grad_norm=self._config.max_grad_norm, worker="critic"))
        return merge_metrics(parts)

    def _accumulate_gradient(self, batch: CriticBatch, weights: Tensor, part: RankPass) -> Metrics:
        indices = part.indices
        mask, old_values, returns, weight = (
            tensor[indices].to(self.device)
            for tensor in (batch.response_mask, batch.old_values, batch.returns, weights)
        )
        flat = self.module(self.passes.collate(part))
        if not indices:
            flat.sum().mul(0.0).backward()
            return {}
        values = torch.zeros_like(old_values).masked_scatter(mask, flat)
        clip = self._config.cliprange_value
        loss = (value_loss(values, old_values, returns, clip) * weight).sum()
        loss.backward()
        metrics = value_metrics(values.detach(), old_values, returns, mask, clip)
        # The weights of a batch's micro-batches sum to 1, so merging gives the mean loss of the optimizer steps.
        metrics["critic/vf_loss"] = fraction(float(loss.detach()), len(indices) / batch.denominators.num_sequences)
        return metrics
