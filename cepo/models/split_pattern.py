"""Decides whether a tokenizer's regular expression for splitting texts has a bounded time, whoever wrote it.

The engine tries all ways in which an alternative can match before it gives up. Their number is bounded if no group is
repeated, and if the product of the remaining choices is small; a few repeated characters are left, whose cost `rows` shows.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from cepo.errors import DataError

_LONGEST = 2_000
_MOST_ALTERNATIVES = 64
_MOST_CHOICES = 100
_MOST_UNBOUNDED = 3
_ROW = 3_000
_SEPARATORS = ("\x01", " ", "\n", "a", "A", "1", ".", "中")
"""What ends a row: a character of each kind, because a repetition is slow only where what follows it does not match."""
_MOST_ROWS = 1_000
_COMMON = "aA1 \n\t.'é\u0301中ーǅ🙂_-"
"""Characters of the classes that tokenizers tell apart."""

_PROPERTY = re.compile(r"\\[pP]\{\^?[A-Za-z_ ]+\}")
_CODE = re.compile(r"\\u([0-9a-fA-F]{4})|\\x([0-9a-fA-F]{2})")
_CLASS_ESCAPES = "sSdDwWbBrnt"
_ESCAPED = {"r": "\r", "n": "\n", "t": "\t"}
_GROUP = re.compile(r"\((\?:|\?i:|\?=|\?!|\?<=|\?<!|(?!\?))")
_BRACES = re.compile(r"\{(\d{1,4})(,?)(\d{0,4})\}")


@dataclass
class _Cost:
    """How many ways a part has to match: `choices` at most, for each length of its `unbounded` repetitions."""

    choices: int = 1
    unbounded: int = 0


def fault_of(pattern: str) -> str | None:
    """Returns why a pattern may take forever, or None if its time is bounded."""
    try:
        _read(pattern)
    except DataError as error:
        return str(error)
    return None


def rows(pattern: str) -> list[str]:
    """Returns texts on which a pattern is slow if its repetitions overlap: long rows of each of its characters."""
    characters = sorted(set(_COMMON) | _read(pattern).characters)[:_MOST_ROWS]
    ending = "\x01".join(characters)  # the engine searches no text that lacks what a pattern needs
    return ["".join(character * _ROW + end for end in _SEPARATORS) + ending for character in characters]


def _read(pattern: str) -> _Reader:
    if len(pattern) > _LONGEST:
        raise DataError(f"it has {len(pattern):,} characters; accepted: at most {_LONGEST:,}")
    reader = _Reader(pattern)
    reader.read_alternatives()
    if reader.place < len(pattern):
        raise DataError("it has a bracket without its counterpart")
    return reader


@dataclass
class _Reader:
    """Reads a pattern from its beginning and adds up what its parts cost."""

    pattern: str
    place: int = 0
    characters: set[str] = field(default_factory=set[str])

    def read_alternatives(self) -> _Cost:
        """Reads to the end of a group or of the pattern. The cost of alternatives is that of one after the other."""
        total = self._read_sequence()
        number = 1
        while self._rest().startswith("|"):
            self.place += 1
            number += 1
            cost = self._read_sequence()
            total = _Cost(total.choices + cost.choices, max(total.unbounded, cost.unbounded))
        if number > _MOST_ALTERNATIVES:
            raise DataError(f"it has {number} alternatives; accepted: at most {_MOST_ALTERNATIVES}")
        return total

    def _rest(self) -> str:
        return self.pattern[self.place : self.place + 40]

    def _read_sequence(self) -> _Cost:
        total = _Cost()
        while self.place < len(self.pattern) and self.pattern[self.place] not in "|)":
            is_group = self.pattern[self.place] == "("
            cost = self._repeated(self._read_item(), is_group=is_group)
            total = _Cost(total.choices * cost.choices, total.unbounded + cost.unbounded)
            if total.choices > _MOST_CHOICES or total.unbounded > _MOST_UNBOUNDED:
                raise DataError("an alternative of it can match in too many ways")
        return total

    def _read_item(self) -> _Cost:
        """Reads a group, a class or a character."""
        character = self.pattern[self.place]
        if character == "(":
            return self._read_group()
        if character == "[":
            self._read_class()
        elif character == "\\":
            self._read_escape()
        elif character in "?*+{":
            raise DataError("it repeats what is repeated already, or nothing")
        else:
            self.characters.add(character)
            self.place += 1
        return _Cost()

    def _read_group(self) -> _Cost:
        start = _GROUP.match(self.pattern, self.place)
        if start is None:
            raise DataError(f"it has a group that begins with {self._rest()[:4]!a}")
        self.place = start.end()
        cost = self.read_alternatives()
        if self.place >= len(self.pattern):
            raise DataError("it has a group without an end")
        self.place += 1
        return cost

    def _read_class(self) -> None:
        """Reads `[...]`, which may have classes in it, as in `[\\p{L}&&[^a]]`."""
        self.place += 2 if self._rest().startswith("[^") else 1
        if self._rest().startswith("]"):
            raise DataError("it has a class that begins with a bracket")
        while self.place < len(self.pattern) and self.pattern[self.place] != "]":
            character = self.pattern[self.place]
            if character == "[":
                self._read_class()
            elif character == "\\":
                self._read_escape()
            else:
                self.characters.add(character)
                self.place += 1
        if self.place >= len(self.pattern):
            raise DataError("it has a class without an end")
        self.place += 1

    def _read_escape(self) -> None:
        known = _PROPERTY.match(self.pattern, self.place)
        code = _CODE.match(self.pattern, self.place)
        character = self.pattern[self.place + 1 : self.place + 2]
        if known is not None:
            self.place = known.end()
            return
        if code is not None:
            self.characters.add(chr(int(code[1] or code[2], 16)))
            self.place = code.end()
            return
        if not character or (character not in _CLASS_ESCAPES and character.isalnum()):
            raise DataError(f"it has {self._rest()[:4]!a}, which is not read here")
        if not character.isalnum():
            self.characters.add(character)
        elif character in _ESCAPED:
            self.characters.add(_ESCAPED[character])
        self.place += 2

    def _repeated(self, cost: _Cost, *, is_group: bool) -> _Cost:
        """Reads the quantifier of a part, if it has one, and returns the cost of the repeated part."""
        sign = self.pattern[self.place : self.place + 1]
        if not sign or sign not in "?*+{":
            return cost
        if sign == "{":
            low, high = self._read_braces()
        else:
            self.place += 1
            low, high = (0, 1) if sign == "?" else (0, None)
        if is_group and high != 1:
            raise DataError("it repeats a group")
        suffix = self.pattern[self.place : self.place + 1]
        if suffix == "?" or (suffix == "+" and sign != "{"):  # reluctant, or possessive
            self.place += 1
            low = 0
        if high is None:
            return _Cost(cost.choices, cost.unbounded + 1)
        return _Cost(cost.choices + high - low, cost.unbounded)

    def _read_braces(self) -> tuple[int, int | None]:
        braces = _BRACES.match(self.pattern, self.place)
        if braces is None:
            raise DataError("it has a brace that is no number of repetitions")
        self.place = braces.end()
        low = int(braces[1])
        if not braces[2]:
            return low, low
        return low, int(braces[3]) if braces[3] else None
