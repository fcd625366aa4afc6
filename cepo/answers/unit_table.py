"""The known units, with their symbols and names.

A unit is a factor times a product of basic units, so that equal quantities can be compared: 5 m is 500 cm.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from fractions import Fraction

from cepo.answers.exact_numbers import PI, Real, added, real
from cepo.answers.typesetting import DEGREE

_DEGREES_PER_RADIAN: Real = 180 / PI


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
        return added(value * self._factor(), self._zero_point())

    def from_basic_units(self, value: Real) -> Real:
        """Returns a value in basic units as a value in this unit."""
        return added(value, -self._zero_point()) / self._factor()

    def _factor(self) -> Real:
        return real(self.factor.numerator) / self.factor.denominator * _DEGREES_PER_RADIAN**self.radians

    def _zero_point(self) -> Real:
        return real(self.offset.numerator) / self.offset.denominator


def basic_unit(name: str) -> Unit:
    """Returns the basic unit of this name."""
    return Unit(frozenset({(name, 1)}))


NO_UNIT = Unit(frozenset())
_THING = basic_unit("thing")
BARE_DEGREE = Unit(frozenset({("degree", 1)}), is_bare_degree=True)
CELSIUS = Unit(frozenset({("kelvin", 1)}), offset=Fraction("273.15"))
FAHRENHEIT = Unit(frozenset({("kelvin", 1)}), Fraction(5, 9), Fraction("459.67") * Fraction(5, 9))

PREFIXES = {"p": -12, "n": -9, "u": -6, "m": -3, "c": -2, "d": -1, "h": 2, "k": 3, "K": 3, "M": 6, "G": 9, "T": 12}
_NAME_PREFIXES = {
    "nano": -9,
    "micro": -6,
    "milli": -3,
    "centi": -2,
    "deci": -1,
    "kilo": 3,
    "mega": 6,
    "giga": 9,
    "tera": 12,
}

_WITH_PREFIXES = (
    ("m", "meter metre", "metre"),
    ("g", "gram gramme", "1/1000 kilogram"),
    ("s", "second", "second"),
    ("A", "ampere amp", "ampere"),
    ("N", "newton", "kilogram metre second^-2"),
    ("J", "joule", "N m"),
    ("W", "watt", "J s^-1"),
    ("C", "coulomb", "A s"),
    ("V", "volt", "W A^-1"),
    ("Hz", "hertz", "s^-1"),
    ("Pa", "pascal", "N m^-2"),
    ("F", "farad", "C V^-1"),
    ("T", "tesla", "V s m^-2"),
    (r"\Omega", "ohm", "V A^-1"),
    ("H", "henry", "V s A^-1"),
    ("L l", "liter litre", "1/1000 m^3"),
    ("mol", "mole", "mole"),
    ("eV", "electronvolt", "1.602176634e-19 J"),
    ("cal", "calorie", "4.184 J"),
    ("Wh", "watthour", "3600 J"),
    ("bit b", "bit", "bit"),
    ("B", "byte", "8 bit"),
    ("bar", "", "100000 Pa"),
    ("K", "kelvin", "kelvin"),
)
"""Symbols and names that take prefixes, and what they stand for in units above them. Of two symbols that a word ends
with, the earlier counts."""

_WITHOUT_PREFIXES = (
    # time
    ("min mins minute 分钟", "60 s"),
    ("h hr hour 小时 个小时 时", "3600 s"),
    ("sec 秒", "s"),
    ("day 天 日", "86400 s"),
    ("week 周 星期 个星期", "604800 s"),
    ("month 个月 月", "month"),
    ("year yr yrs 年 岁", "12 month"),
    ("decade", "120 month"),
    ("century centuries", "1200 month"),
    # length
    ("in inch inche", "0.0254 m"),
    ("foot feet ft", "0.3048 m"),
    ("yard yd", "0.9144 m"),
    ("mile mi", "1609.344 m"),
    ("nmi 海里", "1852 m"),
    ("毫米", "0.001 m"),
    ("厘米 公分", "0.01 m"),
    ("分米", "0.1 m"),
    ("米", "m"),
    ("千米 公里", "1000 m"),
    # area and volume
    ("acre", "4046.8564224 m^2"),
    ("ha hectare 公顷", "10000 m^2"),
    ("cc", "0.000001 m^3"),
    ("gallon gal", "3.785411784 L"),
    ("quart", "0.946352946 L"),
    ("pint", "0.473176473 L"),
    ("cup", "0.2365882365 L"),
    ("tablespoon tbsp", "0.01478676478125 L"),
    ("teaspoon tsp", "0.00492892159375 L"),
    ("毫升", "0.001 L"),
    ("升", "L"),
    # mass
    ("lb", "0.45359237 kilogram"),
    ("oz ounce", "0.028349523125 kilogram"),
    ("ton tonne t 吨", "1000 kilogram"),
    ("kilo kgs 千克 公斤", "kilogram"),
    ("gm gms 克", "0.001 kilogram"),
    ("斤", "0.5 kilogram"),
    # mechanics, electricity, data
    ("Nm", "J"),
    ("hp horsepower", "745.69987158227022 W"),
    ("lbf", "9.80665 lb m s^-2"),
    ("psi", "lbf in^-2"),
    ("kip", "1000 lbf"),
    ("ksi", "1000 psi"),
    ("mmHg", "133.322387415 Pa"),
    ("atm", "101325 Pa"),
    ("Mbps", "1000000 bit s^-1"),
    # speed
    ("mph", "mile h^-1"),
    ("kmh kph kmph", "1000 m h^-1"),
    ("mps", "m s^-1"),
    ("fps", "ft s^-1"),
    ("knot", "1852 m h^-1"),
    # angle
    ("revolution turn rev", "360 degree"),
    ("rpm", "turn min^-1"),
    ("arcmin", "1/60 degree"),
    ("arcsec", "1/3600 degree"),
    # money
    (r"dollar USD usd \$ $ buck 美元", "dollar"),
    ("cent ¢", "1/100 dollar"),
    ("€ euro EUR 欧元", "euro"),
    ("£ GBP quid", "sterling"),
    ("pence", "1/100 £"),
    ("¥ yen 日元", "yen"),
    ("yuan RMB CNY 元 块 元钱 块钱", "yuan"),
    ("角", "1/10 yuan"),
    ("₹ rupee Rs", "rupee"),
    # words whose plural has no s
    ("people 人 名 位", "person"),
    ("child children", "child"),
    ("men", "man"),
    ("women", "woman"),
)
"""Spellings, and what they stand for in units above them; other words in definitions are basic units."""

_COUNTERS = frozenset("个只条本张支枝辆棵次组种件间台头朵颗根倍题页层步双对盒箱袋瓶杯分")
"""Chinese counters of things; what is counted may follow: `12个苹果`."""
CURRENCIES = {r"\$", "$", "€", "£", "¥", "₹", "USD", "EUR", "GBP", "CNY", "RMB", "Rs"}
_NAMES_OF_MEASURES = {
    "metre", "kilogram", "second", "ampere", "kelvin", "mole", "bit", "degree", "month", "dollar", "euro", "sterling", "yen",
    "yuan", "rupee",
}  # fmt: skip
_SHORTEST_NAME = 3
ATTACHED_SYMBOLS = {
    "mm", "cm", "dm", "km", "Km", "kg", "Kg", "ml", "mL", "cl", "cL", "dl", "dL", "ft", "in", "yd", "mi", "kN", "kJ", "kW", "kV",
    "mA", "mV", "MW", "Hz", "kHz", "MHz", "Pa", "kPa", "MPa", "kB", "KB", "MB", "GB", "TB", "Wh", "kWh", "eV", "oz", "lb", "hr",
    "ha", "mol", "min", "cc", "psi", "ksi", "mph", "rpm",
}  # fmt: skip
"""Symbols that are units without a space before them, as in `5cm`; `2mg` may be a product of variables."""
_POWERS_IN_CHINESE = {"平方": 2, "立方": 3}


def _defined(definition: str, known: dict[str, Unit]) -> Unit:
    """Returns the unit that a definition such as `9.80665 lb m s^-2` states; words that are not known are basic units."""
    unit = NO_UNIT
    for factor in definition.split():
        if factor[0].isdigit():
            unit = unit.by(factor)
            continue
        name, _, exponent = factor.partition("^")
        base = known.get(name) or basic_unit(name)
        unit = unit.times(base, int(exponent or 1))
    return unit


def _units_by_name() -> dict[str, Unit]:
    """Returns all units by name in small letters, and by the symbols that take no prefixes."""
    units: dict[str, Unit] = {}
    for spellings, definition in _WITHOUT_PREFIXES:
        unit = _defined(definition, _SYMBOLS | units)
        for spelling in spellings.split():
            units[spelling] = unit
            if not spelling.isascii() and unit.powers == METRE.powers:
                for word, power in _POWERS_IN_CHINESE.items():
                    units[word + spelling] = NO_UNIT.times(unit, power)
    units["pound"] = replace(units["lb"], is_pound_in_words=True)
    units |= dict.fromkeys(("degree", "deg", DEGREE, "度"), BARE_DEGREE)
    units |= dict.fromkeys(("rad", "radian", "弧度"), Unit(BARE_DEGREE.powers, radians=1))
    units |= dict.fromkeys(("celsius", "centigrade", "摄氏度"), CELSIUS)
    units["fahrenheit"] = FAHRENHEIT
    for symbols, names, _ in _WITH_PREFIXES:
        for name in names.split():
            units[name] = _SYMBOLS[symbols.split()[0]]
            _add_prefixed(units, name, _NAME_PREFIXES)
    return units


def _units_by_symbol() -> dict[str, Unit]:
    """Returns the units whose symbols take prefixes, without and with them, by symbol."""
    units: dict[str, Unit] = {}
    for symbols, _, definition in _WITH_PREFIXES:
        units |= dict.fromkeys(symbols.split(), _defined(definition, units))
    for symbol in list(units):
        _add_prefixed(units, symbol, PREFIXES)
    return units


def _add_prefixed(units: dict[str, Unit], spelling: str, prefixes: dict[str, int]) -> None:
    """Adds a unit with each prefix, unless the word stands for another unit already."""
    for prefix, exponent in prefixes.items():
        units.setdefault(prefix + spelling, units[spelling].times_ten_to(exponent))


_SYMBOLS = _units_by_symbol()
METRE = _SYMBOLS["m"]
OHM = _SYMBOLS[r"\Omega"]
_NAMES = _units_by_name()
STERLING = _NAMES["£"]


def known_unit(word: str) -> Unit | None:
    """Returns the unit that a symbol or a name, singular or plural, stands for, or None."""
    for units in (_NAMES, _SYMBOLS):
        if word in units:
            return units[word]
    if word[:1] in _COUNTERS:
        return None if "半" in word else _THING  # `12个半` are 12.5
    name = word.lower()
    if len(name) < _SHORTEST_NAME:
        return None
    singular = name.removesuffix("s")
    if len(singular) < _SHORTEST_NAME:  # `kgs`
        return _NAMES.get(name) or (known_unit(singular) if singular in ATTACHED_SYMBOLS else None)
    return _NAMES.get(name) or _NAMES.get(singular)


def counts_things(unit: Unit) -> bool:
    """Returns whether a unit is a word for what is counted, or a Chinese counter."""
    names = [name for name, _ in unit.powers]
    return len(names) == 1 and names[0] not in _NAMES_OF_MEASURES and unit == basic_unit(names[0])


def same_things(first: Unit, second: Unit) -> bool:
    """Returns whether a Chinese counter may count what the other unit names: `12个` and `12 apples`."""
    return _THING in (first, second) and counts_things(first) and counts_things(second)


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
