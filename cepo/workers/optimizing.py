"""Implements the optimizer step of the trained models: micro-batches, gradients, clipping and learning rate."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from cepo.config.schema import OptimConfig
from cepo.data.batch import ScoringRow
from cepo.metrics import Metrics, max_value, mean_value, sum_value
from cepo.workers.compensated_adamw import CompensatedAdamW
from cepo.workers.distributed import on_first_rank
from cepo.workers.gathering import whole_tensor


def build_optimizer(module: nn.Module, optim: OptimConfig) -> Optimizer:
    """Builds AdamW for the trained weights of `module`; `optim.strategy` selects the type of its state."""
    kind = CompensatedAdamW if optim.strategy == "adamw_bf16" else torch.optim.AdamW
    return kind(
        [parameter for parameter in module.parameters() if parameter.requires_grad],
        lr=optim.lr,
        betas=(optim.betas[0], optim.betas[1]),
        weight_decay=optim.weight_decay,
    )


def set_learning_rate(optimizer: Optimizer, optim: OptimConfig, *, step: int, total_steps: int) -> float:
    """Sets the optimizer's learning rate for the 0-based training step and returns it."""
    learning_rate = optim.lr * learning_rate_factor(step, optim, total_steps)
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    return learning_rate


def warmup_steps(optim: OptimConfig, total_steps: int) -> int:
    """Returns the number of warm-up steps: `lr_warmup_steps` if set, else `lr_warmup_ratio` of all steps."""
    if optim.lr_warmup_steps is not None:
        return optim.lr_warmup_steps
    return int(optim.lr_warmup_ratio * total_steps)


def learning_rate_factor(step: int, optim: OptimConfig, total_steps: int) -> float:
    """Returns the learning rate at the 0-based training step as a factor of the peak learning rate.

    Warm-up: `(step + 1) / warmup`, so that the first step trains. Afterwards it is 1 (`constant`),
    `floor + (1 - floor) (1 + cos(pi p)) / 2` (`cosine`) or `floor + (1 - floor) (1 - p)` (`linear`), where p is the
    finished share of the steps after warm-up.
    """
    warmup = warmup_steps(optim, total_steps)
    if step < warmup:
        return (step + 1) / warmup
    if optim.lr_scheduler_type == "constant":
        return 1.0
    floor = optim.min_lr_ratio or 0.0
    progress = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    left = 1.0 - progress if optim.lr_scheduler_type == "linear" else (1.0 + math.cos(math.pi * progress)) / 2.0
    return floor + (1.0 - floor) * left


def micro_batches(rows: Sequence[ScoringRow], size: int) -> list[list[int]]:
    """Returns micro-batches of `size` row indices, sorted by length so that little padding is needed."""
    order = sorted(range(len(rows)), key=lambda index: (-rows[index].num_tokens, index))
    return [order[start : start + size] for start in range(0, len(order), size)]


def zero_gradients(optimizer: Optimizer) -> None:
    """Sets every weight's gradient to zero, so that Adam has state for all weights from the first step on.

    Adam moves weights even on zero gradients. A batch without live rows, or without images for the vision tower, thus
    counts as a step, even directly after a resume, when no gradients exist yet.
    """
    for parameter in _weights(optimizer):
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        else:
            parameter.grad.zero_()


def clipped_step(optimizer: Optimizer, *, max_grad_norm: float, worker: str) -> Metrics:
    """Clips the gradient to `max_grad_norm` and steps the optimizer; a step with a non-finite gradient is skipped.

    The norm is that of the whole gradient, so either all ranks step or none.

    Returns:
        On rank 0, `<worker>/skipped_updates` and, unless skipped, `<worker>/grad_norm` (before clipping), its maximum
        and `<worker>/weight_norm` (after the step); nothing on other ranks.
    """
    norm = torch.nn.utils.clip_grad_norm_(_weights(optimizer), max_grad_norm)
    grad_norm = float(whole_tensor(norm))
    if not math.isfinite(grad_norm):
        return on_first_rank({f"{worker}/skipped_updates": sum_value(1.0)})
    optimizer.step()
    weight_norm = float(whole_tensor(torch.nn.utils.get_total_norm(_weights(optimizer))))
    return on_first_rank(
        {
            f"{worker}/weight_norm": mean_value(weight_norm),
            f"{worker}/grad_norm": mean_value(grad_norm),
            f"{worker}/grad_norm_max": max_value(grad_norm),
            f"{worker}/skipped_updates": sum_value(0.0),
        }
    )


def _weights(optimizer: Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
