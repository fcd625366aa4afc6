"""Answers whose signs are no arithmetic: ranges, spans of years, telephone numbers, orders, sizes, and
chemical formulas.

`1998-2005` is not -7, `555-0132` is not 423, and `CO2` is not C·O·2.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from cepo.answers.characters import plain_characters
from cepo.answers.unit_table import known_unit

_MARKUP = re.compile(r"\\(?:text|textrm|mathrm|textbf|mathbf|ce)(?![A-Za-z])|\*\*")
_WORD = re.compile("[A-Za-z]+")
_NUMBER = r"\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?"
_UNIT = r"\s*(?:\\?%|\^\\circ|(?:[A-Za-z]{2,}|(?<=[\d\s])[A-Za-z])(?:[ /][A-Za-z]+)*(?:\^?[23])?|[\u4e00-\u9fff]+)"
_MONEY = r"(?:\\\$|[$€£¥]|)"
_RANGE = re.compile(
    rf"(?:from\s+|(?P<between>between\s+))?(?P<money>{_MONEY})\s*(?P<first>{_NUMBER})(?P<first_unit>{_UNIT})?"
    rf"\s*(?P<sign>-+|~|to(?=\s)|and(?=\s))\s*(?P<second_money>{_MONEY})\s*(?P<second>{_NUMBER})(?P<unit>{_UNIT})?",
    re.IGNORECASE,
)
_SPAN_OF_YEARS = re.compile(r"(?:1[5-9]|20)\d\d\s*-\s*(?:\d\d|(?:1[5-9]|20)\d\d)")
_ORDER = re.compile(r"\d+(?:\s*-\s*\d+){2,}")
_DIGITS = re.compile(r"\d+")
_DECIMAL = re.compile(r"\d+(?:\.\d+)?")
_SIDE = rf"(?:{_NUMBER})(?:{_UNIT})?"
_TIMES = r"\s*(?:x|X|\\times|by)\s*(?=\d)"
_SIZE = re.compile(rf"{_SIDE}(?:{_TIMES}{_SIDE})+")
_DIGITS_AND_SEPARATORS = re.compile(r"[+\d\s()-]+")
_TELEPHONE_NUMBER = re.compile(r"(?:\+?\d{1,3}[\s-]*)?(?:\(\d{2,5}\)|\d{2,5})(?:[\s-]*\d{2,5}){1,4}")
_FEWEST_DIGITS_OF_A_TELEPHONE_NUMBER = 7


@dataclass(frozen=True)
class Range:
    """A range between two `ends`, each with its unit, as texts."""

    ends: tuple[str, str]
    sign: str
    is_arithmetic: bool
    """Whether the text may also be a difference: `180-60`, but not `10-20` or `1998-2005`."""


def range_of(text: str) -> Range | None:
    """Returns the range that a text states: `10-20`, `10 to 20 cm`, `between 10 and 20`; else None."""
    plain = _plain(text)
    match = _RANGE.fullmatch(plain)
    if match is None:
        return None
    sign = match["sign"].lower()
    if (sign == "and") != (match["between"] is not None):
        return None
    money = match["money"]
    unit = match["unit"] or ""
    first_unit = match["first_unit"] or unit
    first = match["first"].replace(",", "")
    second = match["second"].replace(",", "")
    is_ascending = float(first) < float(second)
    is_apart = unit.startswith(" ") or " " not in plain
    if not _are_units(first_unit, unit, may_be_letters=is_ascending and is_apart):
        return None  # algebra such as `2ab-3cd` and `2 - 3m`
    has_unit = bool(money or unit)
    is_difference = sign == "-" and not is_ascending and not has_unit
    is_plain = not first.startswith("0") and not second.startswith("0") and not _SPAN_OF_YEARS.fullmatch(plain)
    return Range(
        ends=(f"{money}{first}{first_unit}", f"{match['second_money'] or money}{second}{unit}"),
        sign="to" if sign == "to" and not plain.lower().startswith("from") else "-",
        is_arithmetic=is_difference and is_plain,
    )


def _are_units(first_unit: str, second_unit: str, may_be_letters: bool) -> bool:
    """Returns whether two texts may be the units of a range; single letters are rather variables."""
    if first_unit and not second_unit:
        return False
    words = _WORD.findall(f"{first_unit} {second_unit}")
    if any(len(word) <= 2 and known_unit(word) is None for word in words):
        return False
    has_single_letter = any(len(word) == 1 for word in words)
    return not has_single_letter or (may_be_letters and first_unit == second_unit)


def order_of(text: str) -> str:
    """Returns an order such as `5-2-3-4-1` without spaces, or nothing."""
    plain = _plain(text)
    return re.sub(r"\s", "", plain) if _ORDER.fullmatch(plain) else ""


def telephone_number_of(text: str) -> str:
    """Returns the digits of a telephone number such as `(212) 555-0132`, or nothing."""
    plain = _plain(text)
    digits = re.sub(r"\D", "", plain)
    is_written_as_one = _TELEPHONE_NUMBER.fullmatch(plain) is not None and any(sign in plain for sign in "-()")
    is_span_of_years = _SPAN_OF_YEARS.fullmatch(plain) is not None
    is_long = len(digits) >= _FEWEST_DIGITS_OF_A_TELEPHONE_NUMBER
    return digits if is_written_as_one and is_long and not is_span_of_years else ""


def same_telephone_number(answer: str, truth: str) -> bool:
    """Returns whether an answer has the digits of a telephone number, and nothing else but its separators."""
    plain = _plain(answer)
    digits = re.sub(r"\D", "", plain)
    return _DIGITS_AND_SEPARATORS.fullmatch(plain) is not None and digits == telephone_number_of(truth)


def is_positive_difference(text: str) -> bool:
    """Returns whether a text may be arithmetic rather than digits in groups: `180-90-45`, but not `555-0132`."""
    first, *subtrahends = _DIGITS.findall(text)
    has_leading_zero = any(number.startswith("0") for number in (first, *subtrahends))
    return not has_leading_zero and int(first) > sum(map(int, subtrahends))


def size_of(text: str) -> tuple[str, ...]:
    """Returns the sides of a size such as `8 x 10`, `3 \\times 4` or `8.5 by 11 in`, each with the unit; else nothing."""
    plain = _plain(text)
    if not _SIZE.fullmatch(plain):
        return ()
    sides = re.split(_TIMES, plain.replace(",", ""))
    units = [_DECIMAL.sub("", side, count=1) for side in sides]
    if any(unit and known_unit(unit.strip()) is None for unit in units[:-1]):
        return ()  # `2a \\times 3b`
    common_unit = units[-1]
    return tuple(side if unit else side + common_unit for side, unit in zip(sides, units, strict=True))


def _plain(text: str) -> str:
    """Returns a text without markup: dollar signs around it are the delimiters of mathematics, others are signs of money."""
    plain = _MARKUP.sub(" ", plain_characters(text)).replace("{", " ").replace("}", " ").strip(" .,")
    if plain.startswith("$") and plain.endswith("$"):
        plain = plain[1:-1]
    return " ".join(plain.split())


_SYMBOLS_OF_ELEMENTS = """
    H He Li Be B C N O F Ne Na Mg Al Si P S Cl Ar K Ca Sc Ti V Cr Mn Fe Co Ni Cu Zn Ga Ge As Se Br Kr Rb Sr Y Zr Nb Mo Tc Ru Rh
    Pd Ag Cd In Sn Sb Te I Xe Cs Ba La Ce Hf Ta W Re Os Ir Pt Au Hg Tl Pb Bi Po At Rn Fr Ra Ac Th Pa U Np Pu
"""
_ELEMENTS = frozenset(_SYMBOLS_OF_ELEMENTS.split())
_ATOM = re.compile(r"[A-Z][a-z]?")
_MOLECULE = r"\d*(?:[A-Z][a-z]?\d*|\((?:[A-Z][a-z]?\d*){2,}\)\d*){1,12}"
_FORMULA = re.compile(rf"{_MOLECULE}(?:\\cdot{_MOLECULE}|\^?\d?[+-])?")


def formula_of(text: str) -> str:
    r"""Returns a chemical formula without markup: `CO2` for `CO_2` and `\mathrm{CO_2}`; nothing for other texts.

    A formula has an index or a charge, and elements alone: `AB_2` is none.
    """
    plain = re.sub(r"[\s_]|\\[,;! ]", "", _plain(text))
    plain = re.sub(r"\^(?=[+-])", "", plain)
    if not _FORMULA.fullmatch(plain) or not all(atom in _ELEMENTS for atom in _ATOM.findall(plain)):
        return ""
    has_index_or_charge = re.search(r"[A-Za-z)](?:[\d+^]|-\Z)", plain) is not None
    return plain if has_index_or_charge else ""
