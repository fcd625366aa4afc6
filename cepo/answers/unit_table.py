"""Holds the known units with their symbols and names.

A unit is a factor times a product of basic units, so that equal quantities can be compared: 5 m is 500 cm.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction

from cepo.answers.exact_numbers import PI, Real, added, multiplied
from cepo.answers.latex_symbols import ATTACHED_SYMBOLS
from cepo.answers.typesetting import DEGREE

_DEGREES_PER_RADIAN: Real = 180 / PI
_RADIANS_PER_DEGREE: Real = PI / 180


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
        # Only a unit that stands alone has a zero point or a second meaning: `°C`, but not `J/°C`.
        is_other_alone = not self.powers and exponent == 1
        return Unit(
            powers=frozenset((name, power) for name, power in powers.items() if power),
            factor=self.factor * other.factor**exponent,
            offset=other.offset if is_other_alone else Fraction(0),
            radians=self.radians + other.radians * exponent,
            is_bare_degree=other.is_bare_degree and is_other_alone,
            is_pound_in_words=other.is_pound_in_words and is_other_alone,
        )

    def by(self, factor: Fraction | int | str) -> Unit:
        """Returns the unit that is `factor` times as large."""
        return Unit(self.powers, self.factor * Fraction(factor), radians=self.radians)

    def times_ten_to(self, exponent: int) -> Unit:
        """Returns the unit with a decimal prefix, such as 3 for kilo."""
        return self.by(Fraction(10) ** exponent)

    def in_basic_units(self, value: Real) -> Real:
        """Returns a value in this unit as a value in basic units."""
        value = multiplied(value, self.factor)
        factor_of_angle = _DEGREES_PER_RADIAN if self.radians > 0 else _RADIANS_PER_DEGREE
        for _ in range(abs(self.radians)):
            value = multiplied(value, factor_of_angle)
        return added(value, self.offset) if self.offset else value


def basic_unit(name: str, factor: Fraction | int | str = 1) -> Unit:
    """Returns a multiple of the basic unit of this name."""
    return Unit(frozenset({(name, 1)}), Fraction(factor))


NO_UNIT = Unit(frozenset())
METRE = basic_unit("metre")
SECOND = basic_unit("second")

_KILOGRAM = basic_unit("kilogram")
_GRAM = basic_unit("kilogram", "0.001")
_MINUTE = basic_unit("second", 60)
_HOUR = basic_unit("second", 3600)
_AMPERE = basic_unit("ampere")
_LITRE = Unit(frozenset({("metre", 3)}), Fraction("0.001"))
_INCH = basic_unit("metre", "0.0254")
_FOOT = basic_unit("metre", "0.3048")
_MILE = basic_unit("metre", "1609.344")
_DOLLAR = basic_unit("dollar")
STERLING = basic_unit("sterling")
_HERTZ = NO_UNIT.times(SECOND, -1)
_NEWTON = _KILOGRAM.times(METRE, 1).times(SECOND, -2)
_PASCAL = _NEWTON.times(METRE, -2)
_JOULE = _NEWTON.times(METRE, 1)
_WATT = _JOULE.times(SECOND, -1)
_WATT_HOUR = _WATT.times(_HOUR, 1)
_COULOMB = _AMPERE.times(SECOND, 1)
_VOLT = _WATT.times(_AMPERE, -1)
OHM = _VOLT.times(_AMPERE, -1)
_FARAD = _COULOMB.times(_VOLT, -1)
_TESLA = _VOLT.times(SECOND, 1).times(METRE, -2)
_HENRY = OHM.times(SECOND, 1)
_MOLE = basic_unit("mole")
_KELVIN = basic_unit("kelvin")
_BIT = basic_unit("bit")
_BYTE = basic_unit("bit", 8)
_CALORIE = _JOULE.by("4.184")
_KM_PER_HOUR = METRE.times(_HOUR, -1).by(1000)
_SQUARE_METRE = METRE.times(METRE, 1)
_TURN = basic_unit("degree", 360)
_RADIAN = Unit(frozenset({("degree", 1)}), radians=1)
_ELECTRON_VOLT = _JOULE.by("1.602176634e-19")
_POUND = basic_unit("kilogram", "0.45359237")
_POUND_FORCE = _POUND.times(METRE, 1).times(SECOND, -2).by("9.80665")
_TONNE = basic_unit("kilogram", 1000)

BARE_DEGREE = Unit(frozenset({("degree", 1)}), is_bare_degree=True)
CELSIUS = Unit(frozenset({("kelvin", 1)}), offset=Fraction("273.15"))
FAHRENHEIT = Unit(frozenset({("kelvin", 1)}), Fraction(5, 9), Fraction("459.67") * Fraction(5, 9))


def _by_spelling(units: Mapping[str, Unit]) -> dict[str, Unit]:
    """Returns the unit of each spelling, from a table whose keys are the spellings of a unit with spaces between."""
    by_spelling: dict[str, Unit] = {}
    for spellings, unit in units.items():
        for spelling in spellings.split():
            by_spelling[spelling] = unit
    return by_spelling


SYMBOLS_WITH_PREFIXES = _by_spelling(
    {
        "m": METRE,
        "g": _GRAM,
        "s": SECOND,
        "A": _AMPERE,
        "N": _NEWTON,
        "J": _JOULE,
        "W": _WATT,
        "V": _VOLT,
        "Hz": _HERTZ,
        "Pa": _PASCAL,
        "C": _COULOMB,
        "F": _FARAD,
        "T": _TESLA,
        "H": _HENRY,
        "L l": _LITRE,
        "mol": _MOLE,
        "cd": basic_unit("candela"),
        "eV": _ELECTRON_VOLT,
        "cal": _CALORIE,
        "Wh": _WATT_HOUR,
        "bit b": _BIT,
        "B": _BYTE,
        "bar": _PASCAL.by(100_000),
        "K": _KELVIN,
        "lm": basic_unit("lumen"),
    }
)
"""Of two symbols that a word ends with, the earlier counts."""
PREFIXES = {"p": -12, "n": -9, "u": -6, "m": -3, "c": -2, "d": -1, "h": 2, "k": 3, "K": 3, "M": 6, "G": 9, "T": 12}
_NAMES_WITH_PREFIXES = _by_spelling(
    {
        "meter metre": METRE,
        "gram gramme": _GRAM,
        "second": SECOND,
        "ampere amp": _AMPERE,
        "newton": _NEWTON,
        "joule": _JOULE,
        "watt": _WATT,
        "volt": _VOLT,
        "hertz": _HERTZ,
        "pascal": _PASCAL,
        "coulomb": _COULOMB,
        "farad": _FARAD,
        "tesla": _TESLA,
        "henry": _HENRY,
        "liter litre": _LITRE,
        "ohm": OHM,
        "mole": _MOLE,
        "kelvin": _KELVIN,
        "calorie": _CALORIE,
        "bit": _BIT,
        "byte": _BYTE,
        "watthour": _WATT_HOUR,
    }
)
NAME_PREFIXES = {
    "pico": -12, "nano": -9, "micro": -6, "milli": -3, "centi": -2, "deci": -1, "deca": 1, "hecto": 2, "kilo": 3, "mega": 6,
    "giga": 9, "tera": 12,
}  # fmt: skip
WITHOUT_PREFIXES = _by_spelling(
    {
        # time
        "min minute": _MINUTE,
        "h hr hour": _HOUR,
        "sec": SECOND,
        "day": basic_unit("second", 86_400),
        "week": basic_unit("second", 604_800),
        "fortnight": basic_unit("second", 1_209_600),
        "month": basic_unit("month"),
        "year yr": basic_unit("month", 12),
        "decade": basic_unit("month", 120),
        "century centuries": basic_unit("month", 1200),
        # length
        "in inch inche": _INCH,
        "foot feet ft": _FOOT,
        "yard yd": basic_unit("metre", "0.9144"),
        "mile mi": _MILE,
        "Å": basic_unit("metre", "1e-10"),
        # area and volume
        "acre": _SQUARE_METRE.by("4046.8564224"),
        "ha hectare": _SQUARE_METRE.by(10_000),
        "cc": _LITRE.by("0.001"),
        "gallon gal": _LITRE.by("3.785411784"),
        "quart": _LITRE.by("0.946352946"),
        "pint": _LITRE.by("0.473176473"),
        "cup": _LITRE.by("0.2365882365"),
        "tablespoon tbsp": _LITRE.by("0.01478676478125"),
        "teaspoon tsp": _LITRE.by("0.00492892159375"),
        # mass
        "lb": _POUND,
        "pound": replace(_POUND, is_pound_in_words=True),
        "oz ounce": basic_unit("kilogram", "0.028349523125"),
        "ton tonne t": _TONNE,
        "kilo kgs": _KILOGRAM,
        "gm": _GRAM,
        # mechanics, electricity, data
        "Nm": _JOULE,
        "electronvolt": _ELECTRON_VOLT,
        "hp horsepower": _WATT.by("745.69987158227022"),
        "psi": _POUND_FORCE.times(_INCH, -2),
        "mmHg": _PASCAL.by("133.322387415"),
        "atm": _PASCAL.by(101_325),
        r"\Omega": OHM,
        "kilohm": OHM.by(1000),
        "megohm": OHM.by(10**6),
        "henries": _HENRY,
        "Mbps": _BIT.times(SECOND, -1).by(10**6),
        # speed
        "mph": _MILE.times(_HOUR, -1),
        "kmh kph kmph": _KM_PER_HOUR,
        "mps": METRE.times(SECOND, -1),
        "fps": _FOOT.times(SECOND, -1),
        "knot": _KM_PER_HOUR.by("1.852"),
        "rpm": _TURN.times(_MINUTE, -1),
        # angle and temperature
        f"degree deg {DEGREE}": BARE_DEGREE,
        "rad radian": _RADIAN,
        "revolution turn": _TURN,
        "arcminute arcmin": basic_unit("degree", Fraction(1, 60)),
        "arcsecond arcsec": basic_unit("degree", Fraction(1, 3600)),
        "celsius centigrade": CELSIUS,
        "fahrenheit": FAHRENHEIT,
        # money
        r"dollar USD usd \$ $ buck": _DOLLAR,
        "cent ¢": basic_unit("dollar", "0.01"),
        "€ euro EUR": basic_unit("euro"),
        "£ GBP quid": STERLING,
        "pence": STERLING.by("0.01"),
        "¥ yen": basic_unit("yen"),
        "yuan RMB CNY": basic_unit("yuan"),
        "₹ rupee Rs": basic_unit("rupee"),
        # words whose plural has no s
        "people": basic_unit("person"),
        "child children": basic_unit("child"),
        "men": basic_unit("man"),
        "women": basic_unit("woman"),
        "mice": basic_unit("mouse"),
    }
)
CURRENCIES = {r"\$", "$", "€", "£", "¥", "₹", "USD", "EUR", "GBP", "CNY", "RMB", "Rs"}
UNITS_OF_TWO_WORDS: dict[tuple[str, str], Unit] = {
    ("fl", "oz"): _LITRE.by("0.0295735295625"),
    ("fluid", "ounce"): _LITRE.by("0.0295735295625"),
    ("metric", "ton"): _TONNE,
    ("metric", "tonne"): _TONNE,
    ("electron", "volt"): _ELECTRON_VOLT,
    ("nautical", "mile"): basic_unit("metre", 1852),
    ("light", "year"): basic_unit("metre", 9_460_730_472_580_800),
}
_SHORTEST_NAME = 3


def known_unit(word: str) -> Unit | None:
    """Returns the unit that a symbol or a name, singular or plural, stands for, or None."""
    if word in WITHOUT_PREFIXES:
        return WITHOUT_PREFIXES[word]
    if word in SYMBOLS_WITH_PREFIXES:
        return SYMBOLS_WITH_PREFIXES[word]
    for symbol, unit in SYMBOLS_WITH_PREFIXES.items():
        prefix = word.removesuffix(symbol)
        if prefix != word and prefix in PREFIXES:
            return unit.times_ten_to(PREFIXES[prefix])
    name = word.lower()
    if len(name) < _SHORTEST_NAME:
        return None
    singular = name.removesuffix("s")
    if len(singular) == 2 and singular in ATTACHED_SYMBOLS:
        return known_unit(singular)  # `kgs`
    return _unit_of_name(name) or _unit_of_name(singular)


def _unit_of_name(name: str) -> Unit | None:
    """Returns the unit of a name in small letters, with or without a prefix such as `kilo`."""
    unit = WITHOUT_PREFIXES.get(name) or _NAMES_WITH_PREFIXES.get(name)
    if unit is not None:
        return unit
    for prefix, exponent in NAME_PREFIXES.items():
        if not name.startswith(prefix):
            continue
        unit = _NAMES_WITH_PREFIXES.get(name.removeprefix(prefix))
        if unit is not None:
            return unit.times_ten_to(exponent)
    return None


def counted_unit(word: str) -> Unit:
    """Returns the unit of a word that is no known unit: `apple` for `apples`, `box` for `boxes`."""
    singular = word.lower()
    if singular.endswith(("ches", "shes", "xes", "sses")):
        singular = singular[:-2]
    elif singular.endswith("ies") and len(singular) > 4:
        singular = singular[:-3] + "y"
    elif singular.endswith("s") and not singular.endswith("ss") and len(singular) > 3:
        singular = singular[:-1]
    return basic_unit(singular)
