"""When the ranks' gradients are added up: after every pass, or once for all passes of an optimizer step."""

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
    """Makes the passes of an optimizer step, and has FSDP reduce their gradients no more often than it must.

    Either way the shards end up with the sum over ranks and passes; only the order of its terms differs.

    Args:
        module: the sharded model.
        fsdp: how it is sharded.
        has_adapter: whether an adapter is all that is trained.
        same_blocks: whether every pass runs through all trained weights.

    Attributes:
        once: whether a rank adds up its own passes first, and ranks add up those sums with the last pass.
    """

    def __init__(self, module: nn.Module, fsdp: FsdpConfig, *, has_adapter: bool, same_blocks: bool) -> None:
        assert isinstance(module, FSDPModule), "gradients are reduced by FSDP"
        self._module = module
        # Until the last pass a rank holds whole gradients of all that is trained: of an adapter they are a small share of the
        # weights, of all weights they would undo the sharding. FSDP adds up passes in the reduce type, where a 16-bit one
        # loses small terms, and without waiting in the type of the shards. It fails on a block that no pass has reached yet,
        # and on a reduction of which the last pass reaches some weights for the first time.
        self.once = has_adapter and same_blocks and fsdp.mp_reduce_dtype == "fp32" and dist.get_world_size() > 1
        self._holds = False

    def over(self, passes: Sequence[RankPass], accumulate: Callable[[RankPass], Metrics]) -> list[Metrics]:
        """`accumulate`, which runs a backward pass, for each of `passes`; afterwards the gradients are reduced.

        Raises:
            EngineError: an earlier call was interrupted. FSDP then holds gradients that the next reduction would add.
        """
        if self._holds:
            raise EngineError(
                "an earlier update was interrupted between its passes: its gradients are still held, and would be added to "
                "the next one's. Build the worker anew, from the last checkpoint if there is one."
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
