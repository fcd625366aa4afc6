"""Knows the names of the benchmarks, and reads sources of problems that begin with one: `mathvista:FILE`."""

from __future__ import annotations

import re
from dataclasses import dataclass

from cepo.config.paths import find_path, split_source
from cepo.errors import ConfigError, did_you_mean

TITLES = {
    "dynamath": "DynaMath",
    "logicvista": "LogicVista",
    "mathvision": "MathVision",
    "mathvista": "MathVista",
    "mmmu": "MMMU",
    "wemath": "WeMath",
}
"""The name of each benchmark on a command line, and in a table."""
_EMBEDDED = "microgeo"
"""What stands before the colon in names of the built-in toy task's data."""


@dataclass(frozen=True, kw_only=True)
class NamedSource:
    """A source of problems, with the name of the benchmark that the user gave before it, if any."""

    name: str | None
    source: str

    def __str__(self) -> str:
        return self.source if self.name is None else f"{self.name}:{self.source}"


def named_source(written: str) -> NamedSource:
    """Reads `NAME:SOURCE` or `SOURCE`; a path that exists is always a path.

    Case, `-` and `_` do not matter in the name of a benchmark. Raises `ConfigError` for an unknown name or no source.
    """
    written = written.strip()
    path, _ = split_source(written)
    is_path = find_path(path) is not None
    prefix, colon, source = written.partition(":")
    if is_path or "/" in prefix or prefix == _EMBEDDED:
        return NamedSource(name=None, source=written)
    known = {_plain(name): name for name in TITLES}
    name = known.get(_plain(prefix if colon else path))
    if name is None and not colon:
        return NamedSource(name=None, source=written)
    if name is None:
        near = did_you_mean(prefix.casefold(), TITLES)
        raise ConfigError(
            f"data={written}: there is no such path, and '{prefix}' is no benchmark.{near} Known: {', '.join(TITLES)}"
        )
    if not source.strip():
        raise ConfigError(
            f"data={written}: no data; give {name}:SOURCE, with a file, a folder or a hub name org/name@split"
        )
    return NamedSource(name=name, source=source.strip())


def is_name(text: str) -> bool:
    """Returns whether a text is the name of a benchmark in some spelling."""
    return _plain(text) in map(_plain, TITLES)


def _plain(name: str) -> str:
    return re.sub(r"[\s_-]", "", name).casefold()
