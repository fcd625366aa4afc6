"""The learning rate as a function of the training step."""

from __future__ import annotations

import math

from cepo.config.schema import OptimConfig


def warmup_steps(optim: OptimConfig, total_steps: int) -> int:
    """Warm-up steps: the absolute number if given, else the share of all steps."""
    if optim.lr_warmup_steps is not None:
        return optim.lr_warmup_steps
    return int(optim.lr_warmup_ratio * total_steps)


def learning_rate_factor(step: int, optim: OptimConfig, total_steps: int) -> float:
    """Share of the peak learning rate at the 0-based training step.

    Warm-up: `(step + 1) / warmup`, so that the first step trains. Then 1 (`constant`), `floor + (1 - floor) (1 + cos(pi p)) / 2`
    (`cosine`) or `floor + (1 - floor) (1 - p)` (`linear`) with p the share of the remaining steps that is done.
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
