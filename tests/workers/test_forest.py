"""What rows share, and which rows pass together."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cepo.data.batch import ScoringRow
from cepo.models.inputs import EncodedPrompt
from cepo.workers.passes import TokenForest, families, pack_rows, plan_forest

PICTURE = 99


def row_of(context: tuple[int, ...], response: tuple[int, ...], images: str | None = None) -> ScoringRow:
    read = cast("Any", images and SimpleNamespace(content_key=images))
    return ScoringRow(context=EncodedPrompt(token_ids=context, engine_ids=context, images=read), response_ids=response)


def rows_of(contexts: list[tuple[int, ...]], num_responses: int = 2, length: int = 5) -> list[ScoringRow]:
    return [
        row_of(context, tuple(range(100 * number, 100 * number + length)))
        for context in contexts
        for number in range(1, num_responses + 1)
    ]


def path(forest: TokenForest, rows: list[ScoringRow], row: int) -> tuple[int, ...]:
    """The tokens from the root to the end of a row, read off the forest."""
    node = forest.leaves[row] if forest.leaves[row] >= 0 else forest.context_ends[row]
    tokens: tuple[int, ...] = ()
    while node >= 0:
        segment = forest.segments[node]
        owner = rows[segment.row]
        tokens = (*owner.context.token_ids, *owner.response_ids)[segment.start : segment.stop] + tokens
        node = segment.parent
    return tokens


def test_three_contexts_compute_the_prompt_once() -> None:
    prompt = tuple(range(1, 41))
    rows = rows_of([(*prompt, 50), (*prompt, 51, 52, 53), (*prompt, 61, 52, 53)], num_responses=8, length=5)
    forest = plan_forest(rows)
    assert forest.num_tokens == 40 + 1 + 3 + 3 + 24 * 4  # a response's last token predicts nothing
    assert [segment.parent for segment in forest.segments][:3] == [-1, 0, 1]
    assert sum(segment.parent == 0 for segment in forest.segments) == 3
    assert forest.branch_ends[0] == 1 + 3 + 24


def test_a_context_that_begins_another_ends_inside_it() -> None:
    short = tuple(range(1, 31))
    rows = rows_of([(*short, 40, 41), short])
    forest = plan_forest(rows)
    assert forest.num_tokens == 30 + 2 + 4 * 4
    assert forest.context_ends == (1, 1, 0, 0)


def test_15_common_tokens_are_repeated_and_16_are_shared() -> None:
    for common, expected in ((15, 2 * (15 + 1) + 2 * 4), (16, 16 + 2 * 1 + 2 * 4)):
        prompt = tuple(range(1, common + 1))
        assert plan_forest(rows_of([(*prompt, 50), (*prompt, 51)], num_responses=1)).num_tokens == expected


def test_equal_tokens_before_different_images_are_not_shared() -> None:
    context = (1, PICTURE, PICTURE, *range(2, 40))
    rows = [row_of(context, (5, 6, 7), picture) for picture in ("a", "b", "a")]
    forest = plan_forest(rows, placeholders=(PICTURE,))
    assert forest.num_tokens == 2 * len(context) + 3 * 2
    assert families(forest) == [[0, 2], [1]]


def test_no_segment_ends_inside_a_picture() -> None:
    before = tuple(range(1, 21))
    longer, shorter = (*before, PICTURE, PICTURE, PICTURE, 7), (*before, PICTURE, PICTURE, 7)
    forest = plan_forest(rows_of([longer, shorter], num_responses=1), placeholders=(PICTURE,))
    found = [(segment.start, segment.stop) for segment in forest.segments if segment.row == 0]
    assert found == [(0, 20), (20, 24), (24, 28)]


tokens = st.integers(1, 3)
row_lists = st.lists(
    st.builds(
        row_of,
        context=st.lists(tokens, min_size=1, max_size=9).map(tuple),
        response=st.lists(tokens, min_size=1, max_size=4).map(tuple),
        images=st.sampled_from([None, "a"]),
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=60, deadline=None)
@given(rows=row_lists, min_shared=st.integers(1, 4), placeholders=st.sampled_from([(), (1,)]))
def test_every_row_is_read_off_its_path(rows: list[ScoringRow], min_shared: int, placeholders: tuple[int, ...]) -> None:
    forest = plan_forest(rows, placeholders=placeholders, min_shared=min_shared)
    for index, row in enumerate(rows):
        assert path(forest, rows, index) == (*row.context.token_ids, *row.response_ids)[:-1]
        assert forest.segments[forest.context_ends[index]].stop == len(row.context.token_ids)
    for index, segment in enumerate(forest.segments):
        assert segment.parent < index
        assert len(segment) > 0
        for other in range(index + 1, len(forest.segments)):
            ancestor = other
            while ancestor > index:
                ancestor = forest.segments[ancestor].parent
            assert (ancestor == index) == (other < forest.branch_ends[index])
        context = rows[segment.row].context.token_ids
        if placeholders and segment.stop < len(context):
            assert context[segment.stop - 1 : segment.stop + 1] != (1, 1)


@pytest.mark.parametrize(("budget", "expected"), [(200, 1), (100, 2), (70, 4), (59, 8), (10, 8)])
def test_a_group_above_the_budget_is_cut_between_responses(budget: int, expected: int) -> None:
    rows = rows_of([tuple(range(1, 41))], num_responses=8, length=16)  # 40 + 8 x 15 = 160 tokens
    packs = pack_rows(plan_forest(rows), budget=budget)
    assert len(packs) == expected


def test_groups_that_fit_stay_whole() -> None:
    contexts = [tuple(range(1000 * group, 1000 * group + 30)) for group in range(1, 6)]
    rows = rows_of(contexts, num_responses=4, length=6)  # five groups of 30 + 4 x 5 = 50 tokens
    packs = pack_rows(plan_forest(rows), budget=110)
    assert sorted(len(pack) for pack in packs) == [4, 8, 8]
    assert all(len({row // 4 for row in pack}) == len(pack) / 4 for pack in packs)
