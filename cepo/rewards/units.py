r"""Reads units: `km/h`, `\text{ cm}^2`, `square feet`, `°C`, `\$`, and words such as `apples`.

A unit is a factor times a product of basic units, so that equal quantities can be compared: 5 m is 500 cm. A word that
is no known unit is a basic unit of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction

from cepo.rewards.numbers import PI, Real, scaled, shifted
from cepo.rewards.tokens import Group, Node, Token, is_number, is_sign, text_of
from cepo.rewards.typesetting import DEGREE
from cepo.rewards.writing import ATTACHED_SYMBOLS


@dataclass(frozen=True)
class Unit:
    """A unit: a value in it, times `factor`, plus `offset`, is the value in basic units.

    Attributes:
        powers: the exponent of each basic unit, without zeros.
        radians: the power of 180/π in the factor.
        is_bare_degree: whether it is the degree sign alone, which may stand for an angle or a temperature.
        is_pound_in_words: whether it is the word pound alone, which may stand for a mass or for money.
    """

    powers: frozenset[tuple[str, int]]
    factor: Fraction = Fraction(1)
    offset: Fraction = Fraction(0)
    radians: int = 0
    is_bare_degree: bool = field(default=False, compare=False)
    is_pound_in_words: bool = field(default=False, compare=False)

    def times(self, other: Unit, exponent: int) -> Unit:
        """Returns the product with a power of another unit."""
        powers = dict(self.powers)
        for name, power in other.powers:
            powers[name] = powers.get(name, 0) + power * exponent
        return Unit(
            frozenset((name, power) for name, power in powers.items() if power),
            self.factor * other.factor**exponent,
            other.offset if not self.powers and exponent == 1 else Fraction(0),
            self.radians + other.radians * exponent,
            other.is_bare_degree and not self.powers and exponent == 1,
            other.is_pound_in_words and not self.powers and exponent == 1,
        )

    def by(self, factor: Fraction | int | str) -> Unit:
        """Returns the unit that is `factor` times as large."""
        return Unit(self.powers, self.factor * Fraction(factor), radians=self.radians)

    def in_basic_units(self, value: Real) -> Real:
        """Returns a value in this unit as a value in basic units."""
        value = scaled(value, self.factor)
        for _ in range(abs(self.radians)):
            value = scaled(value, 180 / PI if self.radians > 0 else PI / 180)
        return shifted(value, self.offset) if self.offset else value


NO_UNIT = Unit(frozenset())


def _basic(name: str, factor: Fraction | int | str = 1) -> Unit:
    return Unit(frozenset({(name, 1)}), Fraction(factor))


_METRE = _basic("metre")
_KILOGRAM = _basic("kilogram")
_GRAM = _basic("kilogram", "0.001")
_SECOND = _basic("second")
_HOUR = _basic("second", 3600)
_AMPERE = _basic("ampere")
_LITRE = Unit(frozenset({("metre", 3)}), Fraction("0.001"))
_MILE = _basic("metre", "1609.344")
_MONTH = _basic("month")
_MONEY = _basic("dollar")
_STERLING = _basic("sterling")
_HERTZ = NO_UNIT.times(_SECOND, -1)
_NEWTON = _KILOGRAM.times(_METRE, 1).times(_SECOND, -2)
_PASCAL = _NEWTON.times(_METRE, -2)
_JOULE = _NEWTON.times(_METRE, 1)
_WATT = _JOULE.times(_SECOND, -1)
_COULOMB = _AMPERE.times(_SECOND, 1)
_VOLT = _WATT.times(_AMPERE, -1)
_OHM = _VOLT.times(_AMPERE, -1)
_FARAD = _COULOMB.times(_VOLT, -1)
_TESLA = _VOLT.times(_SECOND, 1).times(_METRE, -2)
_HENRY = _OHM.times(_SECOND, 1)
_BIT = _basic("bit")
_BYTE = _basic("bit", 8)
_CALORIE = _JOULE.by("4.184")
_KM_PER_HOUR = _METRE.times(_HOUR, -1).by(1000)
_SQUARE_METRE = _METRE.times(_METRE, 1)
_TURN = _basic("degree", 360)
_ELECTRON_VOLT = _JOULE.by("1.602176634e-19")
_OUNCE = _basic("kilogram", "0.028349523125")
_POUND = _basic("kilogram", "0.45359237")
_POUND_FORCE = _POUND.times(_METRE, 1).times(_SECOND, -2).by("9.80665")

_DEGREE = Unit(frozenset({("degree", 1)}), is_bare_degree=True)
_CELSIUS = Unit(frozenset({("kelvin", 1)}), offset=Fraction("273.15"))
_FAHRENHEIT = Unit(frozenset({("kelvin", 1)}), Fraction(5, 9), Fraction("459.67") * Fraction(5, 9))

_SYMBOLS_WITH_PREFIXES: dict[str, Unit] = {
    "m": _METRE, "g": _GRAM, "s": _SECOND, "A": _AMPERE, "N": _NEWTON, "J": _JOULE, "W": _WATT, "V": _VOLT, "Hz": _HERTZ,
    "Pa": _PASCAL, "C": _COULOMB, "F": _FARAD, "T": _TESLA, "H": _HENRY, "L": _LITRE, "l": _LITRE, "mol": _basic("mole"),
    "cd": _basic("candela"), "eV": _ELECTRON_VOLT,
    "cal": _CALORIE, "Wh": _WATT.times(_HOUR, 1), "bit": _BIT, "b": _BIT, "B": _BYTE,
    "bar": _PASCAL.by(100_000), "K": _basic("kelvin"), "lm": _basic("lumen"),
}  # fmt: skip
_PREFIXES = {
    "p": -12, "n": -9, "u": -6, "m": -3, "c": -2, "d": -1, "h": 2, "k": 3, "K": 3, "M": 6, "G": 9, "T": 12,
}  # fmt: skip
_NAMES_WITH_PREFIXES: dict[str, Unit] = {
    "meter": _METRE, "metre": _METRE, "gram": _GRAM, "gramme": _GRAM, "second": _SECOND, "ampere": _AMPERE, "amp": _AMPERE,
    "newton": _NEWTON, "joule": _JOULE, "watt": _WATT, "volt": _VOLT, "hertz": _HERTZ, "pascal": _PASCAL, "coulomb": _COULOMB,
    "farad": _FARAD, "tesla": _TESLA, "henry": _HENRY, "liter": _LITRE, "litre": _LITRE, "ohm": _OHM, "mole": _basic("mole"),
    "kelvin": _basic("kelvin"), "calorie": _CALORIE, "bit": _BIT, "byte": _BYTE, "watthour": _WATT.times(_HOUR, 1),
}  # fmt: skip
_NAME_PREFIXES = {
    "pico": -12, "nano": -9, "micro": -6, "milli": -3, "centi": -2, "deci": -1, "deca": 1, "hecto": 2, "kilo": 3, "mega": 6,
    "giga": 9, "tera": 12,
}  # fmt: skip
_OTHERS: dict[str, Unit] = {
    "min": _basic("second", 60), "minute": _basic("second", 60), "h": _HOUR, "hr": _HOUR, "hour": _HOUR, "sec": _SECOND,
    "day": _basic("second", 86_400), "week": _basic("second", 604_800), "month": _MONTH, "year": _basic("month", 12),
    "yr": _basic("month", 12), "decade": _basic("month", 120), "century": _basic("month", 1200),
    "in": _basic("metre", "0.0254"), "inch": _basic("metre", "0.0254"), "inche": _basic("metre", "0.0254"),
    "foot": _basic("metre", "0.3048"), "feet": _basic("metre", "0.3048"), "ft": _basic("metre", "0.3048"),
    "yard": _basic("metre", "0.9144"), "yd": _basic("metre", "0.9144"), "mile": _MILE, "mi": _MILE,
    "acre": _SQUARE_METRE.by("4046.8564224"), "ha": _SQUARE_METRE.by(10_000),
    "hectare": _SQUARE_METRE.by(10_000), "cc": _LITRE.by("0.001"),
    "gallon": _LITRE.by("3.785411784"),
    "gal": _LITRE.by("3.785411784"),
    "quart": _LITRE.by("0.946352946"),
    "pint": _LITRE.by("0.473176473"),
    "cup": _LITRE.by("0.2365882365"),
    "lb": _POUND, "pound": replace(_POUND, is_pound_in_words=True), "oz": _OUNCE, "ounce": _OUNCE,
    "ton": _basic("kilogram", 1000), "tonne": _basic("kilogram", 1000), "t": _basic("kilogram", 1000),
    "kilo": _KILOGRAM, "gm": _GRAM, "kgs": _KILOGRAM, "Nm": _JOULE, "kilohm": _OHM.by(1000), "megohm": _OHM.by(10**6),
    "tablespoon": _LITRE.by("0.01478676478125"), "tbsp": _LITRE.by("0.01478676478125"),
    "teaspoon": _LITRE.by("0.00492892159375"), "tsp": _LITRE.by("0.00492892159375"),
    "electronvolt": _ELECTRON_VOLT, "hp": _WATT.by("745.69987158227022"), "horsepower": _WATT.by("745.69987158227022"),
    "psi": _POUND_FORCE.times(_basic("metre", "0.0254"), -2), "mmHg": _PASCAL.by("133.322387415"),
    "rpm": _TURN.times(_basic("second", 60), -1), "fortnight": _basic("second", 1_209_600), "centuries": _basic("month", 1200),
    "henries": _HENRY,
    "mph": _MILE.times(_HOUR, -1), "kmh": _KM_PER_HOUR,
    "kph": _KM_PER_HOUR,
    "kmph": _KM_PER_HOUR, "mps": _METRE.times(_SECOND, -1),
    "fps": _basic("metre", "0.3048").times(_SECOND, -1), "knot": _KM_PER_HOUR.by("1.852"),
    "atm": _PASCAL.by(101_325),
    "degree": _DEGREE, "deg": _DEGREE, DEGREE: _DEGREE, "rad": Unit(frozenset({("degree", 1)}), radians=1),
    "radian": Unit(frozenset({("degree", 1)}), radians=1), "revolution": _TURN, "turn": _TURN,
    "arcminute": _basic("degree", Fraction(1, 60)), "arcmin": _basic("degree", Fraction(1, 60)),
    "arcsecond": _basic("degree", Fraction(1, 3600)), "arcsec": _basic("degree", Fraction(1, 3600)),
    "celsius": _CELSIUS, "centigrade": _CELSIUS, "fahrenheit": _FAHRENHEIT,
    "dollar": _MONEY, "USD": _MONEY, "usd": _MONEY, r"\$": _MONEY, "$": _MONEY, "buck": _MONEY,
    "cent": _basic("dollar", "0.01"), "¢": _basic("dollar", "0.01"), "€": _basic("euro"), "euro": _basic("euro"),
    "EUR": _basic("euro"), "£": _STERLING, "GBP": _STERLING, "quid": _STERLING,
    "pence": _STERLING.by("0.01"), "¥": _basic("yen"), "yen": _basic("yen"),
    "yuan": _basic("yuan"), "RMB": _basic("yuan"), "CNY": _basic("yuan"), "₹": _basic("rupee"), "rupee": _basic("rupee"),
    "Rs": _basic("rupee"), r"\Omega": _OHM, "people": _basic("person"), "child": _basic("child"),
    "children": _basic("child"), "men": _basic("man"), "women": _basic("woman"), "mice": _basic("mouse"),
    "Å": _basic("metre", "1e-10"), "Mbps": _BIT.times(_SECOND, -1).by(10**6),
}  # fmt: skip
_CURRENCIES = {r"\$", "$", "€", "£", "¥", "₹", "USD", "EUR", "GBP", "CNY", "RMB", "Rs"}
_OF_TWO_WORDS: dict[tuple[str, str], Unit] = {
    ("fl", "oz"): _LITRE.by("0.0295735295625"), ("fluid", "ounce"): _LITRE.by("0.0295735295625"),
    ("metric", "ton"): _basic("kilogram", 1000), ("metric", "tonne"): _basic("kilogram", 1000),
    ("electron", "volt"): _ELECTRON_VOLT, ("nautical", "mile"): _basic("metre", 1852),
    ("light", "year"): _basic("metre", 9_460_730_472_580_800),
}  # fmt: skip
_NO_LETTERS = {"unit", "units"}
"""Words for a unit that nobody names."""
_AREAS = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}
_POWERS = {"squared": 2, "cubed": 3, "sq": 2}
_PLAIN_LETTERS = set("mgshNJWVAFCLlKTHt")
"""Single letters that are units even if they are not upright (`6 s`); other letters are variables."""
_RARE_UNITS = set("THt")
"""Letters that are variables more often than units, even behind a space: `2 t`."""
_NO_UNITS = {
    "or", "and", "if", "when", "to", "is", "are", "not", "no", "more", "less", "than", "plus", "minus", "times", "over", "mod",
    "with", "where", "for", "by", "of", "at", "sin", "cos", "tan", "cot", "sec", "csc", "log", "ln", "exp", "max", "gcd", "lcm",
    "arcsin", "arccos", "arctan", "sqrt", "none", "nan", "inf", "from", "approximately", "about", "each", "the", "answer",
    "between", "infinity", "undefined", "true", "false", "yes", "option", "choice", "but", "per",
}  # fmt: skip


def known_unit(word: str) -> Unit | None:
    """Returns the unit that a symbol or a name, singular or plural, stands for, or None."""
    if word in _OTHERS:
        return _OTHERS[word]
    if word in _SYMBOLS_WITH_PREFIXES:
        return _SYMBOLS_WITH_PREFIXES[word]
    for symbol, unit in _SYMBOLS_WITH_PREFIXES.items():
        prefix = word.removesuffix(symbol)
        if prefix != word and prefix in _PREFIXES:
            return _times_ten_to(unit, _PREFIXES[prefix])
    lower = word.lower()
    if len(lower) > 2:
        singular = lower.removesuffix("s")
        if len(singular) == 2 and singular in ATTACHED_SYMBOLS:
            return known_unit(singular)
        for name in (lower, singular):
            unit = _OTHERS.get(name) or _NAMES_WITH_PREFIXES.get(name)
            if unit is not None:
                return unit
            for prefix, exponent in _NAME_PREFIXES.items():
                base = _NAMES_WITH_PREFIXES.get(name.removeprefix(prefix)) if name.startswith(prefix) else None
                if base is not None:
                    return _times_ten_to(base, exponent)
    return None


def _times_ten_to(unit: Unit, exponent: int) -> Unit:
    return unit.by(Fraction(10) ** exponent)


def _counted(word: str) -> Unit:
    """Returns the unit of a word that is no known unit: `apple` for `apples`, `box` for `boxes`."""
    lower = word.lower()
    if lower.endswith(("ches", "shes", "xes", "sses")):
        lower = lower[:-2]
    elif lower.endswith("ies") and len(lower) > 4:
        lower = lower[:-3] + "y"
    elif lower.endswith("s") and not lower.endswith("ss") and len(lower) > 3:
        lower = lower[:-1]
    return _basic(lower)


def read_unit(nodes: Sequence[Node], after_letters: bool = False) -> Unit | None:
    """Returns the unit that nodes state, or None if they state none. An unnamed unit (`units`) is `NO_UNIT`.

    Units in algebra, where a letter stands before them, must be upright and known.
    """
    if not nodes:
        return None
    return _Reader(nodes, after_letters).whole()


class _Reader:
    """Reads a product and quotient of units."""

    def __init__(self, nodes: Sequence[Node], upright_only: bool) -> None:
        self._nodes = nodes
        self._place = 0
        self._upright_only = upright_only
        self._known_only = upright_only

    def whole(self) -> Unit | None:
        unit = NO_UNIT
        sign = 1
        is_first = True
        area = 1
        while self._place < len(self._nodes):
            node = self._nodes[self._place]
            if not is_first and (is_sign(node, "/", r"\per") or self._word(node) == "per"):
                sign = -1
                self._place += 1
                continue
            if not is_first and is_sign(node, r"\cdot", r"\times", "*", "-", "."):
                self._place += 1
                continue
            if self._word(node) in _AREAS or is_sign(node, r"\square", r"\cubic"):
                area = _AREAS.get(self._word(node), 3 if is_sign(node, r"\cubic") else 2)
                self._place += 1
                if self._place < len(self._nodes) and is_sign(self._nodes[self._place], "."):
                    self._place += 1
                continue
            part = self._part()
            if part is None:
                return None
            unit = unit.times(part, sign * self._exponent(area))
            area = 1
            is_first = False
        return unit if not is_first else None

    def _word(self, node: Node) -> str:
        return node.text.lower() if isinstance(node, Token) and node.kind == "letters" else ""

    def _part(self) -> Unit | None:
        """Returns the next unit without its exponent."""
        node = self._nodes[self._place]
        self._place += 1
        if isinstance(node, Group):
            return read_unit(node.body, self._upright_only)
        if is_sign(node, "("):
            return self._in_parentheses()
        if is_sign(node, r"\frac"):
            parts = self._nodes[self._place : self._place + 2]
            self._place += 2
            read = [read_unit(part.body, self._upright_only) if isinstance(part, Group) else None for part in parts]
            if len(read) != 2 or read[0] is None or read[1] is None:
                return None
            return read[0].times(read[1], -1)
        if is_sign(node, DEGREE):
            return self._temperature() or _DEGREE
        if node.kind == "command" and node.text == r"\mu":
            return self._prefixed_by_mu()
        if node.kind == "command" and node.text[1:] in _NAME_PREFIXES and self._place < len(self._nodes):
            base = self._part()
            return _times_ten_to(base, _NAME_PREFIXES[node.text[1:]]) if base is not None else None
        if node.kind in ("sign", "command"):
            unit = known_unit(node.text)
            if unit is None and node.text.startswith("\\") and len(node.text) > 2:
                unit = known_unit(node.text[1:])
            return unit
        return self._unit_of_letters(node) if node.kind == "letters" else None

    def _unit_of_letters(self, node: Token) -> Unit | None:
        word = node.text
        following = self._nodes[self._place] if self._place < len(self._nodes) else None
        if word.lower() in _NO_LETTERS:
            return NO_UNIT
        is_symbol = node.spaced and word in ATTACHED_SYMBOLS and word != "in"
        if self._upright_only and not node.upright and not is_symbol:
            return None
        if len(word) == 1 and not node.upright and word not in _PLAIN_LETTERS and word not in _PREFIXES:
            return None
        if word in _PREFIXES and following is not None and is_sign(following, r"\Omega"):
            self._place += 1
            return _times_ten_to(_OHM, _PREFIXES[word])
        if len(word) == 1 and not node.upright and word not in _PLAIN_LETTERS:
            return None
        if word in ("degrees", "degree", "deg"):
            return self._temperature() or _DEGREE
        if word == "ms" and _has_negative_exponent(self._nodes[self._place :]):
            return _SECOND.times(_METRE, 1).times(_SECOND, self._exponent(1) - 1)  # m s^{-1} without a space
        unit = self._of_two_words(word) or known_unit(word)
        if unit is not None:
            following = self._nodes[self._place] if self._place < len(self._nodes) else None
            if following is not None and is_sign(following, "."):
                self._place += 1
            return unit
        is_word = len(word) >= (2 if node.upright else 3) and word.lower() not in _NO_UNITS
        return _counted(word) if is_word and not self._known_only and (node.upright or node.spaced) else None

    def _of_two_words(self, first: str) -> Unit | None:
        """Returns the unit of `fl oz` or `metric tons`, whose second word comes next, maybe behind a point."""
        place = self._place
        if place < len(self._nodes) and is_sign(self._nodes[place], "."):
            place += 1
        second = self._word(self._nodes[place]) if place < len(self._nodes) else ""
        unit = _OF_TWO_WORDS.get((first.lower(), second)) or _OF_TWO_WORDS.get(
            (first.lower(), second.removesuffix("s"))
        )
        if unit is not None:
            self._place = place + 1
        return unit

    def _in_parentheses(self) -> Unit | None:
        for length, node in enumerate(self._nodes[self._place :]):
            if is_sign(node, ")"):
                inner = self._nodes[self._place : self._place + length]
                self._place += length + 1
                return read_unit(inner, self._upright_only)
        return None

    def _temperature(self) -> Unit | None:
        """Returns the temperature scale whose letter or name comes next, if one does."""
        if self._place >= len(self._nodes):
            return None
        word = self._word(self._nodes[self._place])
        scales = {
            "c": _CELSIUS, "celsius": _CELSIUS, "centigrade": _CELSIUS, "f": _FAHRENHEIT, "fahrenheit": _FAHRENHEIT,
        }  # fmt: skip
        if word not in scales:
            return None
        self._place += 1
        return scales[word]

    def _prefixed_by_mu(self) -> Unit | None:
        if self._place >= len(self._nodes):
            return None
        following = self._nodes[self._place]
        if is_sign(following, r"\Omega"):
            self._place += 1
            return _times_ten_to(_OHM, -6)
        if not isinstance(following, Token) or following.kind != "letters":
            return None
        base = _SYMBOLS_WITH_PREFIXES.get(following.text)
        self._place += 1
        return _times_ten_to(base, -6) if base is not None else None

    def _exponent(self, area: int) -> int:
        """Returns the exponent that comes next, times that of `square` or `cubic` before the unit."""
        if self._place >= len(self._nodes):
            return area
        node = self._nodes[self._place]
        if is_number(node) and not node.spaced and text_of(node) in ("2", "3"):
            self._place += 1
            return int(text_of(node)) * area  # `cm2`
        if self._word(node) in _POWERS or is_sign(node, r"\squared", r"\cubed"):
            self._place += 1
            return _POWERS.get(self._word(node), 3 if is_sign(node, r"\cubed") else 2) * area
        if not is_sign(node, "^") or self._place + 1 >= len(self._nodes):
            return area
        raised = self._nodes[self._place + 1]
        body = list(raised.body) if isinstance(raised, Group) else [raised]
        if not body:
            return area
        sign = -1 if is_sign(body[0], "-") else 1
        digits = body[1:] if sign < 0 else body
        only = digits[0] if len(digits) == 1 else None
        if isinstance(only, Token) and is_number(only) and only.text.isdigit() and len(only.text) == 1:
            self._place += 2
            return sign * int(only.text) * area
        return area


def _has_negative_exponent(nodes: Sequence[Node]) -> bool:
    if len(nodes) < 2 or not is_sign(nodes[0], "^") or not isinstance(nodes[1], Group):
        return False
    return bool(nodes[1].body) and is_sign(nodes[1].body[0], "-")


def is_ambiguous(nodes: Sequence[Node]) -> bool:
    """Returns whether nodes behind a number may be variables as well as a unit: `s` in `6s`, `m^2` in `3m^2`."""
    first = nodes[0]
    if not isinstance(first, Token) or first.kind != "letters" or first.upright:
        return False
    if first.spaced and first.text not in _RARE_UNITS:
        return False
    if len(nodes) > 1 and not (len(nodes) == 3 and is_sign(nodes[1], "^")):
        return False
    return len(first.text) <= 2 and first.text not in ATTACHED_SYMBOLS


def is_currency(node: Node) -> bool:
    """Returns whether a node is a sign of money, which stands before its value."""
    return isinstance(node, Token) and node.text in _CURRENCIES


def may_be_in_a_unit(node: Node) -> bool:
    """Returns whether a unit can begin with this node."""
    if isinstance(node, Group):
        return True
    if node.kind == "number":
        return False
    if node.kind == "letters":
        return True
    return node.text in _OTHERS or node.text == "(" or (node.kind == "command" and node.text[-1:].isalpha())
