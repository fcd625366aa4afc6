"""Keeps ranks in lockstep: all run the same passes, so that no collective operation hangs, and reduce gradients together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from cepo.config.schema import FsdpConfig
from cepo.data.batch import ScoringRow
from cepo.errors import EngineError
from cepo.metrics import Metrics
from cepo.models.families import ImageReader
from cepo.models.inputs import EncodedPrompt, ImageInputs
from cepo.progress import shown

_ANY_TOKEN = 0
"""The token of fillers; every vocabulary has it."""


@dataclass(frozen=True, kw_only=True)
class RankPass:
    """This rank's part of a pass that all ranks run together.

    Attributes:
        indices: indices of its rows; may be empty.
        filler: an additional last row whose results are dropped and whose loss has weight 0; None if the rank's own
            rows use every block that other ranks use.
    """

    indices: list[int]
    filler: ScoringRow | None

    def rows(self, rows: Sequence[ScoringRow]) -> list[ScoringRow]:
        """Returns the rows of the pass, including the filler."""
        own = [rows[index] for index in self.indices]
        return own if self.filler is None else [*own, self.filler]


class Lockstep:
    """Makes all ranks agree on the passes of a call.

    FSDP gathers weights and reduces gradients of each block in every pass, so all ranks must take part. Each rank runs
    as many passes as the rank with the most. If any rank has images in a pass, all ranks run a sharded vision tower.

    Args:
        reader: the image reader; None for text models, or if each rank has the whole vision tower.
        device: the device of tensors that ranks exchange.
    """

    def __init__(self, *, reader: ImageReader | None, device: torch.device) -> None:
        self._device = device
        self._text = ScoringRow(context=_context((_ANY_TOKEN,), None), response_ids=(_ANY_TOKEN,))
        self._image: ScoringRow | None = None
        if reader is not None:
            token_ids, images = reader.smallest()
            context = _context((_ANY_TOKEN, *token_ids), images)
            self._image = ScoringRow(context=context, response_ids=(_ANY_TOKEN,))

    def passes(self, rows: Sequence[ScoringRow], micro_batches: Sequence[list[int]]) -> list[RankPass]:
        """Returns this rank's part of each pass. Collective: every rank must call it, also without rows."""
        (count,) = self._largest([len(micro_batches)])
        own = [*micro_batches, *([] for _ in range(count - len(micro_batches)))]
        if self._image is None:
            return [RankPass(indices=indices, filler=None if indices else self._text) for indices in own]
        seen = [any(rows[index].context.images is not None for index in indices) for indices in own]
        anywhere = self._largest([int(images) for images in seen])
        return [
            RankPass(indices=indices, filler=self._filler(bool(indices), here, bool(there)))
            for indices, here, there in zip(own, seen, anywhere, strict=True)
        ]

    def _filler(self, has_rows: bool, images_here: bool, images_anywhere: bool) -> ScoringRow | None:
        if images_anywhere and not images_here:
            return self._image
        return None if has_rows else self._text

    def _largest(self, values: list[int]) -> list[int]:
        tensor = torch.tensor(values, dtype=torch.long, device=self._device)
        if values:
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return tensor.tolist()


def _context(token_ids: tuple[int, ...], images: ImageInputs | None) -> EncodedPrompt:
    return EncodedPrompt(token_ids=token_ids, engine_ids=token_ids, images=images)


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
