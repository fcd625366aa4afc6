"""The tables of units and signs in `cepo/answers/*.toml`."""

from __future__ import annotations

from collections import Counter

from cepo.answers import equal
from cepo.answers.tables import SIGNS, UNITS

SPELLINGS = [row[0].split() for row in UNITS["without_prefixes"]]


def test_no_unit_is_spelled_as_another_one() -> None:
    counts = Counter(spelling for spellings in SPELLINGS for spelling in spellings)
    assert [spelling for spelling, count in counts.items() if count > 1] == []


def test_all_spellings_of_a_unit_are_one() -> None:
    """`7 mile` is `7 mi`; money in signs and codes stands on either side of its value."""
    unequal: list[str] = []
    for first, *further_spellings in SPELLINGS:
        unequal += [spelling for spelling in further_spellings if not equal(f"7 {spelling}", f"7 {first}")]
    assert unequal == []


def test_a_unit_is_not_a_thousand_of_it() -> None:
    confused_units = [first for first, *_ in SPELLINGS if equal(f"7000 {first}", f"7 {first}")]
    assert confused_units == []


def test_numbers_in_words_are_in_order() -> None:
    words = [*UNITS["small_numbers"].split(), "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
    values = [*range(20), *range(30, 100, 10)]
    assert [word for word, value in zip(words, values, strict=True) if not equal(word, str(value))] == []


def test_no_sign_stands_for_a_character_that_is_replaced_itself() -> None:
    signs_of_signs = [sign for sign, text in SIGNS["characters"].items() if not text.isascii()]
    assert signs_of_signs == []
