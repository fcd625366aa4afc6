"""References of any group: the chosen rollouts may be shown, never the own one where it is excluded, within their lengths."""

from __future__ import annotations

import dataclasses
import re
from typing import Any, get_args
from unicodedata import normalize

import pytest
import torch
from factories import group as group_of
from factories import rollout, rollouts_of
from hypothesis import given
from hypothesis import strategies as st

from cepo.algorithms import build_estimator
from cepo.algorithms.references import positive_references, wrong_reference, wrong_references, wrong_rollouts
from cepo.algorithms.settings import NegativeConfig, PositiveConfig, ReferenceSource, TeacherConfig
from cepo.data.prompts import ContextBuilder, Problem
from cepo.metrics import fraction
from cepo.models.processing import Processing
from cepo.trainer.planning import plan_views
from cepo.types import Reference, Rollout, RolloutGroup, TextReference, TokenReference
from testing.hostile import CHARACTERS, GOLDS, MARKS

PLACEMENTS: tuple[Any, ...] = ("user_suffix", "assistant_prefix")
SOURCES = get_args(ReferenceSource)
TEXTS = st.lists(
    st.sampled_from([*GOLDS, *MARKS[:9], *CHARACTERS, "7", "3.14159", " 12,345", "\n", " ", "角", "the area is "]),
    max_size=6,
).map("".join)


@st.composite
def groups(draw: st.DrawFn) -> RolloutGroup:
    """Rollouts in any order with few distinct rewards and answers, so that ties are common."""
    size = draw(st.integers(1, 6))
    rollouts: list[Rollout] = []
    for index in draw(st.permutations(range(size))):
        answer = draw(st.sampled_from([None, "70", "70.0", "40", "4e1"]))
        correct = draw(st.booleans())
        rollouts.append(
            Rollout(
                index=index,
                reward=draw(st.sampled_from([0.0, 0.1, 1.0])),
                correct=correct,
                response_ids=torch.tensor(range(10 * index, 10 * index + draw(st.integers(0, 5))), dtype=torch.int32),
                answer=answer,
                answer_equals_ground_truth=draw(st.booleans()) if answer == "70.0" else correct,
                answer_value={"70": "70", "70.0": "70", "40": "40", "4e1": "40"}.get(answer or ""),
            )
        )
    step = draw(st.integers(0, 3))
    prompt = draw(st.sampled_from(["0", "1"]))
    return RolloutGroup(prompt_id=prompt, ground_truth="70", rollouts=rollouts, seed=1, step=step, solution="It is 70.")


POSITIVE = st.builds(
    PositiveConfig,
    source=st.sampled_from([*SOURCES, "solution", "solution_or_answer"]),
    num_tokens=st.integers(1, 4),
    success_threshold=st.sampled_from([None, 0.1, 1.0]),
    exclude_self=st.booleans(),
)
NEGATIVE = st.builds(
    NegativeConfig,
    source=st.sampled_from(SOURCES),
    num_tokens=st.integers(1, 4),
    select=st.sampled_from(["lowest_reward", "random", "most_frequent"]),
    strict_lowest=st.booleans(),
    fallback=st.sampled_from(["student", "neutral"]),
)


def check_content(reference: Reference, group: RolloutGroup, source: str, num_tokens: int) -> None:
    """A reference holds what its source says of the rollout that it names."""
    assert isinstance(reference, TextReference | TokenReference)
    if reference.source_index is None:
        assert source in ("ground_truth", "solution", "solution_or_answer")
        assert isinstance(reference, TextReference)
        assert reference.text == (group.ground_truth if source == "ground_truth" else group.solution)
        return
    (rollout,) = [member for member in group.rollouts if member.index == reference.source_index]
    if isinstance(reference, TextReference):
        assert source == "peer_answer"
        assert reference.text == rollout.answer
        return
    tokens = tuple(rollout.response_ids.tolist())
    expected = {"peer_full": tokens, "peer_prefix": tokens[:num_tokens], "peer_suffix": tokens[-num_tokens:]}
    assert reference.token_ids == expected[source] != ()


@given(group=groups(), config=POSITIVE)
def test_the_right_side_is_shown_by_right_rollouts(group: RolloutGroup, config: PositiveConfig) -> None:
    """Never its own where it is excluded; None only where no rollout can; the same in whatever order the group is."""

    def can_show(peer: Rollout) -> bool:
        is_right = peer.correct if config.success_threshold is None else peer.reward >= config.success_threshold
        return is_right and says_something(peer, config.source)

    chosen = positive_references(group, config)
    for reader, reference in zip(group.rollouts, chosen, strict=True):
        if not config.source.startswith("peer_"):
            assert reference is not None
            check_content(reference, group, config.source, config.num_tokens)
            continue
        able = {peer.index for peer in group.rollouts if can_show(peer)}
        if config.exclude_self:
            able.discard(reader.index)
        if reference is not None:
            check_content(reference, group, config.source, config.num_tokens)
            assert reference.source_index in able
        else:
            assert not able
    ordered = dataclasses.replace(group, rollouts=sorted(group.rollouts, key=lambda reader: reader.index))
    by_index = {reader.index: reference for reader, reference in zip(group.rollouts, chosen, strict=True)}
    assert positive_references(ordered, config) == [by_index[index] for index in range(len(chosen))]


def says_something(peer: Rollout, source: str) -> bool:
    if source == "peer_answer":
        return peer.answer is not None
    return len(peer.response_ids) > 0


@given(group=groups(), config=NEGATIVE, number=st.integers(0, 4))
def test_the_wrong_side_is_shown_by_wrong_rollouts(group: RolloutGroup, config: NegativeConfig, number: int) -> None:
    """Never one whose answer is right in another spelling, never the own, never two of one value."""
    turned = dataclasses.replace(group, rollouts=group.rollouts[::-1])
    of_group = wrong_reference(group, config)
    of_rollouts = wrong_references(group, config, number)
    assert of_group == wrong_reference(turned, config)
    assert of_rollouts == wrong_references(turned, config, number)[::-1]
    allowed: set[int] = set()
    for peer in wrong_rollouts(group):
        if config.strict_lowest or not peer.answer_equals_ground_truth:
            allowed.add(peer.index)
    if of_group is None and not config.strict_lowest:
        able = {peer.index for peer in group.rollouts if says_something(peer, config.source)}
        assert allowed.isdisjoint(able)

    if of_group is not None:
        check_content(of_group, group, config.source, config.num_tokens)
        assert config.source == "ground_truth" or of_group.source_index in allowed
    values = {peer.index: peer.answer_value for peer in group.rollouts}
    for reader, references in zip(group.rollouts, of_rollouts, strict=True):
        assert len(references) <= number
        for reference in references:
            check_content(reference, group, config.source, config.num_tokens)
            if config.source != "ground_truth":
                assert reference.source_index in allowed - {reader.index}
        if config.source == "peer_answer":
            indices = [reference.source_index for reference in references if reference.source_index is not None]
            values_of_references = {values[index] for index in indices}
            assert len(values_of_references) == len(indices)


@given(
    answers=st.lists(TEXTS, min_size=2, max_size=4),
    data=st.data(),
    cap=st.sampled_from([1, 3, 12]),
    placement=st.sampled_from(PLACEMENTS),
    source=st.sampled_from(["peer_answer", "peer_full", "peer_prefix", "peer_suffix", "solution"]),
)
def test_shown_references_keep_their_length_and_cuts_are_counted(
    tiny_processing: Processing,
    answers: list[str],
    data: st.DataObject,
    cap: int,
    placement: Any,
    source: str,
) -> None:
    """From random texts to the teachers' prompts: what is shown begins like the whole, and no number is cut in two."""
    # 48 tokens hold the question and about 20 more.
    teacher = TeacherConfig(placement=placement, max_reference_tokens=cap)
    contexts = ContextBuilder(tiny_processing, teacher, max_context_length=48)
    problem = Problem(prompt_id="0", text="Find x.", images=(), ground_truth="70", solution=None, columns={})
    live = torch.tensor(data.draw(st.lists(st.booleans(), min_size=len(answers), max_size=len(answers))))
    tokens = [tuple(tiny_processing.encode_text(answer)) or (5,) for answer in answers]
    first = [float(row == 0) for row in range(len(answers))]
    rollouts = rollouts_of(tokens, first, problems=[problem], prompts=[contexts.student(problem)], responses=answers)
    described: list[Rollout] = []
    for row, answer in enumerate(answers):
        described.append(rollout(row, first[row], answer or None, correct=row == 0, ids=tokens[row]))
    prompt_group = dataclasses.replace(group_of(*described, prompt="0"), solution=answers[0])
    wrong_source = "peer_answer" if source == "solution" else source
    positive = {"source": source, "num_tokens": 4}
    negative = {"source": wrong_source, "num_tokens": 4}
    estimator = build_estimator("cepo", {"positive": positive, "negative": negative})
    chosen = estimator.references(prompt_group)
    views, _ = plan_views(rollouts, live, [prompt_group], estimator, contexts)
    for view in views:
        cut = 0
        for row, scored in view.rows.items():
            assert live[row]
            reference = chosen[view.name][row]
            text = view.references[row]
            assert reference is not None
            assert text
            # Tokenizers compose accents.
            whole = normalize("NFC", contexts.whole_text(reference))
            composed = normalize("NFC", text)
            assert whole.startswith(composed), "a reference is cut at its end"
            assert len(scored.context.token_ids) <= 48
            if isinstance(reference, TextReference):
                limit = cap if reference.max_tokens is None else reference.max_tokens
                assert len(tiny_processing.encode_text(text)) <= limit
            left_out = whole[len(composed) :]
            is_split = re.search(r"\d[.,]?\Z", composed) and re.match(r"[.,]?\d", left_out)
            assert not is_split, "a number is split"
            cut += composed != whole
        assert view.metrics[f"references/{view.name}_cut"] == fraction(cut, len(view.rows))
        empty = view.metrics[f"references/{view.name}_empty"]
        without_room = view.metrics[f"references/{view.name}_without_room"]
        assert len(view.rows) + empty.value + without_room.value <= empty.weight <= int(live.sum())


@pytest.mark.parametrize("cap", range(1, 16))
def test_a_number_behind_composed_letters_is_not_split(tiny_processing: Processing, cap: int) -> None:
    """Tokenizers compose accents, so that a text is longer than what its tokens say."""
    contexts = ContextBuilder(tiny_processing, TeacherConfig(max_reference_tokens=cap), max_context_length=100)
    text = contexts.reference_text(TextReference(text="a\u0301" * 4 + " 12345"))
    assert re.sub(r"\D", "", text) in ("", "12345")
