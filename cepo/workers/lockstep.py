"""Keeps ranks in lockstep: all run the same passes through the same blocks, so that no collective operation hangs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from cepo.data.batch import ScoringRow
from cepo.models.families import ImageReader
from cepo.models.inputs import EncodedPrompt, ImageInputs

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
