"""All settings with what they accept and mean, for `--help`, completion and the generated pages."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, Union

from cepo.algorithms import available_estimators, estimator_class
from cepo.config.options import has_default, rule_of
from cepo.config.schema import RunConfig
from cepo.config.values import accepted_type


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One dotted key.

    Attributes:
        default: as it is written on the command line; None where the setting is required.
        accepted: its type and bounds, in words.
        choices: the words it takes; empty where there are too many to list.
        help: what it means; empty for settings of a method, which docs/methods.md describes.
    """

    key: str
    default: str | None
    accepted: str
    choices: tuple[str, ...]
    help: str


def settings_of(section: type[Any] = RunConfig, path: str = "") -> Iterator[Setting]:
    """The settings of a section in the schema's order, nested sections in place; methods have sections of their own."""
    hints = typing.get_type_hints(section)
    for field in dataclasses.fields(section):
        name, hint, rule = f"{path}{field.name}", hints[field.name], rule_of(field)
        if dataclasses.is_dataclass(hint):
            yield from settings_of(typing.cast("type[Any]", hint), f"{name}.")
        elif not rule.internal:
            yield Setting(
                key=name,
                default=_default(field) if has_default(field) else None,
                accepted=accepted_type(hint) + (f", {rule.accepted_range()}" if rule.accepted_range() else ""),
                choices=_choices(hint),
                help=rule.help,
            )


def method_settings(name: str) -> list[Setting]:
    """The settings of `algorithm.<name>`."""
    return list(settings_of(estimator_class(name).Config, f"algorithm.{name}."))


def all_settings() -> list[Setting]:
    """Every key a configuration may hold, those of the methods last."""
    return [*settings_of(), *(setting for name in available_estimators() for setting in method_settings(name))]


def written(value: Any) -> str:
    """A value as the command line takes it."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _default(field: dataclasses.Field[Any]) -> str:
    return written(field.default if field.default is not dataclasses.MISSING else field.default_factory())  # type: ignore[misc]


def _choices(hint: Any) -> tuple[str, ...]:
    """The words of an annotation that takes nothing else."""
    if typing.get_origin(hint) is Literal:
        return tuple(map(str, typing.get_args(hint)))
    if hint is bool:
        return ("true", "false")
    if typing.get_origin(hint) in (Union, types.UnionType):
        parts = [("null",) if part is type(None) else _choices(part) for part in typing.get_args(hint)]
        return tuple(word for words in parts for word in words) if all(parts) else ()
    return ()
