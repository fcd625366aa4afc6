"""Lists all settings with accepted values and meanings, for `cepo help` and generated pages."""

from __future__ import annotations

import functools
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter

from cepo.algorithms import available_estimators, estimator_class
from cepo.algorithms.registry import METHODS
from cepo.config.other_programs import translation_of
from cepo.config.schema import RunSettings
from cepo.errors import ConfigError, did_you_mean
from cepo.sections.messages import accepted_range, accepted_type, leaves_of, written
from cepo.sections.reader import default_tree

REQUIRED = object()
"""Stands for the default of a setting that has none."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One dotted key of the configuration."""

    key: str
    default: object  # or `REQUIRED`
    accepted: str  # type and bounds, in words
    help: str

    @property
    def written_default(self) -> str | None:
        """The default in the command line's syntax; None if the setting is required."""
        return None if self.default is REQUIRED else written(self.default)


@functools.cache  # every configuration that is read asks for all of them, and a schema takes milliseconds
def settings_of(section: type[Any] = RunSettings, path: str = "") -> Sequence[Setting]:
    """Returns the settings of a section in order of declaration, without those that a single method has."""
    defaults = default_tree(section)
    settings: list[Setting] = []
    for key, node in leaves_of(TypeAdapter(section).json_schema()):
        default: Any = defaults
        for part in key.split("."):
            default = default.get(part, REQUIRED)
        bounds = accepted_range(node)
        settings.append(
            Setting(
                key=f"{path}{key}",
                default=default,
                accepted=f"{accepted_type(node)}, {bounds}" if bounds else accepted_type(node),
                help=node.get("description", ""),
            )
        )
    return tuple(settings)


def method_settings(name: str) -> list[Setting]:
    """Returns the settings that the method alone reads."""
    path = f"algorithm.{name}."
    fields = METHODS.own_fields(name)
    settings: list[Setting] = []
    for setting in settings_of(estimator_class(name).Config, path):
        field, _, _ = setting.key.removeprefix(path).partition(".")
        if field in fields:
            settings.append(setting)
    return settings


def all_settings() -> list[Setting]:
    settings = list(settings_of())
    for name in available_estimators():
        settings += method_settings(name)
    return settings


def settings_in_words(name: str) -> str:
    """Describes the settings of the section `name`, or those with that dotted key or that last name."""
    settings = all_settings()
    described = [setting for setting in settings if f"{setting.key}.".startswith(f"{name.strip('.')}.")]
    if not described:
        described = [setting for setting in settings if setting.key.rpartition(".")[2] == name]
    if not described:
        sections = sorted({setting.key.rpartition(".")[0] for setting in settings})
        keys = [setting.key for setting in settings]
        translation = translation_of(name, "VALUE")
        if "/" in name:
            suggestion = " It is a metric: docs/reading-a-run.md, and docs/methods.md#what-the-metrics-count."
        elif name in available_estimators():
            suggestion = f" It is a method: docs/methods.md#{name}, and algorithm.adv_estimator={name} chooses it."
        elif translation is not None:
            suggestion = f" {str(translation).rstrip('.')}."
        else:
            suggestion = did_you_mean(name, [*sections, *keys])
        raise ConfigError(f"no setting begins with '{name}'.{suggestion} Sections: {', '.join(sections)}")
    paragraphs: list[str] = []
    for setting in described:
        text = textwrap.fill(f"{setting.help} {setting.accepted.capitalize()}.", 106)
        paragraphs.append(f"{setting.key}={setting.written_default or '(required)'}")
        paragraphs.append(textwrap.indent(text, "    "))
    return "\n".join(paragraphs)
