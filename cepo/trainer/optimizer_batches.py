"""Cuts a rollout batch into the batches of its optimizer steps."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from cepo.data.batch import CriticBatch, DistillationRows, OptimizerBatch
from cepo.losses.policy import LossDenominators
from cepo.trainer.rollouts import RolloutBatch
from cepo.types import TokenSignal


def actor_batches(
    batch: RolloutBatch, signal: TokenSignal, *, num_prompts: int, epochs: int, max_response_length: int
) -> list[OptimizerBatch]:
    """`num_prompts` prompts per optimizer step, `epochs` times over; rows without gradient only count."""
    parts = []
    for rows, denominators in _cuts(batch, num_prompts, max_response_length):
        live = rows[batch.live[rows]]
        reference = batch.reference_log_probs
        on_policy = bool(batch.on_policy[rows].all())
        parts.append(
            OptimizerBatch(
                rows=[batch.scoring_row(int(row)) for row in live],
                old_log_probs=(batch.sampled_log_probs if on_policy else batch.old_log_probs)[live],
                on_policy=on_policy,
                advantages=signal.advantages[live],
                response_mask=batch.response_mask[live],
                denominators=denominators,
                # Under a KL every row is live and scored, so that a row is its own place.
                reference_index=None if batch.reference_divergence is None else live.tolist(),
                reference_log_probs=None if reference is None else reference[live],
                distillation=_distillation_rows(batch, signal, live.tolist()),
            )
        )
    return parts * epochs


def critic_batches(
    batch: RolloutBatch, signal: TokenSignal, *, num_prompts: int, epochs: int, max_response_length: int
) -> list[CriticBatch]:
    """As `actor_batches`, for the critic: every row has a target."""
    assert batch.values is not None and signal.returns is not None, "a method with needs_values returns the targets"
    parts = [
        CriticBatch(
            rows=[batch.scoring_row(int(row)) for row in rows],
            old_values=batch.values[rows],
            returns=signal.returns[rows],
            response_mask=batch.response_mask[rows],
            denominators=denominators,
        )
        for rows, denominators in _cuts(batch, num_prompts, max_response_length)
    ]
    return parts * epochs


def _cuts(batch: RolloutBatch, num_prompts: int, max_response_length: int) -> Iterator[tuple[Tensor, LossDenominators]]:
    size = num_prompts * batch.group_size
    for rows in torch.arange(len(batch.generations)).split(size):
        yield (
            rows,
            LossDenominators(
                num_tokens=int(batch.response_mask[rows].sum()),
                num_sequences=len(rows),
                max_response_length=max_response_length,
            ),
        )


def _distillation_rows(batch: RolloutBatch, signal: TokenSignal, rows: list[int]) -> DistillationRows | None:
    if signal.distillation is None:
        return None
    return DistillationRows(
        divergence=signal.distillation.divergence,
        token_weight=signal.distillation.token_weight[rows],
        state_index=[batch.state_index.get(row, -1) for row in rows],
    )
