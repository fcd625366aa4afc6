"""Divides rows into passes that all ranks run together, and packs or pads the rows of a pass."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from cepo.config.schema import ActorConfig, CriticConfig
from cepo.data.batch import ScoringRow
from cepo.metrics import Metrics, fraction, max_value, sum_value
from cepo.models.families import ImageReader
from cepo.models.inputs import EncodedPrompt, ImageInputs
from cepo.models.processing import Processing
from cepo.models.segments import BLOCK_SIZE, SegmentLayout
from cepo.workers.forest import TokenForest, families, pack_rows, plan_forest
from cepo.workers.scoring_model import CollatedRows, ScoringModel, ValueModel, collate, collate_parts

logger = logging.getLogger(__name__)

_ANY_TOKEN = 0
"""The token of fillers; every vocabulary has it."""


@dataclass(frozen=True, kw_only=True)
class RankPass:
    """This rank's part of a pass that all ranks run together.

    Attributes:
        indices: indices of its rows in the call; may be empty.
        rows: these rows and, if the rank lacks rows or images that other ranks have, a filler, whose results are
            dropped and whose loss has weight 0.
        forest: the plan of packed rows; None if the rows are padded, or if there is a filler.
    """

    indices: list[int]
    rows: list[ScoringRow]
    forest: TokenForest | None = None


class Passes:
    """Divides rows into passes and collates the rows of a pass into tensors.

    FSDP gathers weights and reduces gradients of each block in every pass, so all ranks must take part. Each rank runs
    as many passes as the rank with the most. If any rank has images in a pass, all ranks run a sharded vision tower.

    Args:
        longest_row: number of tokens of the longest prompt and response together. With `dynamic_batching` a pass has at
            most the micro-batch size times this number of tokens. With None, the micro-batch size counts rows.

    Attributes:
        tokens_computed: tokens of all passes so far, including padding.
        tokens_asked: tokens of all rows in these passes, with shared tokens counted for each row.
    """

    def __init__(
        self,
        config: ActorConfig | CriticConfig,
        processing: Processing,
        module: ScoringModel | ValueModel,
        *,
        device: torch.device,
        longest_row: int | None,
    ) -> None:
        self._processing, self._device = processing, device
        self._longest_row = longest_row if config.dynamic_batching else None
        self.packed = config.padding_free and module.why_padded is None
        self.tokens_computed = self.tokens_asked = 0
        self._reported = (0, 0)
        # A rank with a whole vision tower runs it alone.
        self._text_filler, self._image_filler = _fillers(None if module.encoder.keeps else processing.images)
        if config.padding_free and module.why_padded is not None:
            logger.warning("padding_free is off for this run, and rows are padded: %s", module.why_padded)

    def cut(self, rows: Sequence[ScoringRow], size: int) -> list[RankPass]:
        """Divides `rows` into passes that are aligned with those of the other ranks. Collective, also without rows."""
        forest = forest_of(rows, self._processing) if self.packed else None
        own = self._own_passes(rows, forest, size)
        (count,) = self._largest([len(own)])
        own += [[] for _ in range(count - len(own))]
        images_here = [any(rows[index].context.images is not None for index in indices) for indices in own]
        images_anywhere = (
            images_here if self._image_filler is None else self._largest([int(has) for has in images_here])
        )
        passes: list[RankPass] = []
        for indices, here, anywhere in zip(own, images_here, images_anywhere, strict=True):
            filler = self._image_filler if anywhere and not here else None if indices else self._text_filler
            inside = [rows[index] for index in indices]
            if filler is None:
                passes.append(RankPass(indices=indices, rows=inside, forest=forest and forest.of_rows(indices)))
            else:
                passes.append(RankPass(indices=indices, rows=[*inside, filler]))
        return passes

    def _own_passes(self, rows: Sequence[ScoringRow], forest: TokenForest | None, size: int) -> list[list[int]]:
        if self._longest_row is not None:
            budget = size * self._longest_row
            return padded_batches(rows, budget) if forest is None else pack_rows(forest, budget=budget)
        order = by_length(rows) if forest is None else [row for family in families(forest) for row in family]
        return [order[start : start + size] for start in range(0, len(order), size)]

    def _largest(self, values: list[int]) -> list[int]:
        tensor = torch.tensor(values, dtype=torch.long, device=self._device)
        if values:
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return tensor.tolist()

    def collate(self, part: RankPass) -> CollatedRows:
        if self.packed:
            forest = part.forest or forest_of(part.rows, self._processing)
            batch = collate_packed(part.rows, forest, processing=self._processing, device=self._device)
        else:
            batch = collate(part.rows, processing=self._processing, device=self._device)
        self.tokens_computed += batch.input_ids.numel()
        self.tokens_asked += sum(row.num_tokens for row in part.rows)
        return batch

    def metrics(self) -> Metrics:
        """Returns the tokens computed since the last call (with padding; `_max`: over ranks), and the share saved."""
        computed, asked = self.tokens_computed - self._reported[0], self.tokens_asked - self._reported[1]
        self._reported = (self.tokens_computed, self.tokens_asked)
        return {
            "work/tokens_computed": sum_value(computed),
            "work/tokens_computed_max": max_value(computed),
            "work/tokens_saved": fraction(asked - computed, asked),
        }


def _fillers(reader: ImageReader | None) -> tuple[ScoringRow, ScoringRow | None]:
    """Returns rows of as few tokens as possible, without and with an image."""

    def filler(token_ids: tuple[int, ...], images: ImageInputs | None) -> ScoringRow:
        context = EncodedPrompt(token_ids=token_ids, engine_ids=token_ids, images=images)
        return ScoringRow(context=context, response_ids=(_ANY_TOKEN,))

    text = filler((_ANY_TOKEN,), None)
    if reader is None:
        return text, None
    token_ids, images = reader.smallest()
    return text, filler((_ANY_TOKEN, *token_ids), images)


def by_length(rows: Sequence[ScoringRow]) -> list[int]:
    """Returns the rows' indices, the longest row first, so that passes of neighbours need little padding."""
    return sorted(range(len(rows)), key=lambda index: (-rows[index].num_tokens, index))


def padded_batches(rows: Sequence[ScoringRow], budget: int) -> list[list[int]]:
    """Divides rows, the longest first, into batches of indices with at most `budget` tokens, including padding."""
    batches: list[list[int]] = []
    for index in by_length(rows):
        if batches and rows[batches[-1][0]].num_tokens * (len(batches[-1]) + 1) <= budget:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches


def forest_of(rows: Sequence[ScoringRow], processing: Processing) -> TokenForest:
    return plan_forest(rows, placeholders=(processing.image_token_id, processing.video_token_id))


def collate_packed(
    rows: Sequence[ScoringRow],
    forest: TokenForest,
    *,
    processing: Processing,
    device: torch.device,
    multiple_of: int | None = None,
) -> CollatedRows:
    """Collates the rows' forest into one packed row on `device`, in which shared tokens and images occur only once.

    Args:
        multiple_of: the row's length is padded to a multiple of this. The default is the attention's block size on
            GPUs, so that kernels get whole blocks, and 1 on CPUs.
    """
    layout = _layout(forest).filled_to(multiple_of or (1 if device.type == "cpu" else BLOCK_SIZE))
    segments = zip(forest.segments, layout.starts, strict=False)  # the layout may end with padding
    return collate_parts(
        rows,
        [(segment.row, segment.start, segment.stop, place) for segment, place in segments],
        _response_index(rows, forest, layout),
        shape=(1, layout.num_tokens),
        processing=processing,
        device=device,
        segments=layout,
    )


def _layout(forest: TokenForest) -> SegmentLayout:
    starts = [0]
    for segment in forest.segments:
        starts.append(starts[-1] + len(segment))
    return SegmentLayout(
        starts=tuple(starts),
        parents=tuple(segment.parent for segment in forest.segments),
        branch_ends=tuple(starts[index + 1 + segment.num_descendants] for index, segment in enumerate(forest.segments)),
    )


def _response_index(rows: Sequence[ScoringRow], forest: TokenForest, layout: SegmentLayout) -> Tensor:
    """Returns the indices of the hidden states before response tokens: the context's last, then the response's own."""
    found: list[Tensor] = []
    for row, end, leaf in zip(rows, forest.context_ends, forest.leaves, strict=True):
        found.append(torch.tensor([layout.starts[end + 1] - 1]))
        if leaf >= 0:
            found.append(torch.arange(layout.starts[leaf], layout.starts[leaf] + len(row.response_ids) - 1))
    return torch.cat(found)
