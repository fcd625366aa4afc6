"""Schedules the reduction of gradients over ranks: after every pass or once per optimizer step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from cepo.config.schema import FsdpConfig
from cepo.errors import EngineError
from cepo.metrics import Metrics
from cepo.progress import shown
from cepo.workers.lockstep import RankPass


class GradientReduction:
    """Runs the passes of an optimizer step, and has FSDP reduce gradients after every pass or only after the last.

    In both cases the shards get the sum over ranks and passes; only the order of its terms differs.

    Args:
        module: the sharded model.
        fsdp: its FSDP settings.
        has_adapter: whether only an adapter is trained.
        same_blocks: whether every pass uses all trained weights.

    Attributes:
        once: whether each rank first sums its own passes, and the last pass reduces these sums over ranks.
    """

    def __init__(self, module: nn.Module, fsdp: FsdpConfig, *, has_adapter: bool, same_blocks: bool) -> None:
        assert isinstance(module, FSDPModule), "gradients are reduced by FSDP"
        self._module = module
        # With `once`, a rank holds unsharded gradients of all trained weights until the last pass. For an adapter they
        # are small; for all weights they would undo the sharding. FSDP then sums passes in the reduce type, of which a
        # 16-bit type loses small terms, instead of the shards' type. It fails on blocks that no pass used, and on
        # weights that only the last pass uses.
        self.once = has_adapter and same_blocks and fsdp.mp_reduce_dtype == "fp32" and dist.get_world_size() > 1
        self._holds = False

    def over(self, passes: Sequence[RankPass], accumulate: Callable[[RankPass], Metrics]) -> list[Metrics]:
        """Calls `accumulate`, which runs a backward pass, for each of `passes`; afterwards the gradients are reduced.

        Raises:
            EngineError: an earlier call was interrupted, so FSDP holds gradients that the next reduction would add.
        """
        if self._holds:
            raise EngineError(
                "an earlier update was interrupted between its passes: its gradients are still in memory and would be "
                "added to those of the next update. Build a new worker, from the last checkpoint if there is one."
            )
        self._holds = self.once and len(passes) > 1
        metrics = []
        try:
            for number, part in enumerate(shown(passes, "updating"), start=1):
                self._module.set_requires_gradient_sync(not self.once or number == len(passes))
                metrics.append(accumulate(part))
        finally:
            self._module.set_requires_gradient_sync(True)
        self._holds = False
        return metrics
