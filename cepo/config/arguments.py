"""Reads the words of a command line as settings, and explains words that are none."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence

from cepo.errors import ConfigError

_KEY = r"[A-Za-z_][\w-]*(?:\.[\w-]+)*"
_SETTING = re.compile(rf"{_KEY}=.*", re.DOTALL)
_FLAG = re.compile(rf"(?P<dashes>--?)(?P<key>{_KEY})(?:=(?P<value>.*))?", re.DOTALL)
_NUMBER = re.compile(r"-[\d.]+([eE]-?\d+)?")
_CONFIG_NAMES = ("config", "c", "config_file", "config_name", "cfg")
_CONFIG_NAME = re.compile(r"[\w-]+/[\w-]+")


def settings_in(words: Sequence[str], explained: Callable[[str, str], str]) -> list[str]:
    """Returns the words, each of the form `key=value`; `config=FILE` names the configuration.

    Raises `ConfigError` for a word that is no setting. `explained(key, value)` says what to write in place of flags.
    """
    flags = _flags_in(words)
    if flags:
        raise ConfigError(_about_flags(flags, explained))
    for word in words:
        if not _SETTING.fullmatch(word):
            raise ConfigError(f"argument '{word}': {_what_is_right(word)}")
    return list(words)


def _flags_in(words: Sequence[str]) -> list[tuple[str, str, str]]:
    """Returns flag, key and value of each `--key value`, `--key=value`, `--key a b` (a list) and `--key`, which is true."""
    flags: list[tuple[str, str, str]] = []
    for position, word in enumerate(words):
        flag = _FLAG.fullmatch(word)
        if flag is None:
            continue
        value = flag["value"]
        if value is None:
            values = list(itertools.takewhile(_is_value, words[position + 1 :]))
            value = f"[{','.join(values)}]" if len(values) > 1 else next(iter(values), "true")
        flags.append((flag["dashes"] + flag["key"], flag["key"].replace("-", "_"), value))
    return flags


def _about_flags(flags: Sequence[tuple[str, str, str]], explained: Callable[[str, str], str]) -> str:
    remedies: list[str] = []
    for flag, key, value in flags:
        if key in _CONFIG_NAMES:
            remedies.append(f"'{flag}': write config={value}")
        else:
            remedies.append(f"'{flag}': {explained(key, value)}")
    if len(remedies) == 1:
        return f"settings have no dashes. {remedies[0]}"
    return "settings have no dashes:" + "".join(f"\n  {remedy}" for remedy in remedies)


def _is_value(word: str) -> bool:
    """Returns whether a word after `--key` is its value, and not the next setting."""
    if word.startswith("-"):
        return _NUMBER.fullmatch(word) is not None
    return _SETTING.fullmatch(word) is None


def _what_is_right(word: str) -> str:
    """Returns what to write in place of a word that is no setting, of which a shell may have made several words."""
    if word.endswith((".yaml", ".yml")) or _CONFIG_NAME.fullmatch(word):
        return f"did you mean 'config={word}'?"
    if word.startswith(("+", "~")):
        return (
            "every setting has a value, so none is added or removed as in Hydra. Write key=value without a sign; cepo help "
            "SECTION has the defaults"
        )
    return (
        "settings have the form a.b.c=value, with no space beside the equals sign, and with quotes around the whole setting "
        "if its value has spaces: trainer.max_steps=20 'trainer.logger=[console, wandb]'"
    )
