"""Any response to any ground truth is graded by every shipped reward: within its scale, alone, and what it says is consistent."""

from __future__ import annotations

import math
from typing import Any

import pytest
from fuzzing import only_our_errors
from hypothesis import given
from hypothesis import strategies as st
from shipped_rewards import SHIPPED, needed

from cepo.answers import (
    LETTERS,
    chosen,
    decimal_value,
    equal,
    final_answer,
    is_rounding,
    marked_answer,
    normal_form,
    states_the_same,
    value_key,
)
from cepo.rewards.benchmark import KINDS, kind_of, options_in_text
from cepo.rewards.contract import LoadedReward, load_reward_function
from testing.hostile import BOMBS, CHARACTERS, GOLDS, LATEX, MARKS

PIECES = st.one_of(
    st.sampled_from(GOLDS),
    st.sampled_from(LATEX),
    st.sampled_from(["7", "0.5", "-", "1,000", "12.50", r"\frac{1}{2}", "x", "cm", "%", "^", "\n", " ", "Answer: 7"]),
    st.sampled_from(["<answer>", "</answer>", r"\boxed{", "}", "<think>", "</think>", "(A)", "B.", "A, C", "(B) red"]),
    st.sampled_from([*MARKS, *CHARACTERS]),
    st.text(max_size=5),
)  # fmt: skip
TEXTS = st.lists(PIECES, max_size=8).map("".join) | st.sampled_from(BOMBS)
ANSWERS = st.sampled_from(GOLDS) | TEXTS
NUMBERS = st.one_of(
    st.integers(-(10**6), 10**6).map(str),
    st.decimals(-1000, 1000, places=3).map(str),
    st.tuples(st.integers(-99, 99), st.integers(1, 99)).map(lambda pair: rf"\frac{{{pair[0]}}}{{{pair[1]}}}"),
    st.tuples(st.integers(1, 99), st.integers(2, 99)).map(lambda pair: rf"{pair[0]} \sqrt {{ {pair[1]} }}"),
    st.integers(1, 99).map(lambda number: rf"{number} \pi"),
)
CHOICES = st.lists(
    st.sampled_from(["red", "blue", "7", "", "A", r"\frac{1}{2}", "RED"]) | st.text(max_size=4), max_size=10
)


@pytest.fixture(scope="module", params=SHIPPED, ids=lambda spec: "/".join(spec.split("/")[-2:]))
def reward(request: pytest.FixtureRequest) -> LoadedReward:
    return load_reward_function(request.param, needed(request.param))


SAMPLES = st.fixed_dictionaries(
    {
        "response": TEXTS | st.tuples(TEXTS, ANSWERS).map(lambda pair: rf"{pair[0]} \boxed{{{pair[1]}}}"),
        "response_length": st.integers(1, 64),
        "ground_truth": ANSWERS,
        "prompt": TEXTS,
    },
    optional={
        "answer_kind": st.none() | st.sampled_from(KINDS),
        "choices": st.none() | CHOICES,
        "tolerance": st.none() | st.floats(0, 1),
    },
)


@given(samples=st.lists(SAMPLES, min_size=1, max_size=3))
def test_any_samples_get_scores_within_their_scale(reward: LoadedReward, samples: list[dict[str, Any]]) -> None:
    scores = None
    with only_our_errors():
        scores = reward.score(samples)
    assert scores is not None, "a reward refused a sample"
    lowest = -1.0 if reward.path.name == "dapo.py" else 0.0
    for sample, score in zip(samples, scores, strict=True):
        assert {"overall", "accuracy"} <= set(score)
        assert score["accuracy"] in (lowest, 1.0)
        assert 2 * lowest <= score["overall"] <= 1.0
        assert reward.score([sample]) == [score]


@given(before=TEXTS, answer=ANSWERS, after=st.text(alphabet="abc .\n$|"))
def test_the_last_whole_box_is_the_answer(before: str, answer: str, after: str) -> None:
    """Text without braces and tags behind it changes nothing; what is found stands in the response."""
    response = rf"{before}\boxed{{{answer}}}{after}"
    marked = marked_answer(response)
    assert marked is None or marked.strip() == marked != ""
    assert marked is None or marked in response
    assert marked_answer(response + after) == marked
    plain = answer.replace("{", "").replace("}", "").replace("\\", "").strip()
    if before.count("\\") == 0 and before.count("{") == before.count("}") == 0:
        assert marked_answer(rf"{before}\boxed{{{plain}}}{after}") == (plain or None)
    for kind in ("numeric", "text", "yes_no"):
        assert marked is None or "</think>" in response or final_answer(response, kind) == marked


@given(first=ANSWERS, second=ANSWERS)
def test_equality_of_any_answers_is_consistent(first: str, second: str) -> None:
    """An answer equals itself and its spelling; equal answers state the same; texts of one value have one key."""
    spelled = normal_form(first)
    assert len(first) > 512 or equal(first, first) is bool(spelled)
    assert normal_form(spelled) == spelled
    if len(first) <= 512 and spelled:
        assert equal(spelled, first)
        assert value_key(spelled) == value_key(first)
    if equal(first, second):
        assert states_the_same(first, second)
    if is_rounding(first, second):
        assert is_rounding(second, first)
    value = decimal_value(first)
    assert value is None or math.isfinite(value)


@given(number=NUMBERS, other=NUMBERS, unit=st.sampled_from(["", r"^\circ", " cm", r" \text{ units}", ".", "°"]))
def test_numbers_are_right_where_their_values_are_equal(number: str, other: str, unit: str) -> None:
    values = decimal_value(number), decimal_value(other)
    assert values[0] is not None
    assert values[1] is not None
    dressed = f"${number}{unit}$" if unit not in (".", " cm") else number + unit
    assert equal(dressed, number)
    assert equal(f"x = {number}", number)
    gap = abs(values[0] - values[1])
    if gap > 1e-3 * max(abs(values[0]), abs(values[1])):
        assert not equal(number, other)
    elif gap == 0:
        assert equal(number, other)
        assert equal(other, number)
        assert value_key(number) == value_key(other)


@given(text=TEXTS, choices=CHOICES)
def test_letters_are_among_the_options(text: str, choices: list[str]) -> None:
    letters = chosen(text, choices)
    assert letters <= set(LETTERS[: len(choices)] or LETTERS)
    options = options_in_text(text)
    assert len(options) != 1
    assert len(options) <= len(LETTERS)
    assert kind_of(text) in KINDS
