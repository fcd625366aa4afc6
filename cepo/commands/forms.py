"""Lets every argument of a command be written in three forms: `--checkpoint X`, `checkpoint=X`, or by its position."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import click

from cepo.terminal.arguments import is_value

ALIASES: Mapping[str, Mapping[str, str]] = {
    "credit": {"model": "checkpoint", "method": "methods"},
    "evaluate": {"model": "checkpoint"},
    "init": {"out": "folder"},
    "merge": {"model": "checkpoint"},
    "report": {"checkpoint": "run", "folder": "run"},
    "show": {"checkpoint": "model"},
}
"""Further names of a command's parameters, which other commands use."""
POSITIONS: Mapping[str, Sequence[str]] = {
    "credit": ("checkpoint",),
    "evaluate": ("checkpoint",),
    "merge": ("checkpoint", "out"),
}
"""The options that words without a name give, in this order."""

_CONFIGURATIONS = (".yaml", ".yml")


class Forms:
    """Rewrites the words of one command so that click reads them: its arguments first, then options and settings."""

    def __init__(self, command: click.Command) -> None:
        name = command.name or ""
        self._aliases = ALIASES.get(name, {})
        self._positions = POSITIONS.get(name, ())
        self._options: dict[str, click.Option] = {}
        self._arguments: list[str] = []
        for parameter in command.params:
            if isinstance(parameter, click.Option):
                names = [_name(spelling) for spelling in parameter.opts]
                self._options |= dict.fromkeys(names, parameter)
            elif parameter.nargs == 1 and parameter.name is not None:
                self._arguments.append(parameter.name)

    def rewritten(self, words: Sequence[str], ctx: click.Context) -> list[str]:
        line = _Line()
        remaining = list(words)
        while remaining:
            word = remaining.pop(0)
            spelling, separator, value = word.partition("=")
            name = self._aliases.get(_name(spelling), _name(spelling))
            option = self._options.get(name)
            has_dashes = spelling.startswith("-")
            has_next_value = has_dashes and not separator and bool(remaining) and is_value(remaining[0])
            if not has_dashes and not separator:
                line.add_unnamed(word)
            elif name in self._arguments and separator:
                line.arguments[name] = value
            elif name in self._arguments and has_next_value:
                line.arguments[name] = remaining.pop(0)
            elif option is not None and option.is_flag:
                is_set = not separator or click.BOOL.convert(value, option, ctx)
                line.words += [_dashed(name)] if is_set else []
            elif option is not None and separator:
                line.words.append(f"{_dashed(name)}={value}")
            elif option is not None and remaining:
                line.words += [_dashed(name), remaining.pop(0)]
            elif has_next_value:
                line.words += [word, remaining.pop(0)]
            else:
                line.words.append(word)
        line.fill_arguments(self._arguments)
        line.fill_options(self._positions)
        in_order = [line.arguments[name] for name in self._arguments if name in line.arguments]
        return [*in_order, *line.words]


@dataclass
class _Line:
    """A command line while it is rewritten.

    Attributes:
        words: all words but those of `arguments`.
        arguments: the words of the command's arguments, by name.
        unnamed: the positions in `words` of those without a name.
    """

    words: list[str] = field(default_factory=list[str])
    arguments: dict[str, str] = field(default_factory=dict[str, str])
    unnamed: list[int] = field(default_factory=list[int])

    def add_unnamed(self, word: str) -> None:
        self.unnamed.append(len(self.words))
        self.words.append(word)

    def fill_arguments(self, names: Sequence[str]) -> None:
        """Gives the first words without a name to the arguments that are not given by name."""
        for name in names:
            if name in self.arguments or not self.unnamed:
                continue
            position = self.unnamed.pop(0)
            self.arguments[name] = self.words.pop(position)
            self.unnamed = [later - 1 for later in self.unnamed]

    def fill_options(self, names: Sequence[str]) -> None:
        """Gives the next words without a name to the options that are not given, but leaves a configuration alone."""
        given = {word.partition("=")[0] for word in self.words}
        for name in names:
            if _dashed(name) in given:
                continue
            candidates = [position for position in self.unnamed if not self.words[position].endswith(_CONFIGURATIONS)]
            if not candidates:
                return
            position = candidates[0]
            self.unnamed.remove(position)
            self.words[position] = f"{_dashed(name)}={self.words[position]}"


def _name(spelling: str) -> str:
    return spelling.lstrip("-").replace("-", "_")


def _dashed(name: str) -> str:
    return f"--{name.replace('_', '-')}"
