"""Packs rows into one row of segments without padding, in which shared tokens and images occur only once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cepo.data.batch import ScoringRow
from cepo.models.positions import sequence_positions
from cepo.models.processing import Processing
from cepo.models.segments import BLOCK_SIZE, SegmentLayout
from cepo.workers.forest import TokenForest, TokenRow, pack_rows, plan_forest
from cepo.workers.scoring_model import CollatedRows, DistinctImages


def forest_of(rows: Sequence[ScoringRow], processing: Processing) -> TokenForest:
    """Plans the forest of tokens that the rows share. Images are compared by content."""
    kinds = (processing.image_token_id, processing.video_token_id)
    placeholders = tuple(token for token in kinds if token is not None)
    return plan_forest(
        [
            TokenRow(
                context=row.context.token_ids,
                response=row.response_ids,
                images=None if row.context.images is None else row.context.images.content_key,
            )
            for row in rows
        ],
        placeholders=placeholders,
    )


def packs(rows: Sequence[ScoringRow], *, processing: Processing, budget: int) -> list[list[int]]:
    """Returns the row indices of passes of at most `budget` computed tokens."""
    return pack_rows(forest_of(rows, processing), budget=budget)


def collate_packed(
    rows: Sequence[ScoringRow], *, processing: Processing, device: torch.device, multiple_of: int | None = None
) -> CollatedRows:
    """Collates the rows' forest into one packed row on `device`.

    Tokens keep the position ids that they have in their own rows.

    Args:
        multiple_of: the row's length is padded to a multiple of this. The default is the attention's block size on
            GPUs, so that kernels get whole blocks, and 1 on CPUs.
    """
    forest = forest_of(rows, processing)
    layout = _layout(forest).filled_to(multiple_of or (1 if device.type == "cpu" else BLOCK_SIZE))
    token_ids: list[int] = []
    positions: list[Tensor] = []
    images = DistinctImages()
    order: list[int] = []
    known: dict[int, Tensor] = {}
    for segment in forest.segments:
        row = rows[segment.row]
        context = row.context
        token_ids += (*context.token_ids, *row.response_ids)[segment.start : segment.stop]
        if id(context) not in known:
            known[id(context)] = processing.positions(context)
        whole = sequence_positions(known[id(context)], len(row.response_ids))
        positions.append(whole[:, segment.start : segment.stop])
        if context.images is not None and segment.start < len(context.token_ids):
            first = images.first(context.images)
            assert processing.images is not None, "images were read"
            inside = processing.images.units_inside(context.token_ids, context.images, segment.start, segment.stop)
            order.extend(first + index for index in inside)
    missing = layout.num_tokens - len(token_ids)
    token_ids += [processing.pad_token_id] * missing
    positions.append(torch.zeros(3, missing, dtype=torch.long))
    return CollatedRows(
        input_ids=torch.tensor(token_ids).unsqueeze(0).to(device),
        position_ids=torch.cat(positions, dim=1).unsqueeze(1).to(device),
        response_index=_response_index(rows, forest, layout).to(device),
        targets=torch.tensor([token for row in rows for token in row.response_ids]).to(device),
        images=images if order else None,
        image_order=tuple(order),
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
    places: list[Tensor] = []
    for row, end, leaf in zip(rows, forest.context_ends, forest.leaves, strict=True):
        places.append(torch.tensor([layout.starts[end + 1] - 1]))
        if leaf >= 0:
            places.append(torch.arange(layout.starts[leaf], layout.starts[leaf] + len(row.response_ids) - 1))
    return torch.cat(places)
