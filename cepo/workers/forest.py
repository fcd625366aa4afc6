"""Plans, from token ids alone, which tokens of a pass are computed once for several rows.

The contexts of a prompt share a prefix, and its responses share a context. Rows form a forest in which a token's
ancestors are exactly the tokens before it in its row. A causal model that runs each segment once, after its ancestors,
therefore computes for each row the same results as from the row alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from cepo.data.batch import ScoringRow

MIN_SHARED_TOKENS = 16
"""Minimum length of a shared prefix; sharing a shorter one saves less than another segment in attention costs."""


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Tokens `start` to `stop` of row `row` (context, then response), computed once for all rows that contain them.

    Attributes:
        parent: index of the preceding segment, -1 for none. Parents come before their children.
        num_descendants: number of all descendants, which follow the segment directly.
    """

    row: int
    start: int
    stop: int
    parent: int
    num_descendants: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, kw_only=True)
class TokenForest:
    """The plan of a pass: rows as a forest of segments.

    The last token of a response predicts nothing and is omitted.

    Attributes:
        segments: all segments, depth first.
        context_ends: for each row, the segment that ends with the last token of its context.
        leaves: for each row, the segment with its response, or -1 for a response of one token.
    """

    segments: tuple[Segment, ...]
    context_ends: tuple[int, ...]
    leaves: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        return sum(len(segment) for segment in self.segments)

    def of_rows(self, rows: Sequence[int]) -> TokenForest:
        """Returns the part of the forest that `rows` need, numbered in their order.

        A segment with a single remaining branch and no row that ends at it is joined with that branch.
        """
        owners: dict[int, int] = {}
        for number, row in enumerate(rows):
            node = self.context_ends[row] if self.leaves[row] < 0 else self.leaves[row]
            while node >= 0 and node not in owners:
                owners[node] = number
                node = self.segments[node].parent
        kept, ends = sorted(owners), {self.context_ends[row] for row in rows}
        branches = Counter(self.segments[node].parent for node in kept)
        new: dict[int, int] = {-1: -1}
        segments: list[tuple[int, int, int, int]] = []
        for node in kept:
            segment, parent = self.segments[node], self.segments[node].parent
            if parent >= 0 and branches[parent] == 1 and parent not in ends:
                _, start, _, before = segments.pop()
                segments.append((owners[node], start, segment.stop, before))
            else:
                segments.append((owners[node], segment.start, segment.stop, new[parent]))
            new[node] = len(segments) - 1
        return TokenForest(
            segments=_counted(segments),
            context_ends=tuple(new[self.context_ends[row]] for row in rows),
            leaves=tuple(new[self.leaves[row]] for row in rows),
        )


def plan_forest(
    rows: Sequence[ScoringRow], *, placeholders: Collection[int | None] = (), min_shared: int = MIN_SHARED_TOKENS
) -> TokenForest:
    """Plans a forest that shares common prefixes of at least `min_shared` tokens, and each context among its responses.

    Rows share nothing if the contents of their images differ, although the placeholders are equal. No segment ends
    inside a run of `placeholders`.
    """
    return _Planner(rows, placeholders, min_shared).plan()


_Contexts = Mapping[tuple[int, ...], list[int]]
"""The rows of each context, by its token ids."""


class _Planner:
    def __init__(self, rows: Sequence[ScoringRow], placeholders: Collection[int | None], min_shared: int) -> None:
        self._rows, self._placeholders, self._min_shared = rows, placeholders, min_shared
        self._segments: list[tuple[int, int, int, int]] = []
        self._context_ends = [-1] * len(rows)
        self._leaves = [-1] * len(rows)

    def plan(self) -> TokenForest:
        by_images: dict[str | None, dict[tuple[int, ...], list[int]]] = {}
        for index, row in enumerate(self._rows):
            token_ids, images = row.context.token_ids, row.context.images
            assert token_ids and row.response_ids, f"row {index} has no context or no response"
            contexts = by_images.setdefault(None if images is None else images.content_key, {})
            contexts.setdefault(token_ids, []).append(index)
        for contexts in by_images.values():
            self._grow(contexts, start=0, parent=-1)
        return TokenForest(
            segments=_counted(self._segments),
            context_ends=tuple(self._context_ends),
            leaves=tuple(self._leaves),
        )

    def _grow(self, contexts: _Contexts, *, start: int, parent: int) -> None:
        first, rows = next(iter(contexts.items()))
        if len(contexts) == 1:
            self._finish(len(first), rows, start, parent)
            return
        common = _num_common(contexts)
        cut = common
        if any(token in self._placeholders for token_ids in contexts for token in token_ids[common : common + 1]):
            while cut > 0 and first[cut - 1] in self._placeholders:
                cut -= 1
        if cut - start >= self._min_shared:
            parent, start = self._add(rows[0], start, cut, parent), cut
        branches: dict[tuple[int, ...], dict[tuple[int, ...], list[int]]] = {}
        for token_ids, of_context in contexts.items():
            branches.setdefault(token_ids[common : common + 1], {})[token_ids] = of_context
        for branch in branches.values():
            self._grow(branch, start=start, parent=parent)

    def _finish(self, length: int, rows: Sequence[int], start: int, parent: int) -> None:
        """Ends a context of `length` tokens, and adds the responses of its `rows`."""
        if length > start:
            parent = self._add(rows[0], start, length, parent)
        for row in rows:
            self._context_ends[row] = parent
            num_inputs = len(self._rows[row].response_ids) - 1
            if num_inputs > 0:
                self._leaves[row] = self._add(row, length, length + num_inputs, parent)

    def _add(self, row: int, start: int, stop: int, parent: int) -> int:
        self._segments.append((row, start, stop, parent))
        return len(self._segments) - 1


def _counted(segments: Sequence[tuple[int, int, int, int]]) -> tuple[Segment, ...]:
    """Returns segments (row, start, stop, parent) with their numbers of descendants."""
    counts = [0] * len(segments)
    for index in range(len(segments) - 1, -1, -1):
        parent = segments[index][3]
        if parent >= 0:
            counts[parent] += counts[index] + 1
    return tuple(
        Segment(row=row, start=start, stop=stop, parent=parent, num_descendants=count)
        for (row, start, stop, parent), count in zip(segments, counts, strict=True)
    )


def _num_common(sequences: Collection[tuple[int, ...]]) -> int:
    """Returns the length of the common prefix, at which the lexicographically smallest and largest sequences differ."""
    first, last = min(sequences), max(sequences)
    return next((index for index, pair in enumerate(zip(first, last, strict=False)) if pair[0] != pair[1]), len(first))


def families(forest: TokenForest) -> list[list[int]]:
    """Returns the row indices of each tree, depth first; rows of different trees share no tokens."""
    return [piece.rows for piece in _Cutter(forest, budget=forest.num_tokens).pieces()]


def pack_rows(forest: TokenForest, *, budget: int) -> list[list[int]]:
    """Returns the row indices of passes of at most `budget` computed tokens, packed by first-fit decreasing.

    Rows that share tokens remain together unless they exceed the budget. In that case the largest branches that fit
    remain whole, and each pass repeats the tokens before its branches. A single row above the budget gets its own pass.
    """
    pieces = _Cutter(forest, budget).pieces()
    order = sorted(range(len(pieces)), key=lambda index: (-pieces[index].num_tokens, index))
    packs: list[_Piece] = []
    for index in order:
        piece = pieces[index]
        room = next((pack for pack in packs if pack.num_tokens + piece.num_tokens <= budget), None)
        if room is None:
            packs.append(_Piece(list(piece.rows), piece.num_tokens))
        else:
            room.rows.extend(piece.rows)
            room.num_tokens += piece.num_tokens
    return [sorted(pack.rows) for pack in packs]


@dataclass
class _Piece:
    rows: list[int]
    num_tokens: int


class _Cutter:
    """Cuts a forest into branches of at most `budget` tokens, including the tokens before them."""

    def __init__(self, forest: TokenForest, budget: int) -> None:
        self._segments, self._budget = forest.segments, budget
        self._children: list[list[int]] = [[] for _ in forest.segments]
        self._ending: list[list[int]] = [[] for _ in forest.segments]
        for index, segment in enumerate(forest.segments):
            if segment.parent >= 0:
                self._children[segment.parent].append(index)
        for row, (end, leaf) in enumerate(zip(forest.context_ends, forest.leaves, strict=True)):
            self._ending[end if leaf < 0 else leaf].append(row)

    def pieces(self) -> list[_Piece]:
        roots = [index for index, segment in enumerate(self._segments) if segment.parent < 0]
        return [piece for root in roots for piece in self._cut(root, before=0)]

    def _cut(self, node: int, *, before: int) -> list[_Piece]:
        """Cuts the branch at `node` into pieces, each of which repeats the `before` tokens that precede it."""
        whole = _Piece(self._rows(node), before + self._size(node))
        if whole.num_tokens <= self._budget or not self._children[node]:
            return [whole]
        before += len(self._segments[node])
        pieces: list[_Piece] = []
        open_piece = _Piece(list(self._ending[node]), before)
        for child in self._children[node]:
            if open_piece.rows and open_piece.num_tokens + self._size(child) > self._budget:
                pieces.append(open_piece)
                open_piece = _Piece([], before)
            if before + self._size(child) > self._budget:
                pieces += self._cut(child, before=before)
            else:
                open_piece.rows += self._rows(child)
                open_piece.num_tokens += self._size(child)
        return [*pieces, open_piece] if open_piece.rows else pieces

    def _size(self, node: int) -> int:
        branch = self._segments[node : node + 1 + self._segments[node].num_descendants]
        return sum(len(segment) for segment in branch)

    def _rows(self, node: int) -> list[int]:
        last = node + 1 + self._segments[node].num_descendants
        return [row for index in range(node, last) for row in self._ending[index]]
