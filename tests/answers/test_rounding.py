"""Which decimals are roundings of another number: those are right enough never to be shown to a teacher as wrong."""

from __future__ import annotations

import pytest

from cepo.answers.equality import is_rounding, states_the_same


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
