"""From the plain tree of a configuration to the schema's dataclasses: types, choices and bounds."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal, Union

from cepo.config.options import OptionRule, has_default, rule_of, shown_number
from cepo.config.sources import Origins
from cepo.errors import ConfigError, did_you_mean

_TRUE_WORDS = ("true", "yes", "on", "1")
_FALSE_WORDS = ("false", "no", "off", "0")
_PLAIN_TYPES = {int: "an integer", float: "a number", bool: "true or false", str: "text"}


def build_section(section: type[Any], tree: Any, *, path: str, origins: Origins) -> Any:
    """An instance of the schema class `section` from its plain mapping; keys the class does not have are passed over.

    Raises:
        ConfigError: wrong type, value outside its bounds, or a required setting is missing. Names key, value, what is
            accepted, and the place that set it.
    """
    if not isinstance(tree, Mapping):
        raise origins.error(path, f"{path} must be a section with keys, got {_shown(tree)}.")
    hints = typing.get_type_hints(section)
    values: dict[str, Any] = {}
    for field in dataclasses.fields(section):
        key = f"{path}.{field.name}" if path else field.name
        if dataclasses.is_dataclass(hints[field.name]):
            below = tree.get(field.name, {})
            values[field.name] = build_section(hints[field.name], below, path=key, origins=origins)
        elif field.name in tree:
            rule = rule_of(field)
            given = _joined(tree[field.name]) if rule.joined else tree[field.name]
            value = convert(given, hints[field.name], key=key, origins=origins)
            values[field.name] = _checked(value, rule, key=key, origins=origins)
        elif not has_default(field):
            raise ConfigError(f"{key} is required and not set. {rule_of(field).help}")
    return section(**values)


def _joined(value: Any) -> Any:
    """A list of texts as one text with commas; anything else as it is."""
    texts = isinstance(value, list) and value and all(isinstance(entry, str) and "," not in entry for entry in value)
    return ",".join(value) if texts else value


def _checked(value: Any, rule: OptionRule, *, key: str, origins: Origins) -> Any:
    """The value, after the bounds of its rule; the entries of a closed mapping are converted as well."""
    if rule.entries is not None:
        return {name: _checked_entry(name, entry, rule, key=key, origins=origins) for name, entry in value.items()}
    try:
        rule.check(key, value)
    except ConfigError as error:
        raise origins.error(key, str(error)) from None
    return value


def _checked_entry(name: str, value: Any, rule: OptionRule, *, key: str, origins: Origins) -> Any:
    assert rule.entries is not None
    full_key = f"{key}.{name}"
    if name not in rule.entries:
        known = ", ".join(rule.entries)
        message = f"unknown key '{full_key}'.{did_you_mean(name, rule.entries)} Known there: {known}."
        raise origins.error(full_key, message)
    hint, entry_rule = rule.entries[name]
    converted = convert(value, hint, key=full_key, origins=origins)
    return _checked(converted, entry_rule, key=full_key, origins=origins)


def convert(value: Any, hint: Any, *, key: str, origins: Origins) -> Any:
    """`value` as the annotated type: text that spells a number or a truth value is read as one, nothing else changes type.

    Raises:
        ConfigError: the value is of another type, or not one of the choices.
    """
    inner, optional = _without_none(hint)
    if value is None and optional:
        return None
    kind = typing.get_origin(inner) or inner
    if kind is Literal:
        if value in typing.get_args(inner):
            return value
        near = did_you_mean(str(value), typing.get_args(inner))
        raise origins.error(key, f"{key} must be {accepted_type(hint)}, got {_shown(value)}.{near}")
    if kind is list and isinstance(value, list):
        entry_hint = typing.get_args(inner)[0]
        return [
            convert(entry, entry_hint, key=f"{key}[{position}]", origins=origins)
            for position, entry in enumerate(value)
        ]
    if kind is Mapping and isinstance(value, Mapping):
        return dict(value)
    if kind in _PLAIN_TYPES:
        if kind is str and isinstance(value, int | float) and key in origins.arguments:
            return origins.arguments[key]
        converted = _plain(value, kind)
        if converted is not None:
            return converted
    quote = " Write it in quotes." if kind is str and isinstance(value, int | float) else ""
    raise origins.error(key, f"{key} must be {accepted_type(hint)}, got {_shown(value)}.{quote}")


def _plain(value: Any, kind: Any) -> Any:
    """The value as a plain type, or None where it is not one."""
    if kind is bool:
        word = str(value).lower() if isinstance(value, bool | int | str) else ""
        return True if word in _TRUE_WORDS else False if word in _FALSE_WORDS else None
    if isinstance(value, bool):
        return None
    if kind is float and isinstance(value, int | float):
        try:
            return float(value)
        except OverflowError:
            return None
    if isinstance(value, kind):
        return value
    if kind in (int, float) and isinstance(value, str):
        try:
            return kind(value)
        except ValueError:
            return None
    return None


def _without_none(hint: Any) -> tuple[Any, bool]:
    """The annotation without `| None`, and whether it had that."""
    if typing.get_origin(hint) not in (Union, types.UnionType):
        return hint, False
    inner: list[Any] = [choice for choice in typing.get_args(hint) if choice is not type(None)]
    assert len(inner) == 1, f"a setting has one type, got {hint}"
    return inner[0], True


def accepted_type(hint: Any) -> str:
    """What an annotation accepts, in words."""
    inner, optional = _without_none(hint)
    kind = typing.get_origin(inner) or inner
    if kind is Literal:
        choices: list[Any] = list(typing.get_args(inner))
        words = (
            f"one of {', '.join(choices)}" if len(choices) > 1 else f"'{choices[0]}', the only one this release knows"
        )
    elif kind is list:
        entry_hints: list[Any] = list(typing.get_args(inner))
        words = f"a list, each entry {accepted_type(entry_hints[0])}"
    elif kind is Mapping:
        words = "a mapping of keys to values"
    else:
        words = _PLAIN_TYPES[kind]
    return f"{words} or null" if optional else words


def _shown(value: Any) -> str:
    """A value for an error message, with its kind where the bare value could mislead."""
    if value is None:
        return "null"
    if isinstance(value, str):
        return f"the text {value!r}"
    if isinstance(value, int | float) and not isinstance(value, bool):
        return shown_number(value)
    if isinstance(value, Mapping):
        return f"a mapping with the keys {', '.join(map(str, value)) or '(none)'}"
    return (
        f"the list {value!r}"
        if isinstance(value, list)
        else repr(value).lower()
        if isinstance(value, bool)
        else repr(value)
    )
