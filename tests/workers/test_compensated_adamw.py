"""AdamW on bf16 weights: against torch's, and where plain rounding would stop it."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from cepo.config.worker_schema import OptimConfig
from cepo.workers.training import CompensatedAdamW, build_optimizer


def trained(kind: type, start: Tensor, gradients: list[Tensor], **settings: float) -> Tensor:
    weight = nn.Parameter(start.clone())
    optimizer = kind([weight], **settings)
    for gradient in gradients:
        weight.grad = gradient.to(weight.dtype)
        optimizer.step()
    return weight.detach()


def gradients(count: int, size: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(size, generator=generator).bfloat16().float() for _ in range(count)]


def test_the_first_step_is_worked_out_by_hand() -> None:
    # m / (1 - b1) = g and v / (1 - b2) = g^2 after one step, so the update is -lr (0.5 * 2 + 1) = -0.2.
    weight = trained(CompensatedAdamW, torch.tensor([2.0]), [torch.tensor([3.0])], lr=0.1, weight_decay=0.5)
    assert float(weight) == pytest.approx(1.8, abs=1e-6)


def test_float32_weights_follow_torchs_adamw() -> None:
    """They follow it to the rounding of a bf16 momentum."""
    start = torch.linspace(-1, 1, 64)
    steps = gradients(50, 64)
    settings = {"lr": 1e-3, "weight_decay": 0.01}
    ours = trained(CompensatedAdamW, start, steps, **settings)
    theirs = trained(torch.optim.AdamW, start, steps, **settings)
    largest_difference = (ours - theirs).abs().max()
    assert largest_difference < 0.01 * (theirs - start).abs().max()


def test_tiny_updates_move_a_bf16_weight_as_in_float32() -> None:
    """The case has 400 updates of a thousandth of the rounding step."""
    start = torch.ones(8)
    steps = [torch.ones(8)] * 400
    settings = {"lr": 1e-5, "weight_decay": 0.0}
    exact = trained(torch.optim.AdamW, start, steps, **settings)
    rounded = trained(torch.optim.AdamW, start.bfloat16(), steps, **settings)
    ours = trained(CompensatedAdamW, start.bfloat16(), steps, **settings)
    assert (rounded == 1).all()
    assert float(exact[0]) == pytest.approx(1 - 400e-5, rel=1e-5)
    assert (ours.float() - exact).abs().max() <= 2**-9


def test_a_variance_falls_once_gradients_are_small() -> None:
    weight = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    optimizer = CompensatedAdamW([weight], lr=0.0)
    for gradient in [1.0, *[0.0] * 100]:
        weight.grad = torch.full((1,), gradient, dtype=torch.bfloat16)
        optimizer.step()
    assert float(optimizer.state[weight]["exp_avg_sq"]) == pytest.approx(1e-3 * 0.999**100, rel=1e-4)


def test_a_restored_state_takes_the_same_next_step() -> None:
    torch.manual_seed(3)
    module = nn.Linear(4, 4, bias=False).bfloat16()
    restored_module = nn.Linear(4, 4, bias=False).bfloat16()
    config = OptimConfig(lr=1e-4, strategy="adamw_bf16")
    optimizer = build_optimizer(module, config)
    restored = build_optimizer(restored_module, config)
    assert isinstance(optimizer, CompensatedAdamW)

    def step(module: nn.Linear, optimizer: torch.optim.Optimizer, seed: int) -> None:
        module.weight.grad = torch.randn(4, 4, generator=torch.Generator().manual_seed(seed)).bfloat16()
        optimizer.step()

    for seed in range(3):
        step(module, optimizer, seed)
    weights, states = copy.deepcopy(get_state_dict(module, optimizer))
    set_state_dict(restored_module, restored, model_state_dict=weights, optim_state_dict=states)
    saved_state = optimizer.state[module.weight]
    restored_state = restored.state[restored_module.weight]
    assert restored_state.keys() == saved_state.keys()
    for name, value in saved_state.items():
        assert restored_state[name].dtype == value.dtype, name
    step(module, optimizer, 9)
    step(restored_module, restored, 9)
    assert torch.equal(module.weight, restored_module.weight)
    assert torch.equal(saved_state["compensation"], restored_state["compensation"])
