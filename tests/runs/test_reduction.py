"""Gradients of several passes under FSDP2 with one process: held until the last pass, or reduced after each."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from cepo.config.schema import FsdpConfig
from cepo.metrics import Metrics
from cepo.workers.distributed import data_parallel_mesh, whole_tensor
from cepo.workers.passes import GradientReduction, RankPass

PASSES = [RankPass(indices=[index], rows=[]) for index in range(3)]


class Passes:
    """The loss of pass k is `(k + 1) sum(weight)`; notes the shard's gradient after each."""

    def __init__(self, *, once: bool, fails_at: int | None = None) -> None:
        self.module = nn.Linear(2, 1, bias=False)
        fully_shard(self.module, mesh=data_parallel_mesh(-1))
        self.reduction = GradientReduction(self.module, FsdpConfig(), has_adapter=True, same_blocks=True)
        assert not self.reduction.once  # with one rank there is nobody to wait for
        self.reduction.once = once
        self.fails_at = fails_at
        self.seen: list[float | None] = []

    def __call__(self, part: RankPass) -> Metrics:
        (index,) = part.indices
        if index == self.fails_at:
            raise ArithmeticError("no rows")
        self.module(torch.full((1, 2), index + 1.0)).sum().backward()
        self.seen.append(self.gradient())
        return {}

    def gradient(self) -> float | None:
        gradient: Tensor | None = self.module.weight.grad
        return None if gradient is None else float(whole_tensor(gradient)[0, 0])


@pytest.mark.parametrize(("once", "seen"), [(True, [None, None, 6.0]), (False, [1.0, 3.0, 6.0])])
def test_gradients_of_three_passes_reach_the_shard_summed(once: bool, seen: list[float | None]) -> None:
    """1, 2 and 3 give 6, with the last pass or one after the other."""
    passes = Passes(once=once)
    assert passes.reduction.over(PASSES, passes) == [{}, {}, {}]
    assert passes.seen == seen
    assert passes.reduction.over([], passes) == []
    passes.reduction.over(PASSES, passes)
    assert passes.gradient() == 12.0


def test_an_interrupted_update_that_holds_nothing_is_repeatable() -> None:
    passes = Passes(once=False, fails_at=1)
    with pytest.raises(ArithmeticError):
        passes.reduction.over(PASSES, passes)
    assert passes.gradient() == 1.0
    passes.module.zero_grad()
    passes.fails_at = None
    passes.reduction.over(PASSES, passes)
    assert passes.gradient() == 6.0
