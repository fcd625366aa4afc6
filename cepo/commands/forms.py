"""Lets every argument of a command be written in three forms: `--checkpoint X`, `checkpoint=X`, or by its position."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import click

from cepo.terminal.words import is_value

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
        self._aliases = ALIASES.get(command.name or "", {})
        self._positions = POSITIONS.get(command.name or "", ())
        self._options: dict[str, click.Option] = {}
        self._arguments: list[str] = []
        for parameter in command.params:
            if isinstance(parameter, click.Option):
                for spelling in parameter.opts:
                    self._options[_name(spelling)] = parameter
            elif parameter.nargs == 1 and parameter.name is not None:
                self._arguments.append(parameter.name)

    def rewritten(self, words: Sequence[str], ctx: click.Context) -> list[str]:
        remaining = list(words)
        arguments: dict[str, str] = {}
        others: list[str] = []
        unnamed: list[int] = []  # their positions in `others`
        while remaining:
            word = remaining.pop(0)
            spelling, separator, value = word.partition("=")
            name = self._aliases.get(_name(spelling), _name(spelling))
            option = self._options.get(name)
            has_dashes = spelling.startswith("-")
            has_next_value = has_dashes and not separator and bool(remaining) and is_value(remaining[0])
            if not has_dashes and not separator:
                unnamed.append(len(others))
                others.append(word)
            elif name in self._arguments and (separator or has_next_value):
                arguments[name] = value if separator else remaining.pop(0)
            elif option is not None and option.is_flag:
                if not separator or ctx.resilient_parsing or click.BOOL.convert(value, option, ctx):
                    others.append(_dashed(name))
            elif option is not None and separator:
                others.append(f"{_dashed(name)}={value}")
            elif has_dashes and remaining and (option is not None or has_next_value):
                others += [word if option is None else _dashed(name), remaining.pop(0)]
            else:
                others.append(word)
        self._place(unnamed, arguments, others)
        in_order = [arguments[name] for name in self._arguments if name in arguments]
        return [*in_order, *others]

    def _place(self, unnamed: list[int], arguments: dict[str, str], others: list[str]) -> None:
        """Gives the first words without a name to the arguments, then to the options, that are not given by name."""
        placed: list[int] = []
        missing = [name for name in self._arguments if name not in arguments]
        for name, position in zip(missing, unnamed, strict=False):
            arguments[name] = others[position]
            placed.append(position)
        given = {word.partition("=")[0] for word in others}
        missing_options = [name for name in self._positions if _dashed(name) not in given]
        free = [position for position in unnamed[len(placed) :] if not others[position].endswith(_CONFIGURATIONS)]
        for name, position in zip(missing_options, free, strict=False):
            others[position] = f"{_dashed(name)}={others[position]}"
        for position in reversed(placed):
            del others[position]


def _name(spelling: str) -> str:
    return spelling.lstrip("-").replace("-", "_")


def _dashed(name: str) -> str:
    return f"--{name.replace('_', '-')}"
