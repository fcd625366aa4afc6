"""Reads the words of a command line as settings, and explains words that are none and what a shell made of some."""

from __future__ import annotations

import itertools
import os
import re
import shlex
from collections.abc import Callable, Sequence

from cepo.algorithms import available_estimators
from cepo.errors import ConfigError

_KEY = r"[A-Za-z_][\w-]*(?:\.[\w-]+)*"
_SETTING = re.compile(rf"{_KEY}=.*", re.DOTALL)
_FLAG = re.compile(rf"(?P<dashes>--?)(?P<key>{_KEY})(?:=(?P<value>.*))?", re.DOTALL)
_WITH_COLON = re.compile(rf"(?P<key>{_KEY}):(?P<value>[^/\\].*)?")
_NUMBER = re.compile(r"-[\d.]+([eE]-?\d+)?")
_CONFIG_NAMES = ("config", "c", "config_file", "cfg")
_SWEEPS = ("-m", "--multirun", "--sweep")
_BRACKETS = {"[": "]", "{": "}"}
_CONFIG_NAME = re.compile(r"[\w-]+/[\w-]+")
_MOST_WORDS = 20


def settings_in(words: Sequence[str], explained: Callable[[str, str], str]) -> list[str]:
    """Returns the words, each of the form `key=value`; `config=FILE` names the configuration.

    Raises `ConfigError` for a word that is no setting, and for what a shell has split or expanded. `explained(key, value)`
    says what to write in place of flags.
    """
    _refuse_spaces(words)
    _refuse_split_values(words)
    flags = _flags_in(words)
    if flags:
        raise ConfigError(_about_flags(flags, explained))
    for word, next_word in itertools.zip_longest(words, words[1:], fillvalue=""):
        if not _SETTING.fullmatch(word):
            raise ConfigError(f"argument '{word}': settings have the form a.b.c=value.{_remedy(word, next_word)}")
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
        elif flag in _SWEEPS:
            remedies.append(f"'{flag}': a command is one run; repeat it with each value, in a loop of the shell")
        else:
            remedies.append(f"'{flag}': {explained(key, value)}")
    if len(remedies) == 1:
        return f"settings have no dashes. {remedies[0]}"
    return "settings have no dashes:" + "".join(f"\n  {remedy}" for remedy in remedies)


def _is_value(word: str) -> bool:
    """Returns whether a word after `--key` is its value, and not the next setting."""
    if word.startswith("-"):
        return _NUMBER.fullmatch(word) is not None
    return not _SETTING.fullmatch(word) or word.startswith(tuple(_BRACKETS))


def _remedy(word: str, next_word: str) -> str:
    colon = _WITH_COLON.fullmatch(word)
    key, separator, value = word.partition("=")
    dotted = re.sub(r"[./]+", ".", key)
    if separator and _SETTING.fullmatch(f"{dotted}="):
        return f" Did you mean '{dotted}={value}'?"
    if word in _CONFIG_NAMES and next_word:
        return f" Did you mean 'config={next_word}'?"
    if word.endswith((".yaml", ".yml")) or _CONFIG_NAME.fullmatch(word):
        return f" Did you mean 'config={word}'?"
    if word.startswith("+"):
        return f" Did you mean '{word.lstrip('+')}'?"
    if word.startswith("~"):
        return f" A setting is not removed but has another value; '{key[1:]}=null' gives it none, if it may have none."
    if word in available_estimators():
        return f" Did you mean 'algorithm.adv_estimator={word}'? Several methods stand in one word: --methods a,{word}"
    if word.startswith("microgeo:") or os.path.exists(word):
        return (
            f" What is read is named behind a key: data.train_files={word} in train, data={word} in evaluate and credit"
        )
    if colon is not None:
        value = (colon["value"] or next_word).strip()
        return f" Did you mean '{colon['key']}={value}'?"
    if "." in word and next_word and _is_value(next_word):
        return f" Did you mean '{word}={next_word}'?"
    return " For example: config=microgeo/base trainer.max_steps=20"


def _refuse_spaces(words: Sequence[str]) -> None:
    """Raises `ConfigError` for words such as `a.b = value`, of which a shell makes two or three arguments."""
    for previous_word, word, next_word in zip(["", *words], words, [*words[1:], ""], strict=False):
        continues_previous = word.startswith("=")
        has_no_value = word.endswith("=")
        if (continues_previous and previous_word) or (has_no_value and next_word and "=" not in next_word):
            parts = [word]
            if continues_previous:
                parts.insert(0, previous_word)
            if has_no_value:
                parts.append(next_word)
            raise ConfigError(f"'{' '.join(parts)}': write a setting without spaces: {''.join(parts)}")


def _refuse_split_values(words: Sequence[str]) -> None:
    """Raises `ConfigError` for a list, a mapping or a text that begins in one word and ends in a later one."""
    for position, word in enumerate(words):
        key, separator, value = word.partition("=")
        if not separator or not _is_open(value):
            continue
        for end in range(position + 1, min(position + _MOST_WORDS, len(words))):
            whole_value = " ".join([value, *words[position + 1 : end + 1]])
            if not _is_open(whole_value):
                whole = f"{key}={whole_value}"
                raise ConfigError(
                    f"argument '{word}': the shell has split this setting at its spaces. Quote the whole setting: "
                    f"{shlex.quote(whole)}"
                )


def _is_open(value: str) -> bool:
    """Returns whether a value begins with a bracket or a quote that it does not close."""
    first = value[:1]
    if first in _BRACKETS:
        return value.count(first) > value.count(_BRACKETS[first])
    return first in ("'", '"') and value.count(first) % 2 == 1
