"""Implements AdamW with Kahan compensation for bf16 weights, whose rounding would lose most updates."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer


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
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Updates every weight that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._update(weight, group)
        return loss

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
