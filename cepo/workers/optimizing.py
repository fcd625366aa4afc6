"""Implements the optimizer step of the trained models: AdamW, also for bf16 weights, clipping and learning rate."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from cepo.config.schema import OptimConfig
from cepo.metrics import Metrics, max_value, mean_value, sum_value
from cepo.workers.distributed import on_first_rank, whole_tensor


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


def learning_rate_factor(step: int, optim: OptimConfig, total_steps: int) -> float:
    """Returns the learning rate at the 0-based training step as a factor of the peak learning rate.

    Warm-up: `(step + 1) / warmup`, so that the first step trains. Afterwards it is 1 (`constant`),
    `floor + (1 - floor) (1 + cos(pi p)) / 2` (`cosine`) or `floor + (1 - floor) (1 - p)` (`linear`), where p is the
    finished share of the steps after warm-up.
    """
    warmup = int(optim.lr_warmup_ratio * total_steps) if optim.lr_warmup_steps is None else optim.lr_warmup_steps
    if step < warmup:
        return (step + 1) / warmup
    if optim.lr_scheduler_type == "constant":
        return 1.0
    floor = optim.min_lr_ratio or 0.0
    progress = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    left = 1.0 - progress if optim.lr_scheduler_type == "linear" else (1.0 + math.cos(math.pi * progress)) / 2.0
    return floor + (1.0 - floor) * left


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


class CompensatedAdamW(Optimizer):
    """AdamW with Kahan-compensated updates and bf16 momentum.

        m <- b1 m + (1 - b1) g
        v <- b2 v + (1 - b2) g^2
        update = -lr (weight_decay w + (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps))
        c <- c + update;   w' = round(w + c);   c <- c - (w' - w);   w <- w'

    A bf16 weight has 8 significant bits, so adding an update below w / 512 changes nothing; `c` carries the rounding
    error to the next step. `m` and `c` are bf16. `v` is float32: its decay of 0.1 % per step is below the rounding of
    bf16, in which it would never decrease. Weights of a finer type are updated in that type, and `c` remains near 0.
    EasyR1's `adamw_bf16` keeps all states in bf16.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._update(weight, group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the state in the types in which it was saved; torch would cast it to the type of the weights."""
        super().load_state_dict(state_dict)
        saved = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        weights = chain.from_iterable(group["params"] for group in self.param_groups)
        for name, weight in zip(saved, weights, strict=True):
            for entry, value in state_dict["state"].get(name, {}).items():
                self.state[weight][entry] = value.to(device=self.state[weight][entry].device, copy=True)

    def _update(self, weight: Tensor, group: dict[str, Any]) -> None:
        state = cast("dict[str, Tensor]", self.state[weight])
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"] = torch.zeros_like(weight, dtype=torch.bfloat16)
            state["exp_avg_sq"] = torch.zeros_like(weight, dtype=torch.float32)
            state["compensation"] = torch.zeros_like(weight, dtype=torch.bfloat16)
        state["step"] += 1
        step, (beta1, beta2) = float(state["step"]), group["betas"]
        assert weight.grad is not None
        gradient = weight.grad.float()
        momentum = state["exp_avg"].float().lerp_(gradient, 1 - beta1)
        state["exp_avg"].copy_(momentum)
        state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        deviation = (state["exp_avg_sq"] / (1 - beta2**step)).sqrt_().add_(group["eps"])
        update = (momentum / (1 - beta1**step) / deviation).add_(weight, alpha=group["weight_decay"]).mul_(-group["lr"])
        wanted = update.add_(state["compensation"])
        before = weight.clone()
        weight.copy_(weight.float() + wanted)
        state["compensation"].copy_(wanted - (weight.float() - before.float()))
