"""Divides rows into passes, which are packed or padded, and checks that both forms give the same results."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from cepo.config.schema import ActorConfig, CriticConfig
from cepo.data.batch import ScoringRow
from cepo.metrics import Metrics, fraction, max_value, sum_value
from cepo.models.inputs import sequence_positions
from cepo.models.processing import Processing
from cepo.models.segments import BLOCK_SIZE, SegmentLayout, attention_by_formula
from cepo.workers.forest import TokenForest, TokenRow, families, pack_rows, plan_forest
from cepo.workers.lockstep import Lockstep, RankPass
from cepo.workers.optimizing import micro_batches
from cepo.workers.scoring_model import CollatedRows, DistinctImages, collate

logger = logging.getLogger(__name__)

ROWS_OF_A_CHECK = 8
"""Number of rows checked in each of two families of rows that share tokens."""

GAPS = ("mean", "99th percentile", "largest")
FLOAT32_LIMIT = 1e-4
"""Largest gap in nats between packed and padded rows that is allowed in float32."""

TIMES_THE_NOISE = 3.0
NOISE_MARGIN = 1e-3
"""Limits in 16-bit types: the mean and 99th percentile of the gaps may be `TIMES_THE_NOISE` times those of the rounding
noise, plus `NOISE_MARGIN` nats. The noise depends on model and device, so it is measured, as the gap between padded
rows and the same rows padded in another layout with another attention algorithm."""

COARSE_LIMIT = 0.2
"""Largest mean gap in nats that is allowed, however large the noise; a wrong mask causes more."""


class Passes:
    """Divides rows into passes and collates the rows of a pass into tensors.

    Args:
        config: `worker.actor` or `worker.critic`; each call gives the micro-batch size.
        lockstep: aligns the passes of all ranks.
        why_padded: the reason why the model cannot compute packed rows; None if it can.
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
        lockstep: Lockstep,
        *,
        device: torch.device,
        why_padded: str | None,
        longest_row: int | None,
    ) -> None:
        self._processing, self._lockstep, self._device = processing, lockstep, device
        self._longest_row = longest_row if config.dynamic_batching else None
        self._exact = config.fsdp.mp_param_dtype == "fp32"
        self.packed = config.padding_free
        self._checked = False
        self.tokens_computed = self.tokens_asked = 0
        self._reported = (0, 0)
        if self.packed and why_padded is not None:
            self._pad(why_padded)

    def cut(self, rows: Sequence[ScoringRow], size: int) -> list[RankPass]:
        """Divides `rows` into passes that are aligned with those of the other ranks. Collective."""
        return self._lockstep.passes(rows, self._own_passes(rows, size))

    def _own_passes(self, rows: Sequence[ScoringRow], size: int) -> list[list[int]]:
        if not rows:
            return []
        if self._longest_row is None:
            if not self.packed:
                return micro_batches(rows, size)
            order = [row for family in families(forest_of(rows, self._processing)) for row in family]
            return [order[start : start + size] for start in range(0, len(order), size)]
        budget = size * self._longest_row
        return packs(rows, processing=self._processing, budget=budget) if self.packed else padded_batches(rows, budget)

    def collate(self, rows: Sequence[ScoringRow]) -> CollatedRows:
        """Collates the rows of one pass into tensors on the device."""
        form = collate_packed if self.packed else collate
        batch = form(rows, processing=self._processing, device=self._device)
        self.tokens_computed += batch.input_ids.numel()
        self.tokens_asked += sum(row.num_tokens for row in rows)
        return batch

    @torch.no_grad()
    def check(self, rows: Sequence[ScoringRow], outputs: Callable[[CollatedRows], Tensor]) -> None:
        """Compares packed and padded rows once in a run; if they differ, all later passes use padded rows.

        Args:
            outputs: a forward pass that returns one number per response token, in nats.
        """
        if self._checked or not self.packed:
            return
        sample = self._sample(rows) if rows else []
        whole = self._lockstep.passes(rows, [sample] if sample else [])
        if not whole:  # no rank has rows
            return
        self._checked = True

        def numbers(parts: Sequence[RankPass], form: Callable[..., CollatedRows]) -> Tensor:
            found: dict[int, Tensor] = {}
            for part in parts:
                passing = part.rows(rows)
                values = outputs(form(passing, processing=self._processing, device=self._device)).double()
                found |= dict(zip(part.indices, values.split([len(row.response_ids) for row in passing]), strict=False))
            return torch.cat([found[index] for index in sample]) if sample else torch.zeros(1, device=self._device)

        try:
            packed = numbers(whole, collate_packed)
        except RuntimeError as error:  # a kernel that this device, driver or torch build cannot run
            self._pad(f"packed rows cannot be computed here: {type(error).__name__}: {error}")
            return
        padded = numbers(whole, collate)
        noise: Tensor | None = None
        if not self._exact:
            halves = [half for half in (sample[::2], sample[1::2]) if half]
            with attention_by_formula():
                noise = numbers(self._lockstep.passes(rows, halves), collate) - padded
        self._judge(packed - padded, noise)

    def metrics(self) -> Metrics:
        """Returns the tokens computed since the last call (with padding; `_max`: over ranks), and the share saved."""
        computed, asked = self.tokens_computed - self._reported[0], self.tokens_asked - self._reported[1]
        self._reported = (self.tokens_computed, self.tokens_asked)
        return {
            "work/tokens_computed": sum_value(computed),
            "work/tokens_computed_max": max_value(computed),
            "work/tokens_saved": fraction(asked - computed, asked),
        }

    def _sample(self, rows: Sequence[ScoringRow]) -> list[int]:
        """Returns rows spread over the contexts of the first two families."""
        sample: list[int] = []
        for family in families(forest_of(rows, self._processing))[:2]:
            sample += family[:: -(-len(family) // ROWS_OF_A_CHECK)]
        return sample

    def _judge(self, gaps: Tensor, noise: Tensor | None) -> None:
        found = _summary(gaps)
        of_noise = torch.zeros_like(found) if noise is None else _summary(noise)
        verdict = torch.cat([found, of_noise, (~_allowed(found, None if noise is None else of_noise)).double()])
        if dist.is_initialized() and dist.get_world_size() > 1:
            verdict = verdict.to(self._device)
            dist.all_reduce(verdict, op=dist.ReduceOp.MAX)
        *measured, fails = verdict.tolist()
        words = _in_words(measured[:3])
        if noise is None:
            words += f"; at most {FLOAT32_LIMIT:.0e} is allowed"
        else:
            words += f"; between two ways to compute padded rows: {_in_words(measured[3:])}"
        if not fails:
            logger.info("packed and padded rows agree; differences in nats: %s", words)
        else:
            self._pad(f"packed and padded rows differ, in nats: {words}")

    def _pad(self, reason: str) -> None:
        self.packed = False
        logger.warning("padding_free is off for this run, and rows are padded: %s", reason)


def _summary(gaps: Tensor) -> Tensor:
    sizes = gaps.abs()
    return torch.stack([sizes.mean(), sizes.quantile(0.99), sizes.max()]).cpu()


def _allowed(gaps: Tensor, noise: Tensor | None) -> Tensor:
    """Returns (1,) whether the gaps' summary is within the limits; False if any gap is NaN."""
    if noise is None:
        return (gaps <= FLOAT32_LIMIT).all().unsqueeze(0)
    relative = (gaps <= TIMES_THE_NOISE * noise + NOISE_MARGIN)[:2].all()
    return (relative & (gaps[0] <= COARSE_LIMIT)).unsqueeze(0)


def _in_words(gaps: Sequence[float]) -> str:
    return ", ".join(f"{name} {gap:.1e}" for name, gap in zip(GAPS, gaps, strict=True))


def padded_batches(rows: Sequence[ScoringRow], budget: int) -> list[list[int]]:
    """Returns batches of row indices, sorted by length, each of at most `budget` tokens including padding."""
    batches: list[list[int]] = []
    for index in sorted(range(len(rows)), key=lambda index: (-rows[index].num_tokens, index)):
        if batches and rows[batches[-1][0]].num_tokens * (len(batches[-1]) + 1) <= budget:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches


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
