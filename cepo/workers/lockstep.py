"""Ranks in step: all make the same passes through the same blocks, whatever rows they have, so that no collective hangs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from cepo.data.batch import ScoringRow
from cepo.models.families import ImageReader
from cepo.models.inputs import EncodedPrompt, ImageInputs

_ANY_TOKEN = 0
"""Fillers are made of it; every vocabulary has it."""


@dataclass(frozen=True, kw_only=True)
class RankPass:
    """This rank's part of a pass that all ranks make together.

    Attributes:
        indices: its rows; may be empty.
        filler: a row behind them whose results are dropped and whose loss has weight 0; None where the rank's own rows run
            through every block that another rank runs through.
    """

    indices: list[int]
    filler: ScoringRow | None

    def rows(self, rows: Sequence[ScoringRow]) -> list[ScoringRow]:
        """What passes through the model."""
        own = [rows[index] for index in self.indices]
        return own if self.filler is None else [*own, self.filler]


class Lockstep:
    """Agrees over all ranks on the passes of a call.

    A pass gathers and reduces the weights of each block it runs through, which takes all ranks. So all ranks make as many
    passes as the one with most, and where any rank has images in a pass, every rank sends one through a sharded vision
    tower.

    Args:
        reader: of the model's images; None for text models, and where each rank has the whole vision tower.
        device: where the ranks' messages live.
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
        """One entry for each pass of the rank that has most. Collective: every rank calls it, also without rows."""
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
