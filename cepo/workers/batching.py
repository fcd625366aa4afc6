"""Plans passes from token ids alone: which rows all ranks run together, and which tokens are computed once for many rows.

The contexts of a prompt share a prefix, and its responses share a context. Rows form a forest in which a token's
ancestors are exactly the tokens before it in its row. A causal model that runs each segment once, after its ancestors,
therefore computes for each row the same results as from the row alone.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

import torch
import torch.distributed as dist

from cepo.config.worker_schema import ActorConfig, CriticConfig
from cepo.data.batch import ScoringRow, token_array
from cepo.models.interface import EncodedPrompt, ImageInputs
from cepo.models.processing import Processing
from cepo.models.segments import SegmentLayout

logger = logging.getLogger(__name__)

MIN_SHARED_TOKENS = 16
"""Minimum length of a shared prefix; sharing a shorter one saves less than another segment in attention costs."""
_ANY_TOKEN = 0
"""The token of fillers; every vocabulary has it."""


@dataclass(frozen=True)
class Segment:
    """Tokens `start` to `stop` of row `row` (context, then response), computed once for all rows that contain them.

    `parent` is the index of the preceding segment, -1 for none.
    """

    row: int
    start: int
    stop: int
    parent: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, kw_only=True)
class PrefixTree:
    """The plan of a pass: rows as a forest of segments. The last token of a response predicts nothing and is omitted.

    Attributes:
        segments: all segments, depth first.
        context_ends: for each row, the segment that ends with the last token of its context.
        leaves: for each row, the segment with its response, or -1 for a response of one token.
    """

    segments: tuple[Segment, ...]
    context_ends: tuple[int, ...]
    leaves: tuple[int, ...]

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """The number of tokens before each segment, followed by that of all."""
        return tuple(accumulate(map(len, self.segments), initial=0))

    @cached_property
    def branch_ends(self) -> tuple[int, ...]:
        """For each segment, the index after that of its last descendant; descendants follow a segment directly."""
        ends = list(range(1, len(self.segments) + 1))
        for index in reversed(range(len(ends))):
            parent = self.segments[index].parent
            if parent >= 0:
                ends[parent] = max(ends[parent], ends[index])
        return tuple(ends)

    @property
    def num_tokens(self) -> int:
        return self.starts[-1]

    @cached_property
    def layout(self) -> SegmentLayout:
        return SegmentLayout(
            starts=self.starts,
            branch_ends=tuple(self.starts[end] for end in self.branch_ends),
        )

    def of_rows(self, rows: Sequence[int]) -> PrefixTree:
        """Returns the part of the forest that `rows` need, numbered in their order.

        A segment with a single remaining branch and no row that ends at it is joined with that branch.
        """
        owners = self._owners(rows)
        remaining = sorted(owners)
        row_ends = {self.context_ends[row] for row in rows}
        num_branches = Counter(self.segments[node].parent for node in remaining)
        new_numbers: dict[int, int] = {-1: -1}
        segments: list[Segment] = []
        for node in remaining:
            segment = self.segments[node]
            start = segment.start
            new_parent = new_numbers[segment.parent]
            is_only_branch = segment.parent >= 0 and num_branches[segment.parent] == 1
            if is_only_branch and segment.parent not in row_ends:
                # The parent is the segment added last, because its only branch follows it directly.
                parent = segments.pop()
                start = parent.start
                new_parent = parent.parent
            segments.append(Segment(owners[node], start, segment.stop, new_parent))
            new_numbers[node] = len(segments) - 1
        return PrefixTree(
            segments=tuple(segments),
            context_ends=tuple(new_numbers[self.context_ends[row]] for row in rows),
            leaves=tuple(new_numbers[self.leaves[row]] for row in rows),
        )

    def _owners(self, rows: Sequence[int]) -> dict[int, int]:
        """Returns the segments that `rows` need, each with the position in `rows` of the first row that has it."""
        owners: dict[int, int] = {}
        for position, row in enumerate(rows):
            node = self.leaves[row]
            if node < 0:
                node = self.context_ends[row]
            while node >= 0 and node not in owners:
                owners[node] = position
                node = self.segments[node].parent
        return owners


def forest_of(rows: Sequence[ScoringRow], processing: Processing) -> PrefixTree:
    return plan_forest(rows, placeholders=(processing.image_token_id, processing.video_token_id))


def plan_forest(
    rows: Sequence[ScoringRow], *, placeholders: Collection[int | None] = (), min_shared: int = MIN_SHARED_TOKENS
) -> PrefixTree:
    """Plans a forest that shares common prefixes of at least `min_shared` tokens, and each context among its responses.

    Rows whose images differ in content share at most the tokens before the first image, although the placeholders are
    equal. No segment ends inside a run of `placeholders`.
    """
    identities = _Identities(placeholders)
    contexts: dict[tuple[int, ...], list[int]] = {}
    for index, row in enumerate(rows):
        assert row.context.token_ids and len(row.response_ids) > 0, f"row {index} has no context or no response"
        contexts.setdefault(identities.of(row.context), []).append(index)
    planner = _Planner(rows, min_shared)
    if contexts:
        planner.grow(contexts, start=0, parent=-1)
    return PrefixTree(
        segments=tuple(planner.segments),
        context_ends=tuple(planner.context_ends),
        leaves=tuple(planner.leaves),
    )


class _Identities:
    """Gives tokens that have the same embedding the same number: text its id, a placeholder one below 0 per image content."""

    def __init__(self, placeholders: Collection[int | None]) -> None:
        self._placeholders = frozenset(placeholders)
        self._numbers: dict[tuple[int, str | None], int] = {}  # by placeholder and the content of the context's images

    def of(self, context: EncodedPrompt) -> tuple[int, ...]:
        content_key = None if context.images is None else context.images.content_key
        identities: list[int] = []
        for token in context.token_ids:
            if token in self._placeholders:
                next_number = -1 - len(self._numbers)
                identities.append(self._numbers.setdefault((token, content_key), next_number))
            else:
                identities.append(token)
        return tuple(identities)


class _Planner:
    def __init__(self, rows: Sequence[ScoringRow], min_shared: int) -> None:
        self._rows = rows
        self._min_shared = min_shared
        self.segments: list[Segment] = []
        self.context_ends = [-1] * len(rows)
        self.leaves = [-1] * len(rows)

    def grow(self, contexts: Mapping[tuple[int, ...], list[int]], *, start: int, parent: int) -> None:
        """Adds the tokens from `start` on of the rows of each context, which is given by its tokens' identities."""
        first, first_rows = next(iter(contexts.items()))
        if len(contexts) == 1:
            self._finish(len(first), first_rows, start, parent)
            return
        num_common = _num_common(contexts)
        # The contexts by their first token after the common part; a context that ends there has the key ().
        branches: dict[tuple[int, ...], dict[tuple[int, ...], list[int]]] = {}
        for identities, context_rows in contexts.items():
            next_token = identities[num_common : num_common + 1]
            branches.setdefault(next_token, {})[identities] = context_rows
        cut = num_common
        begins_with_placeholder = any(next_token and next_token[0] < 0 for next_token in branches)
        if begins_with_placeholder:  # the cut would divide a run of placeholders
            while cut > 0 and first[cut - 1] < 0:
                cut -= 1
        if cut - start >= self._min_shared:
            parent = self._add(first_rows[0], start, cut, parent)
            start = cut
        for branch in branches.values():
            self.grow(branch, start=start, parent=parent)

    def _finish(self, length: int, rows: Sequence[int], start: int, parent: int) -> None:
        """Ends a context of `length` tokens, and adds the responses of its `rows`."""
        if length > start:
            parent = self._add(rows[0], start, length, parent)
        for row in rows:
            self.context_ends[row] = parent
            num_inputs = len(self._rows[row].response_ids) - 1
            if num_inputs > 0:
                self.leaves[row] = self._add(row, length, length + num_inputs, parent)

    def _add(self, row: int, start: int, stop: int, parent: int) -> int:
        self.segments.append(Segment(row, start, stop, parent))
        return len(self.segments) - 1


def _num_common(sequences: Collection[tuple[int, ...]]) -> int:
    """Returns the length of the common prefix, at which the lexicographically smallest and largest sequences differ."""
    smallest = min(sequences)
    largest = max(sequences)
    for index, (first, second) in enumerate(zip(smallest, largest, strict=False)):
        if first != second:
            return index
    return len(smallest)


def families(forest: PrefixTree) -> list[list[int]]:
    """Returns the row indices of each tree, depth first; rows of different trees share no tokens."""
    return [piece.rows for piece in _Cutter(forest, budget=forest.num_tokens).pieces()]


def pack_rows(forest: PrefixTree, *, budget: int) -> list[list[int]]:
    """Returns the row indices of passes of at most `budget` computed tokens, packed by first-fit decreasing.

    Rows that share tokens remain together unless they exceed the budget. In that case the largest branches that fit
    remain whole, and each pass repeats the tokens before its branches. A single row above the budget gets its own pass.
    """
    pieces = _Cutter(forest, budget).pieces()
    largest_first = sorted(pieces, key=lambda piece: -piece.num_tokens)
    packs: list[_Piece] = []
    for piece in largest_first:
        room_needed = budget - piece.num_tokens
        pack = next((pack for pack in packs if pack.num_tokens <= room_needed), None)
        if pack is None:
            packs.append(piece)
        else:
            pack.rows += piece.rows
            pack.num_tokens += piece.num_tokens
    return [sorted(pack.rows) for pack in packs]


@dataclass
class _Piece:
    num_tokens: int
    rows: list[int] = field(default_factory=list)


class _Cutter:
    """Cuts a forest into branches of at most `budget` tokens, including the tokens before them."""

    def __init__(self, forest: PrefixTree, budget: int) -> None:
        self._forest = forest
        self._budget = budget
        self._children: list[list[int]] = [[] for _ in forest.segments]
        self._ending: list[list[int]] = [[] for _ in forest.segments]
        for index, segment in enumerate(forest.segments):
            if segment.parent >= 0:
                self._children[segment.parent].append(index)
        for row, leaf in enumerate(forest.leaves):
            has_leaf = leaf >= 0
            last_segment = leaf if has_leaf else forest.context_ends[row]
            self._ending[last_segment].append(row)

    def pieces(self) -> list[_Piece]:
        pieces: list[_Piece] = []
        for index, segment in enumerate(self._forest.segments):
            if segment.parent < 0:
                pieces += self._cut(index, num_preceding=0)
        return pieces

    def _cut(self, node: int, *, num_preceding: int) -> list[_Piece]:
        """Cuts the branch at `node` into pieces, each of which repeats the tokens that precede it."""
        whole = _Piece(num_preceding + self._size(node), self._rows(node))
        if whole.num_tokens <= self._budget or not self._children[node]:
            return [whole]
        num_preceding += len(self._forest.segments[node])
        pieces: list[_Piece] = []
        open_piece = _Piece(num_preceding, self._ending[node].copy())
        for child in self._children[node]:
            child_size = self._size(child)
            if open_piece.rows and open_piece.num_tokens + child_size > self._budget:
                pieces.append(open_piece)
                open_piece = _Piece(num_preceding)
            if num_preceding + child_size > self._budget:
                pieces += self._cut(child, num_preceding=num_preceding)
            else:
                open_piece.rows += self._rows(child)
                open_piece.num_tokens += child_size
        if open_piece.rows:
            pieces.append(open_piece)
        return pieces

    def _size(self, node: int) -> int:
        first = self._forest.starts[node]
        end = self._forest.starts[self._forest.branch_ends[node]]
        return end - first

    def _rows(self, node: int) -> list[int]:
        rows: list[int] = []
        for ending_rows in self._ending[node : self._forest.branch_ends[node]]:
            rows += ending_rows
        return rows


@dataclass(frozen=True, kw_only=True)
class RankPass:
    """This rank's part of a pass that all ranks run together.

    Attributes:
        indices: indices of its rows in the call; may be empty.
        rows: these rows and, if the rank lacks rows or images that other ranks have, a filler, whose results are
            dropped and whose loss has weight 0.
        forest: the plan of packed rows; None if the rows are padded.
    """

    indices: list[int]
    rows: list[ScoringRow]
    forest: PrefixTree | None = None


class Batcher:
    """Divides rows into passes.

    FSDP gathers weights and reduces gradients of each block in every pass, so all ranks must take part. Each rank runs
    as many passes as the rank with the most. If any rank has images in a pass, all ranks run a sharded vision tower.

    Args:
        whole_tower: whether the rank has a whole vision tower, which it runs alone.
        why_padded: the reason why the model takes no packed rows; None if it does.
        longest_row: number of tokens of the longest prompt and response together. With `dynamic_batching` a pass has at
            most the micro-batch size times this number of tokens. With None, the micro-batch size counts rows.
    """

    def __init__(
        self,
        config: ActorConfig | CriticConfig,
        processing: Processing,
        *,
        whole_tower: bool,
        why_padded: str | None,
        device: torch.device,
        longest_row: int | None,
    ) -> None:
        self._processing = processing
        self._device = device
        self._longest_row = longest_row if config.dynamic_batching else None
        self.packed = config.padding_free and why_padded is None
        self._text_filler = _filler((), None)
        self._image_filler = None
        if processing.images is not None and not whole_tower:
            token_ids, images = processing.images.smallest()
            self._image_filler = _filler(token_ids, images)
        if config.padding_free and why_padded is not None:
            logger.warning("padding_free is off for this run, and rows are padded: %s", why_padded)

    def cut(self, rows: Sequence[ScoringRow], size: int) -> list[RankPass]:
        """Divides `rows` into passes that are aligned with those of the other ranks. Collective, also without rows."""
        forest = forest_of(rows, self._processing) if self.packed else None
        indices_of_passes = self._own_passes(rows, forest, size)
        (num_passes,) = self._largest([len(indices_of_passes)])
        while len(indices_of_passes) < num_passes:
            indices_of_passes.append([])
        lacks_images = self._lack_images(rows, indices_of_passes)
        passes: list[RankPass] = []
        for indices, lacks in zip(indices_of_passes, lacks_images, strict=True):
            filler = self._filler_for(is_empty=not indices, lacks_images=lacks)
            passes.append(self._rank_pass(rows, indices, forest, filler))
        return passes

    def _lack_images(self, rows: Sequence[ScoringRow], indices_of_passes: Sequence[Sequence[int]]) -> list[bool]:
        """Returns for each pass whether this rank must run a sharded tower in it without images of its own."""
        if self._image_filler is None:  # the tower is whole on each rank, which runs it alone
            return [False] * len(indices_of_passes)
        has_images: list[bool] = []
        for indices in indices_of_passes:
            has_images.append(any(rows[index].context.images is not None for index in indices))
        some_rank_has_images = self._largest([int(has) for has in has_images])
        lack_images: list[bool] = []
        for this_rank, some_rank in zip(has_images, some_rank_has_images, strict=True):
            lack_images.append(some_rank > 0 and not this_rank)
        return lack_images

    def _filler_for(self, *, is_empty: bool, lacks_images: bool) -> ScoringRow | None:
        if lacks_images:
            return self._image_filler
        return self._text_filler if is_empty else None

    def _rank_pass(
        self, rows: Sequence[ScoringRow], indices: list[int], forest: PrefixTree | None, filler: ScoringRow | None
    ) -> RankPass:
        pass_rows = [rows[index] for index in indices]
        if filler is not None:
            pass_rows.append(filler)
        if forest is None:
            return RankPass(indices=indices, rows=pass_rows)
        if filler is None:
            return RankPass(indices=indices, rows=pass_rows, forest=forest.of_rows(indices))
        return RankPass(indices=indices, rows=pass_rows, forest=forest_of(pass_rows, self._processing))

    def _own_passes(self, rows: Sequence[ScoringRow], forest: PrefixTree | None, size: int) -> list[list[int]]:
        if self._longest_row is not None:
            budget = size * self._longest_row
            if forest is None:
                return padded_batches(rows, budget)
            return pack_rows(forest, budget=budget)
        order: list[int] = []
        if forest is None:
            order = by_length(rows)
        else:
            for family in families(forest):
                order += family
        passes: list[list[int]] = []
        for start in range(0, len(order), size):
            passes.append(order[start : start + size])
        return passes

    def _largest(self, values: list[int]) -> list[int]:
        """Returns the largest of all ranks' values, entry by entry."""
        if not values or dist.get_world_size() == 1:
            return values  # without a wait for the device
        tensor = torch.tensor(values, dtype=torch.long, device=self._device)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return tensor.tolist()


def _filler(token_ids: tuple[int, ...], images: ImageInputs | None) -> ScoringRow:
    """Returns a row of as few tokens as possible."""
    filler_ids = (_ANY_TOKEN, *token_ids)
    context = EncodedPrompt(token_ids=filler_ids, engine_ids=filler_ids, images=images)
    return ScoringRow(context=context, response_ids=token_array([_ANY_TOKEN]))


def by_length(rows: Sequence[ScoringRow]) -> list[int]:
    """Returns the rows' indices, the longest row first, so that passes of neighbours need little padding."""
    return sorted(range(len(rows)), key=lambda index: -rows[index].num_tokens)


def padded_batches(rows: Sequence[ScoringRow], budget: int) -> list[list[int]]:
    """Divides rows, the longest first, into batches of indices with at most `budget` tokens, including padding."""
    batches: list[list[int]] = []
    for index in by_length(rows):
        if batches:
            batch = batches[-1]
            padded_length = rows[batch[0]].num_tokens  # the first row of a batch is its longest
            if padded_length * (len(batch) + 1) <= budget:
                batch.append(index)
                continue
        batches.append([index])
    return batches
