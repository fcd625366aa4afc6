"""A right and a wrong response side by side: which ones, how their tokens are coloured, and the words that are named."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from run_folders import group, rollout

from cepo.report.html_snippet import fragment
from cepo.report.response_pair import clarity, clearest_pair, contrast_of
from cepo.run_folder.trace import RolloutRecord


def credited(advantages: Sequence[float], tokens: Sequence[str], *, right: bool) -> RolloutRecord:
    return replace(rollout(right=right, tokens=tokens, delta=None), token_advantages=advantages)


def test_the_clearest_responses_have_few_tokens_above_their_mean() -> None:
    """Advantages 2, 1, 1, 0 have shares 2, 1, 1, 0: the largest excesses 0, 0 and 1, less half of |-1|, make 0.5."""
    tokens = list("abcd")
    clear = credited([2.0, 1.0, 1.0, 0.0], tokens, right=True)
    assert clarity(clear) == (True, pytest.approx(0.5))
    assert clarity(credited([1.0] * 4, tokens, right=True)) == (False, 0.0)
    assert clarity(rollout(right=True, delta=-0.25)) == (False, pytest.approx(0.25))
    uniform = credited([1.0] * 4, tokens, right=True)
    uniform_and_wrong = credited([-1.0] * 4, tokens, right=False)
    rank, places = clearest_pair([uniform, clear, uniform_and_wrong])
    assert rank == (True, False, 0.0)
    assert places == [1, 2]
    assert clearest_pair([clear])[0] < rank


def test_what_is_named_is_the_whole_word_of_a_token() -> None:
    """Of "3*9=27" the tokens "3" and "2" have most: the words are "3" and "27". A share below 1.02 is not named."""
    tokens = ("3", "*", "9", "=", "2", "7", ".")
    advantages = [1.5, 1.0, 1.0, 1.0, 1.4, 0.6, 0.5]
    right = credited(advantages, tokens, right=True)
    wrong = credited([-1.01, -1.0, -1.0, -1.0, -1.0, -1.0, -0.99], tokens, right=False)
    step = group(4, [wrong, right])
    contrast = contrast_of(step, [1, 0], method="cepo", baseline="grpo", uniform_advantages=[1.0, -1.0])
    assert contrast.sentence == (
        "cepo credits “3” and “27” of the right response most; grpo treats every token of a response alike."
    )
    first, second = contrast.sides
    assert first.verdict == "right"
    assert first.place == 1
    assert second.verdict == "wrong"
    assert second.place == 0
    assert contrast.low == pytest.approx(0.5)
    assert contrast.high == pytest.approx(1.5)
    drawn_tokens = first.rows[0].tokens
    assert [token.percent for token in drawn_tokens] == [100, 0, 0, 0, 80, 80, 100]
    assert [token.side for token in drawn_tokens][4:] == ["more", "less", "less"]


def test_credit_of_the_other_sign_has_the_other_colour() -> None:
    """Shares of 4, 1 and -1: the span ends at 2, so that 4 is full, 1 white, and -1 full in the other colour."""
    response = credited([-4.0, -1.0, 1.0], list("abc"), right=False)
    [side] = contrast_of(group(1, [response]), [0], method="x", uniform_advantages=[-1.0]).sides
    drawn_tokens = side.rows[0].tokens
    assert [token.side for token in drawn_tokens] == ["less", "more", "more"]
    assert [token.percent for token in drawn_tokens] == [100, 0, 100]


@pytest.mark.parametrize("advantages", [[0.0, 0.0, 0.0], [1.0, -1.0, 0.0], [float("nan"), 1.0, 1.0]])
def test_a_response_without_uniform_credit_is_shown_even(advantages: list[float]) -> None:
    response = credited(advantages, list("abc"), right=True)
    contrast = contrast_of(group(1, [response]), [0], method="x")
    assert contrast.sentence == "Here x gives nearly every token of a response the same."
    assert len(contrast.sides[0].rows[0].tokens) == 3


def test_a_response_without_tokens_is_shown_as_nothing() -> None:
    empty = credited([], [], right=False)
    assert clarity(empty) == (False, 0.0)
    [side] = contrast_of(group(1, [empty]), [0], method="x").sides
    assert side.rows[0].tokens == []


def test_the_uniform_method_is_shown_once() -> None:
    response = credited([1.0] * 3, list("abc"), right=True)
    contrast = contrast_of(group(1, [response]), [0], method="grpo", baseline="grpo", uniform_advantages=[1.0])
    assert contrast.sentence == "grpo gives every token of a response the same credit or blame."
    assert len(contrast.sides[0].rows) == 1


def test_the_fragment_has_texts_as_texts() -> None:
    """Markup, control characters, and marks that turn the text around, in tokens, problem and answer."""
    hostile = "</div><script>alert(1)</script>\x1b\u202e"
    response = credited([1.0, 2.0], [hostile, "\n"], right=True)
    step = group(1, [response], problem=hostile, ground_truth=hostile)
    html = fragment(contrast_of(step, [0], method=hostile))
    assert "<script" not in html
    assert "\x1b" not in html
    assert "\u202e" not in html
    assert html.count("<div") == html.count("</div>")
    assert "⟨U+202E⟩" in html
    assert "↵" in html
