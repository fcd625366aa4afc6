"""What rows share: packed they have the tokens, positions and images of their own rows, and no pass exceeds its bound."""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Callable
from itertools import chain
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from factories import rollouts_of
from generator_cases import picture
from hypothesis import given
from hypothesis import strategies as st

from cepo.algorithms.settings import TeacherConfig
from cepo.data.batch import ScoringRow, token_array
from cepo.data.prompts import ContextBuilder, Problem
from cepo.models.interface import EncodedPrompt
from cepo.models.processing import Processing
from cepo.runtime.dispatch import Assignment, split_batches
from cepo.trainer.batches import actor_batches, scored_batch
from cepo.trainer.planning import ScoringPlan
from cepo.types import TokenSignal
from cepo.workers.batching import by_length, families, forest_of, pack_rows, padded_batches, plan_forest
from cepo.workers.scoring_model import CollatedRows, collate

PICTURE = 99


def row_of(context: tuple[int, ...], response: tuple[int, ...], images: str | None = None) -> ScoringRow:
    """A row whose images have this content."""
    inputs = cast("Any", images and SimpleNamespace(content_key=images))
    prompt = EncodedPrompt(token_ids=context, engine_ids=context, images=inputs)
    return ScoringRow(context=prompt, response_ids=token_array(response))


def rows_behind(contexts: list[tuple[int, ...]], num_responses: int = 2, length: int = 5) -> list[ScoringRow]:
    """The same responses behind each context."""
    rows: list[ScoringRow] = []
    for context in contexts:
        for number in range(1, num_responses + 1):
            response = range(100 * number, 100 * number + length)
            rows.append(row_of(context, tuple(response)))
    return rows


def test_three_contexts_compute_the_prompt_once() -> None:
    """A response's last token predicts nothing, so that 4 of 5 are computed."""
    prompt = tuple(range(1, 41))
    contexts = [(*prompt, 50), (*prompt, 51, 52, 53), (*prompt, 61, 52, 53)]
    forest = plan_forest(rows_behind(contexts, num_responses=8, length=5))
    assert forest.num_tokens == 40 + 1 + 3 + 3 + 24 * 4
    parents = [segment.parent for segment in forest.segments]
    assert parents[:3] == [-1, 0, 1]
    assert parents.count(0) == 3
    assert forest.branch_ends[0] == 1 + 3 + 24


def test_a_context_that_begins_another_ends_inside_it() -> None:
    short = tuple(range(1, 31))
    rows = rows_behind([(*short, 40, 41), short])
    forest = plan_forest(rows)
    assert forest.num_tokens == 30 + 2 + 4 * 4
    assert forest.context_ends == (1, 1, 0, 0)


def test_15_common_tokens_are_repeated_and_16_are_shared() -> None:
    """Two contexts of the common tokens and one further, with responses of 5."""

    def num_tokens(common: int) -> int:
        prompt = tuple(range(1, common + 1))
        rows = rows_behind([(*prompt, 50), (*prompt, 51)], num_responses=1)
        return plan_forest(rows).num_tokens

    assert num_tokens(15) == 2 * (15 + 1) + 2 * 4
    assert num_tokens(16) == 16 + 2 * 1 + 2 * 4


def test_equal_tokens_before_different_images_are_not_shared() -> None:
    context = (1, PICTURE, PICTURE, *range(2, 40))
    rows = [row_of(context, (5, 6, 7), picture) for picture in ("a", "b", "a")]
    forest = plan_forest(rows, placeholders=(PICTURE,))
    assert forest.num_tokens == 2 * len(context) + 3 * 2
    assert families(forest) == [[0, 2], [1]]


def test_text_before_different_images_is_shared() -> None:
    """20 tokens of text, then a picture of 3 tokens in two versions, one of them twice, and a text without a picture."""
    first_text = tuple(range(1, 21))
    last_text = tuple(range(30, 50))
    seen = (*first_text, PICTURE, PICTURE, PICTURE, *last_text)
    rows = [row_of(seen, (5, 6, 7), content) for content in ("whole", "masked", "whole")]
    rows.append(row_of((*first_text, *last_text), (5, 6, 7)))
    forest = plan_forest(rows, placeholders=(PICTURE,))
    parts = [(segment.row, segment.start, segment.stop, segment.parent) for segment in forest.segments]
    assert parts == [
        (0, 0, 20, -1),
        (0, 20, 43, 0),
        (0, 43, 45, 1),
        (2, 43, 45, 1),
        (1, 20, 43, 0),
        (1, 43, 45, 4),
        (3, 20, 40, 0),
        (3, 40, 42, 6),
    ]


def test_pictures_and_films_in_another_order_are_not_shared() -> None:
    film = 98
    first = (*range(1, 21), PICTURE, film, *range(30, 50))
    second = (*range(1, 21), film, PICTURE, *range(30, 50))
    rows = [row_of(first, (5, 6), "a"), row_of(second, (5, 6), "a")]
    forest = plan_forest(rows, placeholders=(PICTURE, film))
    assert forest.num_tokens == 20 + 2 * (22 + 1)


def test_no_segment_ends_inside_a_picture() -> None:
    first_text = tuple(range(1, 21))
    longer = (*first_text, PICTURE, PICTURE, PICTURE, 7)
    shorter = (*first_text, PICTURE, PICTURE, 7)
    rows = rows_behind([longer, shorter], num_responses=1)
    forest = plan_forest(rows, placeholders=(PICTURE,))
    of_first_row = [(segment.start, segment.stop) for segment in forest.segments if segment.row == 0]
    assert of_first_row == [(0, 20), (20, 24), (24, 28)]


@pytest.mark.parametrize(("budget", "expected"), [(200, 1), (100, 2), (70, 4), (59, 8), (10, 8)])
def test_a_group_above_the_budget_is_cut_between_responses(budget: int, expected: int) -> None:
    rows = rows_behind([tuple(range(1, 41))], num_responses=8, length=16)  # 40 + 8 x 15 = 160 tokens
    packs = pack_rows(plan_forest(rows), budget=budget)
    assert len(packs) == expected


def test_groups_that_fit_stay_whole() -> None:
    """Five groups of 30 + 4 x 5 = 50 tokens."""
    contexts = [tuple(range(1000 * group, 1000 * group + 30)) for group in range(1, 6)]
    rows = rows_behind(contexts, num_responses=4, length=6)
    packs = pack_rows(plan_forest(rows), budget=110)
    assert sorted(len(pack) for pack in packs) == [4, 8, 8]
    for pack in packs:
        groups = {row // 4 for row in pack}
        assert len(groups) == len(pack) / 4


CPU = torch.device("cpu")
QUESTIONS = (
    ("Find x.", 0),
    ("<image>Find the area of the triangle with the sides 3, 4 and 5.", 1),
    ("<image>Find the area of the circle. <image>Which of both is larger?", 2),
    ("What is the measure of the angle? " * 3, 0),
)
REFERENCES = (
    "7",
    "70",
    "Here is a sample answer: 7",
    "the sum of 3 and 4 is 7, so that x = 7",
    r"5 \sqrt { 3 }",
    "7" * 30,
)
Contexts = Callable[[int, int], EncodedPrompt]
TOKENS = st.lists(st.integers(0, 9), min_size=1, max_size=6).map(tuple)


@pytest.fixture(scope="module")
def contexts(tiny_processing: Processing) -> Contexts:
    """For each question the student's prompt, those of teachers with each wording and reference, and one without images."""
    contexts_of_questions: list[list[EncodedPrompt]] = []
    for number, (text, num_images) in enumerate(QUESTIONS):
        images = tuple(picture(seed, (64 + 32 * seed, 64)) for seed in range(num_images))
        problem = Problem(prompt_id=str(number), text=text, images=images, ground_truth="7", solution=None, columns={})
        of_question: list[EncodedPrompt] = []
        for placement in ("user_suffix", "assistant_prefix"):
            builder = ContextBuilder(tiny_processing, TeacherConfig(placement=placement), max_context_length=1000)
            student = builder.student(problem)
            of_question.append(student)
            of_question += [builder.teacher(problem, student, reference) for reference in REFERENCES]
            of_question.append(builder.blind(problem))
        contexts_of_questions.append(of_question)
    return lambda question, place: contexts_of_questions[question][place]


PLACES = st.lists(
    st.tuples(st.integers(0, len(QUESTIONS) - 1), st.integers(0, 2 * len(REFERENCES) + 3), TOKENS),
    min_size=1,
    max_size=12,
)
"""For each row the question, one of its contexts, and the response."""


def rows_of(contexts: Contexts, places: list[tuple[int, int, tuple[int, ...]]]) -> list[ScoringRow]:
    return [
        ScoringRow(context=contexts(question, place), response_ids=token_array(response), prompt=question, row=number)
        for number, (question, place, response) in enumerate(places)
    ]


def image_of_token(batch: CollatedRows, processing: Processing) -> dict[int, tuple[str, int, int]]:
    """For each place in the flattened input with a placeholder: the image's content, its number, the feature's number."""
    features: list[tuple[str, int, int]] = []
    for key, number in batch.image_order:
        num_patches = int(batch.images[key].grids["image"][number].prod())
        for feature in range(num_patches // 4):  # 2 x 2 patches are merged
            features.append((key, number, feature))
    tokens = batch.input_ids.flatten().tolist()
    placeholders = [place for place, token in enumerate(tokens) if token == processing.image_token_id]
    return dict(zip(placeholders, features, strict=True))


def visible(batch: CollatedRows, place: int) -> list[int]:
    """The places that the token at `place` attends to, itself included, by the layout's two descriptions of it."""
    assert batch.segments is not None
    ends = batch.segments.branch_end_of_token.tolist()
    by_branch = [earlier for earlier in range(place + 1) if ends[earlier] > place]
    by_parts: list[int] = []
    for part in batch.segments.parts():
        if part.queries.start <= place < part.queries.stop:
            last = part.keys.start + place - part.queries.start + 1 if part.causal else part.keys.stop
            by_parts += range(part.keys.start, last)
    assert sorted(by_parts) == by_branch
    return by_branch


@given(places=PLACES, multiple=st.sampled_from([1, 1, 8]), data=st.data())
def test_packed_rows_have_the_tokens_and_positions_of_their_own(
    contexts: Contexts,
    tiny_processing: Processing,
    places: list[tuple[int, int, tuple[int, ...]]],
    multiple: int,
    data: st.DataObject,
) -> None:
    """What a response token's prediction reads: the same tokens at the same positions with the same images, in order.

    The rows are those of a whole forest or of a part of one.
    """
    rows = rows_of(contexts, places)
    forest = forest_of(rows, tiny_processing)
    if chosen := data.draw(st.lists(st.integers(0, len(rows) - 1), unique=True)):
        rows = [rows[index] for index in chosen]
        forest = forest.of_rows(chosen)
    packed = collate(rows, forest, processing=tiny_processing, device=CPU, multiple_of=multiple)
    padded = collate(rows, processing=tiny_processing, device=CPU)
    assert torch.equal(packed.targets, padded.targets)
    assert packed.input_ids.shape[1] % multiple == 0

    longest = padded.input_ids.shape[1]
    in_packed = inputs_of(packed, tiny_processing)
    in_padded = inputs_of(padded, tiny_processing)
    for own_place, padded_place in zip(packed.response_index.tolist(), padded.response_index.tolist(), strict=True):
        beginning_of_row = padded_place // longest * longest
        seen_in_packed = [in_packed[place] for place in visible(packed, own_place)]
        assert seen_in_packed == in_padded[beginning_of_row : padded_place + 1]


def inputs_of(batch: CollatedRows, processing: Processing) -> list[tuple[int, list[int], object]]:
    """For each place in the flattened input the token, its position, and the image's feature or None."""
    tokens = batch.input_ids.flatten().tolist()
    positions = batch.position_ids.flatten(1).T.tolist()
    features = image_of_token(batch, processing)
    inputs: list[tuple[int, list[int], object]] = []
    for place, (token, position) in enumerate(zip(tokens, positions, strict=True)):
        inputs.append((token, position, features.get(place)))
    return inputs


@given(places=PLACES, budget=st.integers(1, 600))
def test_passes_have_each_row_once_within_their_bound(
    contexts: Contexts,
    tiny_processing: Processing,
    places: list[tuple[int, int, tuple[int, ...]]],
    budget: int,
) -> None:
    """A row that is longer may exceed it, with rows that need no token beside its own; padding counts as computed."""
    rows = rows_of(contexts, places)
    forest = forest_of(rows, tiny_processing)
    every_row = list(range(len(rows)))

    def bound(indices: list[int]) -> int:
        return max(budget, *(rows[index].num_tokens for index in indices))

    packed_passes = pack_rows(forest, budget=budget)
    assert sorted(chain.from_iterable(packed_passes)) == every_row
    for indices in packed_passes:
        assert forest.of_rows(indices).num_tokens <= bound(indices)

    padded_passes = padded_batches(rows, budget)
    assert sorted(chain.from_iterable(padded_passes)) == every_row
    for indices in padded_passes:
        batch = collate([rows[index] for index in indices], processing=tiny_processing, device=CPU)
        assert batch.input_ids.numel() <= bound(indices)

    assert sorted(by_length(rows)) == every_row
    assert sorted(chain.from_iterable(families(forest))) == every_row


@given(
    lengths=st.lists(st.integers(1, 7), min_size=1, max_size=6),
    group_size=st.integers(1, 3),
    data=st.data(),
    num_prompts=st.integers(1, 4),
    num_ranks=st.integers(1, 3),
)
def test_optimizer_batches_have_each_live_row_once(
    lengths: list[int], group_size: int, data: st.DataObject, num_prompts: int, num_ranks: int
) -> None:
    """On all ranks together; the totals count every row, and each row keeps its own numbers."""
    count = len(lengths) * group_size
    live = torch.tensor(data.draw(st.lists(st.booleans(), min_size=count, max_size=count)))
    prompt = EncodedPrompt(token_ids=(1, 2), engine_ids=(1, 2), images=None)
    ragged = [length + number % 2 for length in lengths for number in range(group_size)]
    responses = [(3,) * num_tokens for num_tokens in ragged]
    rollouts = rollouts_of(responses, problems=[None] * len(lengths), prompts=[prompt] * len(lengths))
    marks = torch.arange(1.0, count + 1).unsqueeze(1) * rollouts.response_mask
    plan = ScoringPlan(
        rollouts=rollouts,
        live=live,
        updated=live,
        on_policy=torch.zeros(count, dtype=torch.bool),
        student={},
        views=[],
        metrics={},
    )
    scored = dataclasses.replace(scored_batch(plan, {}, token_level_rewards=marks), old_log_probs=-marks)
    batches = actor_batches(scored, TokenSignal(advantages=10 * marks), num_prompts=num_prompts, max_response_length=8)
    assert len(batches) == -(-len(lengths) // num_prompts)
    assert sum(batch.denominators.num_tokens for batch in batches) == sum(ragged)
    assert sum(batch.denominators.num_sequences for batch in batches) == count
    seen: dict[int, int] = defaultdict(int)
    split = split_batches(batches, Assignment(num_ranks, prompts_per_update=num_prompts), num_ranks)
    for part in itertools.chain.from_iterable(split):
        for row, old, advantage, mask in zip(
            part.rows, part.old_log_probs, part.advantages, part.response_mask, strict=True
        ):
            assert row.row is not None
            seen[row.row] += 1
            assert len(row.response_ids) == ragged[row.row] == int(mask.sum())
            assert torch.equal(old, -marks[row.row])
            assert torch.equal(advantage, 10 * marks[row.row])
    assert seen == {row: 1 for row in range(count) if live[row]}
