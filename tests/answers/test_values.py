"""Keys of answers of one value, and which decimals are roundings: those are never shown to a teacher as wrong."""

from __future__ import annotations

import pytest

from cepo.answers import decimal_value, is_rounding, states_the_same, value_key


def test_answers_of_one_value_share_a_key() -> None:
    """Numbers by value, words in any case; a rounding is another value, and so is another text."""
    halves = ("0.5", "1/2", r"\frac{1}{2}", r"50\%", "x = .5", r"2^{-1}", r"\sin 30^\circ")
    assert len({value_key(text) for text in halves}) == 1
    assert value_key(r"5 \sqrt { 3 }") == value_key(r"\sqrt{75}") != value_key("8.66")
    assert value_key("Not enough information") == value_key("not enough  information") != value_key("40")
    assert value_key("-0") == value_key("0.0") == "0"
    assert value_key("9" * 600) == "9" * 600


def test_what_states_no_number_has_its_spelling_as_a_key() -> None:
    assert value_key("0/0") == "0/0" != value_key(r"\frac{0}{0}")
    assert value_key("99999!") == "99999!", "a value too large to be computed"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1,234.5 cm", 1234.5),
        (r"20\sqrt{3} \approx 34.6", 34.6),
        (r"12\tan 45^\circ", 12.0),
        ("red", None),
        ("9" * 600, None),
    ],
)
def test_a_number_has_a_decimal_value(text: str, value: float | None) -> None:
    assert decimal_value(text) == value


@pytest.mark.parametrize(
    ("rounded", "exact", "share"),
    [("8.7", r"5 \sqrt { 3 }", 0.0046), ("21", "20.6", 0.019), ("10", "10.5", 0.048), ("0.33", r"\frac{1}{3}", 0.01)],
)
def test_a_decimal_near_the_number_is_a_rounding(rounded: str, exact: str, share: float) -> None:
    """`share` is the difference as a share of the larger number, at most 5 %."""
    assert share <= 0.05
    assert is_rounding(rounded, exact)
    assert is_rounding(exact, rounded)
    assert states_the_same(rounded, exact)


@pytest.mark.parametrize(
    ("other", "exact", "share"),
    [
        ("10", "10.6", 0.057),
        ("1", "1.4", 0.29),
        ("2", "1.6", 0.2),
        ("2", "2.5", 0.2),
        ("0", "0.4", 1.0),
        ("3", r"\pi+0.4", 0.153),
    ],
)
def test_one_digit_that_loses_more_than_5_percent_is_none(other: str, exact: str, share: float) -> None:
    """Each is the number rounded or truncated to its places."""
    assert share > 0.05
    assert not is_rounding(other, exact)
    assert not is_rounding(exact, other)
    assert not states_the_same(other, exact)
