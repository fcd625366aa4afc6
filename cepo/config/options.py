"""How a setting is declared: its default, its one-line description, and the values it accepts beyond its type."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cepo.errors import ConfigError

_METADATA_KEY = "option"


@dataclass(frozen=True, kw_only=True)
class OptionRule:
    """What a setting means and accepts. The type itself is the field's annotation.

    Attributes:
        help: one line for the generated tables.
        minimum, above, maximum, below: bounds of a number, or of each number of a list; `above` and `below` are exclusive.
        off: the one number outside the bounds that is accepted, because it turns the setting off.
        length: the number of entries a list must have.
        entries: for a mapping with a closed set of keys, the type and the rule of each key.
        joined: text that may name several things, separated by commas; a list of texts is joined.
        internal: the field is filled by the loader and is not a key of the configuration.
    """

    help: str
    minimum: float | None = None
    above: float | None = None
    maximum: float | None = None
    below: float | None = None
    off: int | None = None
    length: int | None = None
    entries: Mapping[str, tuple[type, OptionRule]] | None = None
    joined: bool = False
    internal: bool = False

    def accepted_range(self) -> str:
        """The bounds in words; empty where there are none."""
        parts = [
            f"{words} {bound:g}"
            for words, bound in (
                ("at least", self.minimum),
                ("above", self.above),
                ("at most", self.maximum),
                ("below", self.below),
            )
            if bound is not None
        ]
        text = " and ".join(parts)
        return text if self.off is None else f"{self.off} (off) or {text}"

    def check_number(self, key: str, value: float) -> None:
        """Raise `ConfigError` where a number is not finite or outside the bounds."""
        if self.off is not None and value == self.off:
            return
        inside = (
            (isinstance(value, int) or math.isfinite(value))  # a huge integer is no float
            and (self.minimum is None or value >= self.minimum)
            and (self.above is None or value > self.above)
            and (self.maximum is None or value <= self.maximum)
            and (self.below is None or value < self.below)
        )
        if not inside:
            raise ConfigError(f"{key} must be {self.accepted_range() or 'a finite number'}, got {shown_number(value)}.")

    def check(self, key: str, value: Any) -> None:
        """Raise `ConfigError` where a value of the right type breaks a bound or a length."""
        if isinstance(value, list):
            if self.length is not None and len(value) != self.length:
                raise ConfigError(f"{key} must have {self.length} entries, got {len(value)}: {value}.")
            for position, entry in enumerate(value):
                self.check(f"{key}[{position}]", entry)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            self.check_number(key, value)


def option(default: Any, help: str, **rule: Any) -> Any:
    """A setting with a default; further arguments as in `OptionRule`. Lists and mappings are copied for each instance."""
    metadata = {_METADATA_KEY: OptionRule(help=help, **rule), "help": help}
    if isinstance(default, list | dict):
        return dataclasses.field(default_factory=lambda: default.copy(), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def described(help: str, **rule: Any) -> Mapping[str, Any]:
    """Field metadata of a setting without a default: `field(metadata=described("..."))`."""
    return {_METADATA_KEY: OptionRule(help=help, **rule), "help": help}


def parts_of(text: str) -> list[str]:
    """What a `joined` setting names, one by one."""
    return [part.strip() for part in text.split(",")]


def shown_number(value: float) -> str:
    """The number for a message; Python refuses to spell integers of thousands of digits."""
    is_long = isinstance(value, int) and value.bit_length() > 256
    return f"an integer of {int(value).bit_length()} bits" if is_long else str(value)


def rule_of(field: dataclasses.Field[Any]) -> OptionRule:
    """The rule a field of the schema was declared with; sections have none of their own and get an empty one."""
    return field.metadata.get(_METADATA_KEY, OptionRule(help=""))


def has_default(field: dataclasses.Field[Any]) -> bool:
    """Whether a field may be left out."""
    return field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING
