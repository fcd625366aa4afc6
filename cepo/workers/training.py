"""Implements what policy and critic have in common: passes, the optimizer step, offloading between the phases of a step."""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Generic, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from cepo.config.worker_schema import OptimConfig
from cepo.data.batch import CriticBatch, OptimizerBatch
from cepo.losses.aggregation import token_weights
from cepo.metrics import Metrics, as_numbers, max_value, mean_value, merge_metrics, sum_value
from cepo.models.processing import Processing
from cepo.terminal.progress import shown
from cepo.workers.batching import RankPass
from cepo.workers.building import recompute_blocks
from cepo.workers.distributed import on_first_rank, whole_tensor
from cepo.workers.pass_sizes import PassSizes, agreed, resumed, sizes_of
from cepo.workers.scored_model import Config, Model, ScoredModel

logger = logging.getLogger(__name__)

Batch = TypeVar("Batch", OptimizerBatch, CriticBatch)


class TrainableModel(ScoredModel[Config, Model], ABC, Generic[Config, Model, Batch]):
    """A scored model that is also trained.

    Within a step, all rows of a prompt are on one rank. Updates and merged metrics equal those of one rank with all rows.
    """

    name: ClassVar[str]
    """The prefix of the metrics."""

    def __init__(
        self,
        config: Config,
        processing: Processing,
        module: Model,
        *,
        total_steps: int,
        longest_row: int | None,
        chosen: PassSizes | None = None,
    ) -> None:
        super().__init__(config, processing, module, longest_row=longest_row)
        self.make_passes(sizes_of(config) if chosen is None else agreed(sizes_of(config, chosen), self.device))
        self._total_steps = total_steps
        self.optimizer = build_optimizer(module, config.optim)
        offload = config.offload
        on_cpu = self.device.type == "cpu"
        by_blocks = config.fsdp.enable_cpu_offload  # FSDP itself moves the optimizer's state then
        self._moves_optimizer = offload.offload_optimizer and not on_cpu and not by_blocks
        if on_cpu and (offload.offload_params or offload.offload_optimizer or by_blocks):
            logger.warning("fsdp.enable_cpu_offload and offload.* have no effect: the device is the CPU")

    def make_passes(self, sizes: PassSizes) -> None:
        """Lets all later passes have these sizes."""
        self.pass_sizes = sizes
        if self._config.model.enable_gradient_checkpointing == "auto":
            recompute_blocks(self.module.model, recomputes=sizes.recomputes)

    def resume_passes(self, recorded: PassSizes) -> None:
        """Lets passes have the sizes that a checkpoint's had, where the settings leave them to the GPU's memory."""
        self.make_passes(sizes_of(self._config, resumed(recorded, self.pass_sizes)))

    def update(self, batches: Sequence[Batch], *, step: int) -> Metrics:
        """Takes one optimizer step per batch at the 0-based step's learning rate; denominators span all ranks."""
        optim = self._config.optim
        learning_rate = optim.lr * learning_rate_factor(step, optim, self._total_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.to_device(optimizer=True)
        parts = [self._optimizer_step(batch) for batch in batches]
        self.offload_optimizer()
        rate_metrics = {f"{self.name}/lr": mean_value(learning_rate)}
        return merge_metrics([*parts, on_first_rank(rate_metrics)])

    def forget_gradients(self) -> None:
        """Frees the gradients, so that they take no memory from the rollout engine."""
        self.optimizer.zero_grad(set_to_none=True)

    def to_device(self, *, optimizer: bool = False) -> None:
        """Loads what was offloaded: the weights and, if asked for, the optimizer's state. Call it before each use."""
        super().to_device()
        if optimizer and self._moves_optimizer:
            move_state(self.optimizer, self.device)

    def offload_optimizer(self) -> None:
        if self._moves_optimizer:
            move_state(self.optimizer, torch.device("cpu"))
            torch.cuda.empty_cache()

    def _accumulate(self, batch: Batch) -> list[Metrics]:
        """Computes the gradient of the batch's loss and leaves it in the weights' `grad`.

        Weights that no pass has reached get zeros, so that Adam has state for all weights from the first step on. Adam moves
        weights even on zero gradients: a batch without live rows, or without images for the vision tower, counts as a step.
        """
        self.module.train()
        self.forget_gradients()
        weights = token_weights(batch.response_mask, self._config.loss_avg_mode, batch.denominators)  # (B, T)
        passes = self.passes.cut(batch.rows, self.pass_sizes.update_rows)
        metrics: list[Metrics] = []
        for part in shown(passes, f"updating the {self.name}"):
            metrics.append(self._accumulate_gradient(batch, weights, part))
        for weight in weights_of(self.optimizer):
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
        return metrics

    @abstractmethod
    def _accumulate_gradient(self, batch: Batch, weights: Tensor, part: RankPass) -> Metrics:
        """Adds the gradient of a pass's share of the loss, with the token `weights` (B, T), to the weights' `grad`."""

    def _optimizer_step(self, batch: Batch) -> Metrics:
        """Clips the gradient and steps the optimizer; a step with a non-finite gradient is skipped.

        The norm is that of the whole gradient, so either all ranks step or none. On rank 0 the metrics have
        `skipped_updates` and, unless skipped, `grad_norm` (before clipping), its maximum, and `weight_norm` (after).
        """
        parts = self._accumulate(batch)
        weights = weights_of(self.optimizer)
        norm = torch.nn.utils.clip_grad_norm_(weights, self._config.max_grad_norm)
        grad_norm = float(whole_tensor(norm))
        is_finite = math.isfinite(grad_norm)
        metrics: Metrics = {f"{self.name}/skipped_updates": sum_value(float(not is_finite))}
        if is_finite:
            self.optimizer.step()
            norm_after = torch.nn.utils.get_total_norm(weights)
            weight_norm = float(whole_tensor(norm_after))
            metrics[f"{self.name}/weight_norm"] = mean_value(weight_norm)
            metrics[f"{self.name}/grad_norm"] = mean_value(grad_norm)
            metrics[f"{self.name}/grad_norm_max"] = max_value(grad_norm)
        return merge_metrics([*as_numbers(parts), on_first_rank(metrics)])


def weights_of(optimizer: Optimizer) -> list[nn.Parameter]:
    weights: list[nn.Parameter] = []
    for group in optimizer.param_groups:
        weights += group["params"]
    return weights


def move_state(optimizer: Optimizer, device: torch.device) -> None:
    """Moves Adam's moments to `device`, but not the step count."""
    for state in optimizer.state.values():
        for name, value in state.items():
            is_moment = isinstance(value, DTensor) or (isinstance(value, torch.Tensor) and value.dim() > 0)
            if is_moment:
                moved: Any = value.to(device)
                state[name] = moved


def build_optimizer(module: nn.Module, optim: OptimConfig) -> Optimizer:
    """Builds AdamW for the trained weights of `module`; `optim.strategy` selects the type of its state."""
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    betas = (optim.betas[0], optim.betas[1])
    if optim.strategy == "adamw_bf16":
        return CompensatedAdamW(trained, lr=optim.lr, betas=betas, weight_decay=optim.weight_decay)
    # Left to itself, torch steps sharded weights one by one: nine kernels for each of an adapter's 392 at 2B.
    return torch.optim.AdamW(trained, lr=optim.lr, betas=betas, weight_decay=optim.weight_decay, foreach=True)


def learning_rate_factor(step: int, optim: OptimConfig, total_steps: int) -> float:
    """Returns the learning rate at the 0-based training step as a factor of the peak learning rate.

    Warm-up: `(step + 1) / warmup`, so that the first step trains. Afterwards it is 1 (`constant`),
    `floor + (1 - floor) (1 + cos(pi p)) / 2` (`cosine`) or `floor + (1 - floor) (1 - p)` (`linear`), where p is the
    finished share of the steps after warm-up.
    """
    warmup = optim.lr_warmup_steps
    if warmup is None:
        warmup = int(optim.lr_warmup_ratio * total_steps)
    if step < warmup:
        return (step + 1) / warmup
    if optim.lr_scheduler_type == "constant":
        return 1.0
    floor = optim.min_lr_ratio or 0.0
    progress = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    above_floor = 1.0 - progress
    if optim.lr_scheduler_type == "cosine":
        above_floor = (1.0 + math.cos(math.pi * progress)) / 2.0
    return floor + (1.0 - floor) * above_floor


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
        saved_names: list[int] = []
        for saved_group in state_dict["param_groups"]:
            saved_names += saved_group["params"]
        for name, weight in zip(saved_names, weights_of(self), strict=True):
            state = self.state[weight]
            saved_state = state_dict["state"].get(name, {})
            for entry, value in saved_state.items():
                state[entry] = value.to(device=state[entry].device, copy=True)

    def _update(self, weight: Tensor, group: dict[str, Any]) -> None:
        state = cast("dict[str, Tensor]", self.state[weight])
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"] = torch.zeros_like(weight, dtype=torch.bfloat16)
            state["exp_avg_sq"] = torch.zeros_like(weight, dtype=torch.float32)
            state["compensation"] = torch.zeros_like(weight, dtype=torch.bfloat16)
        state["step"] += 1
        step = float(state["step"])
        beta1, beta2 = group["betas"]
        assert weight.grad is not None
        gradient = weight.grad.float()

        momentum = state["exp_avg"].float().lerp_(gradient, 1 - beta1)
        state["exp_avg"].copy_(momentum)
        mean_square = state["exp_avg_sq"]
        mean_square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        # Both averages begin at 0, from which the divisors remove the bias.
        unbiased_momentum = momentum / (1 - beta1**step)
        unbiased_mean_square = mean_square / (1 - beta2**step)
        deviation = unbiased_mean_square.sqrt_().add_(group["eps"])
        update = unbiased_momentum / deviation
        update.add_(weight, alpha=group["weight_decay"])
        update.mul_(-group["lr"])

        # What the weight would change by, with the rounding errors of the steps before; the rest is carried on.
        exact_change = update.add_(state["compensation"])
        old_weight = weight.clone()
        weight.copy_(weight.float() + exact_change)
        rounded_change = weight.float() - old_weight.float()
        state["compensation"].copy_(exact_change - rounded_change)
