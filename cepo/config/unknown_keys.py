"""Explains the keys of a configuration that no setting has, all at once: other programs' names, misspelt and misplaced ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from cepo.algorithms import available_estimators
from cepo.config.listing import all_settings, written
from cepo.config.other_programs import translation_of
from cepo.config.sources import Origins
from cepo.errors import ConfigError, nearest_name
from cepo.files.trees import Fields, is_mapping, leaves

_MOST_NAMES = 12
_LOSSES = "worker.actor.loss"


@dataclass(frozen=True)
class KnownKeys:
    """The dotted keys of all settings, and a function that says which other keys are explained elsewhere."""

    settings: Sequence[str]
    is_explained: Callable[[str], bool]

    @cached_property
    def sections(self) -> dict[str, list[str]]:
        """The names directly below each section, in order of declaration; the whole configuration's section is empty."""
        sections: dict[str, list[str]] = {}
        for key in self.settings:
            parts = key.split(".")
            for depth, name in enumerate(parts):
                names = sections.setdefault(".".join(parts[:depth]), [])
                if name not in names:
                    names.append(name)
        for method in available_estimators():
            sections.setdefault(f"algorithm.{method}", [])
        return sections

    def unknown_in(self, tree: Fields, path: str = "") -> Iterator[tuple[str, object]]:
        """Yields the dotted keys, with their values, that are no settings, each of an unknown section."""
        for name, value in tree.items():
            key = f"{path}{name}"
            if key in self.settings or key == _LOSSES or self.is_explained(key):
                continue
            if key in self.sections:
                if is_mapping(value):
                    yield from self.unknown_in(value, f"{key}.")
            elif is_mapping(value):
                yield from self._unknown_leaves(value, key)
            else:
                yield key, value

    def _unknown_leaves(self, tree: Fields, path: str) -> Iterator[tuple[str, object]]:
        for key, value in leaves(tree, path):
            if not self.is_explained(key):
                yield key, value

    def explained(self, key: str, value: object) -> str:
        """Returns what to write in place of an unknown key, or which keys there are."""
        section, _, name = key.rpartition(".")
        names = self.sections.get(section, [])
        nearby = nearest_name(name, names)
        if nearby is not None and _is_misspelt(name, nearby):
            return f"did you mean '{_joined(section, nearby)}'?"
        translation = translation_of(key, written(value))
        if translation is not None:
            return str(translation)
        same_name = [known for known in self.settings if known.rpartition(".")[2] == name]
        if same_name:
            return f"did you mean '{min(same_name, key=len)}'?"
        if nearby is not None:
            return f"did you mean '{_joined(section, nearby)}'?"
        near_elsewhere = nearest_name(name, [known.rpartition(".")[2] for known in self.settings])
        if near_elsewhere is not None:
            places = [known for known in self.settings if known.rpartition(".")[2] == near_elsewhere]
            return f"did you mean '{min(places, key=len)}'?"
        return self._listed(section)

    def _listed(self, section: str) -> str:
        while section and section not in self.sections:
            section = section.rpartition(".")[0]
        names = self.sections[section]
        where = f"under '{section}'" if section else "at the top"
        listed = ", ".join(names[:_MOST_NAMES])
        more = f", ... (cepo help {section} lists all {len(names)})" if len(names) > _MOST_NAMES else ""
        return f"known {where}: {listed}{more}"


def _joined(section: str, name: str) -> str:
    return f"{section}.{name}" if section else name


def _is_misspelt(name: str, near: str) -> bool:
    """Returns whether two names differ by little, so that another program's name is a less likely explanation."""
    return name.replace("-", "").replace("_", "").casefold() == near.replace("_", "").casefold()


def require_known_keys(tree: Fields, origins: Origins, *, is_explained: Callable[[str], bool]) -> None:
    """Raises `ConfigError` if keys are unknown, with all of them in the order of their sources.

    `is_explained` says which keys are no settings of this package and are explained elsewhere.
    """
    known = KnownKeys([setting.key for setting in all_settings()], is_explained)
    order = {key: number for number, key in enumerate(origins.places)}
    unknown = sorted(known.unknown_in(tree), key=lambda item: order.get(item[0], 0))
    explanations: list[str] = []
    for key, value in unknown:
        place = origins.place_of(key)
        beginning = "" if place is None else f"{place}: "
        explanations.append(f"{beginning}unknown key '{key}': {known.explained(key, value)}")
    if len(explanations) == 1:
        raise ConfigError(explanations[0])
    if explanations:
        listed = "".join(f"\n  {explanation}" for explanation in explanations)
        raise ConfigError(
            f"{len(explanations)} keys are unknown:{listed}\nIn a file, a.b.c=value is written as nested keys."
        )
