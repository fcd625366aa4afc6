"""The known units, with their symbols and names.

A unit is a factor times a product of basic units, so that equal quantities can be compared: 5 m is 500 cm.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from cepo.answers.exact_numbers import PI, Real, added, real, same_value
from cepo.answers.tables import UNITS
from cepo.answers.typesetting import DEGREE


@dataclass(frozen=True, eq=False)
class Unit:
    """A unit: a value in it, times `factor`, plus `offset`, is the value in basic units.

    Attributes:
        powers: the exponent of each basic unit, without zeros.
        others: units that its spelling may also mean: temperatures for the degree sign, sterling for the word pound.
    """

    powers: frozenset[tuple[str, int]]
    factor: Real = 1
    offset: Real = 0
    others: tuple[Unit, ...] = ()

    def __eq__(self, other: object) -> bool:
        """Returns whether values in both units are the same, whatever else their spellings may mean."""
        if not isinstance(other, Unit) or self.powers != other.powers:
            return False
        return same_value(self.factor, other.factor) and self.offset == other.offset

    def __hash__(self) -> int:
        return hash(self.powers)

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
            offset=other.offset if is_other_alone else 0,
            others=other.others if is_other_alone else (),
        )

    def by(self, factor: Real) -> Unit:
        """Returns the unit that is `factor` times as large."""
        return Unit(self.powers, self.factor * factor)

    def in_basic_units(self, value: Real) -> Real:
        """Returns a value in this unit as a value in basic units."""
        return added(value * self.factor, self.offset)

    def from_basic_units(self, value: Real) -> Real:
        """Returns a value in basic units as a value in this unit."""
        return added(value, -self.offset) / self.factor


def basic_unit(name: str) -> Unit:
    """Returns the basic unit of this name."""
    return Unit(frozenset({(name, 1)}))


NO_UNIT = Unit(frozenset())
_THING = basic_unit("thing")
CELSIUS = Unit(frozenset({("kelvin", 1)}), offset=real("273.15"))
FAHRENHEIT = Unit(frozenset({("kelvin", 1)}), real(5) / 9, real("459.67") * 5 / 9)
BARE_DEGREE = Unit(frozenset({("degree", 1)}), others=(CELSIUS, FAHRENHEIT, basic_unit("kelvin")))

PREFIXES: dict[str, int] = UNITS["prefixes"]
CURRENCIES = frozenset(UNITS["currencies"].split())
ATTACHED_SYMBOLS = frozenset(UNITS["attached"].split())
"""Symbols that are units without a space before them, as in `5cm`; `2mg` may be a product of variables."""
_NAMES_OF_MEASURES = frozenset(UNITS["measures"].split())
_SHORTEST_NAME = 3
_POWERS_IN_CHINESE = {"平方": 2, "立方": 3}


def _defined(definition: str, known: dict[str, Unit]) -> Unit:
    """Returns the unit that a definition such as `9.80665 lb m s^-2` states; words that are not known are basic units."""
    unit = NO_UNIT
    for factor in definition.split():
        name, _, exponent = factor.partition("^")
        if name[0].isdigit():
            unit = unit.by(real(name) ** int(exponent or 1))
            continue
        base = known.get(name) or basic_unit(name)
        unit = unit.times(base, int(exponent or 1))
    return unit


def _units_by_name() -> dict[str, Unit]:
    """Returns all units by name in small letters, and by the symbols that take no prefixes."""
    units: dict[str, Unit] = {}
    for spellings, definition in UNITS["without_prefixes"]:
        unit = _defined(definition, _SYMBOLS | units)
        for spelling in spellings.split():
            units[spelling] = unit
            if not spelling.isascii() and unit.powers == METRE.powers:
                for word, power in _POWERS_IN_CHINESE.items():
                    units[word + spelling] = NO_UNIT.times(unit, power)
    units["pound"] = replace(units["lb"], others=(units["£"],))
    units["¥"] = replace(units["¥"], others=(units["元"],))
    units |= dict.fromkeys(("degree", "deg", DEGREE, "度"), BARE_DEGREE)
    units |= dict.fromkeys(("rad", "radian", "弧度"), BARE_DEGREE.by(180 / PI))
    units |= dict.fromkeys(("celsius", "centigrade", "摄氏度"), CELSIUS)
    units["fahrenheit"] = FAHRENHEIT
    for symbols, names, _ in UNITS["with_prefixes"]:
        for name in names.split():
            units[name] = _SYMBOLS[symbols.split()[0]]
            _add_prefixed(units, name, UNITS["prefixes_of_names"])
    return units


def _units_by_symbol() -> dict[str, Unit]:
    """Returns the units whose symbols take prefixes, without and with them, by symbol."""
    units: dict[str, Unit] = {}
    for symbols, _, definition in UNITS["with_prefixes"]:
        units |= dict.fromkeys(symbols.split(), _defined(definition, units))
    for symbol in list(units):
        _add_prefixed(units, symbol, PREFIXES)
    return units


def _add_prefixed(units: dict[str, Unit], spelling: str, prefixes: dict[str, int]) -> None:
    """Adds a unit with each prefix, unless the word stands for another unit already."""
    for prefix, exponent in prefixes.items():
        units.setdefault(prefix + spelling, units[spelling].by(real(10) ** exponent))


_SYMBOLS = _units_by_symbol()
METRE = _SYMBOLS["m"]
OHM = _SYMBOLS[r"\Omega"]
_NAMES = _units_by_name()


def known_unit(word: str) -> Unit | None:
    """Returns the unit that a symbol or a name, singular or plural, stands for, or None."""
    for units in (_NAMES, _SYMBOLS):
        if word in units:
            return units[word]
    if word and word[0] in UNITS["counters"]:
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
