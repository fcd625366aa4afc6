"""Translates settings of TRL, verl, ms-swift and others, which `names.yaml` lists, into those of this package."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

_VALUE = re.compile(r"\bV\b")
_REST = ".*"
NAMES: Mapping[str, Mapping[str, str]] = yaml.safe_load(
    Path(__file__).with_name("names.yaml").read_text(encoding="utf-8")
)
"""What takes the place of each name, by program; the file describes its form."""


@dataclass(frozen=True)
class Translation:
    """What takes the place of another program's setting: `settings` to write, or the `reason` why there are none."""

    program: str
    settings: tuple[str, ...] = ()
    reason: str = ""

    @property
    def keys(self) -> list[str]:
        """The dotted keys of `settings`."""
        return [shlex.split(setting)[0].partition("=")[0] for setting in self.settings]

    def __str__(self) -> str:
        if self.settings:
            return f"This is a name of {self.program}; write {' '.join(self.settings)}"
        return f"This is a name of {self.program}; leave it out: {self.reason}."


def translation_of(key: str, written_value: str) -> Translation | None:
    """Returns what takes the place of an unknown dotted key with a value, written as on a command line; None if unknown.

    The longest dotted beginning that is listed decides, else the key's last name, in whatever section it stands.
    """
    parts = key.split(".")
    for length in range(len(parts), 1, -1):
        beginning = ".".join(parts[:length])
        subkey = ".".join(parts[length:])
        translation = _listed(beginning, subkey, written_value)
        if translation is not None:
            return translation
    translation = _listed(parts[0], ".".join(parts[1:]), written_value)
    if translation is None and len(parts) > 1:
        translation = _listed(parts[-1], "", written_value)
    return translation


def _listed(name: str, rest: str, written_value: str) -> Translation | None:
    """Returns the translation of a listed name; with a `rest` behind it only if a section takes its place."""
    for program, names in NAMES.items():
        replacement = None
        if not rest:
            replacement = names.get(f"{name}={written_value.casefold()}")
        if replacement is None:
            replacement = names.get(name)
        if replacement is None:
            continue
        if replacement.startswith("("):
            return Translation(program, reason=replacement[1:-1])
        is_section = replacement.endswith(_REST)
        if is_section:
            below = f".{rest}" if rest else ""
            return Translation(program, (f"{replacement.removesuffix(_REST)}{below}={written_value}",))
        if not rest:
            return Translation(program, tuple(_with_value(replacement, written_value)))
    return None


def _with_value(replacement: str, written_value: str) -> Iterator[str]:
    """Yields the settings of a replacement, which blanks separate, with the value in place of V, quoted for a shell."""
    settings = [replacement] if "{" in replacement else replacement.split()
    for setting in settings:
        key, _, template = setting.partition("=")
        value = _VALUE.sub(lambda _: written_value, template)
        yield shlex.quote(f"{key}={value}")
