"""Explains the keys of a configuration that no setting has, all at once: other programs' names, misspelt and misplaced ones."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

from cepo.algorithms import available_estimators
from cepo.config.easyr1 import EASYR1_KEYS, is_explained
from cepo.config.listing import all_settings
from cepo.config.other_programs import translation_of
from cepo.config.sources import Origins
from cepo.errors import ConfigError, nearest_name
from cepo.files.trees import Fields, is_mapping, leaves
from cepo.sections.messages import written

_MOST_NAMES = 12
_NEAR_ELSEWHERE = 0.9
"""How near a name of another section must be: there are so many that some name is always a little alike."""
_NEAR_IN_TRANSLATION = 0.75
_LOSSES = "worker.actor.loss"


class KnownKeys:
    """The dotted keys of all settings; keys of EasyR1 may be suggested too."""

    def __init__(self) -> None:
        self.settings = [setting.key for setting in all_settings()]

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
            if key in self.settings or key == _LOSSES or is_explained(key):
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
            if not is_explained(key):
                yield key, value

    def explained(self, key: str, value: object) -> str:
        """Returns what to write in place of an unknown key, or which keys there are."""
        section, _, name = key.rpartition(".")
        names = self.sections.get(section, [])
        nearby = nearest_name(name, names)
        if nearby is not None and _is_misspelt(name, nearby):
            return f"Did you mean '{_joined(section, nearby)}'?"
        translation = translation_of(key, written(value))
        if translation is not None:
            missing = next((name for name in translation.keys if not self._exists(name)), None)
            if missing is None:
                return str(translation)
            section, _, name = missing.rpartition(".")
            near = nearest_name(name, self.sections.get(section, []), cutoff=_NEAR_IN_TRANSLATION)
            instead = "leave it out" if near is None else f"did you mean '{section}.{near}'?"
            return f"This is a name of {translation.program}, and nothing here has its meaning; {instead}"
        moved = self._moved(key)
        if moved is not None:
            return f"Did you mean '{moved}'?"
        if nearby is not None:
            return f"Did you mean '{_joined(section, nearby)}'?"
        near_elsewhere = nearest_name(
            name, [known.rpartition(".")[2] for known in self.settings], cutoff=_NEAR_ELSEWHERE
        )
        if near_elsewhere is not None:
            places = [known for known in self.settings if known.rpartition(".")[2] == near_elsewhere]
            return f"Did you mean '{min(places, key=len)}'?"
        return self._listed(section)

    def _exists(self, key: str) -> bool:
        """Returns whether a key is a setting, an entry of a setting that is a mapping, or a key that EasyR1 has."""
        if key in EASYR1_KEYS or is_explained(key):
            return True
        parent = key
        while "." in parent:
            if parent in self.settings:
                return True
            parent = parent.rpartition(".")[0]
        return False

    def _moved(self, key: str) -> str | None:
        """Returns the shortest known key that ends as `key` does, with as many of its last names as possible."""
        parts = key.split(".")
        for start in range(len(parts)):
            ending = ".".join(parts[start:])
            matches = [known for known in [*self.settings, *EASYR1_KEYS] if f".{known}".endswith(f".{ending}")]
            if matches:
                return min(matches, key=len)
        return None

    def _listed(self, section: str) -> str:
        while section and section not in self.sections:
            section = section.rpartition(".")[0]
        names = self.sections[section]
        where = f"under '{section}'" if section else "at the top"
        listed = ", ".join(names[:_MOST_NAMES])
        more = f", ... (cepo help {section} lists all {len(names)})" if len(names) > _MOST_NAMES else ""
        return f"Known {where}: {listed or '(none)'}{more}."


def what_to_write(key: str, value: str) -> str:
    """Returns what to write in place of a flag `--key value`, which may be one of another program's."""
    known = KnownKeys()
    if key in known.settings:
        return f"write {key}={value}"
    return known.explained(key, value)


def _joined(section: str, name: str) -> str:
    return f"{section}.{name}" if section else name


def _is_misspelt(name: str, near: str) -> bool:
    """Returns whether two names differ by little, so that another program's name is a less likely explanation."""
    letters = name.replace("-", "").replace("_", "")
    letters_near = near.replace("_", "")
    return letters.casefold() == letters_near.casefold()


def require_known_keys(tree: Fields, origins: Origins) -> None:
    """Raises `ConfigError` if keys are unknown, with all of them in the order of their sources."""
    known = KnownKeys()
    order = {key: number for number, key in enumerate(origins.places)}
    unknown = sorted(known.unknown_in(tree), key=lambda item: order.get(item[0], 0))
    explanations: list[str] = []
    for key, value in unknown:
        place = origins.place_of(key)
        beginning = "" if place is None else f"{place}: "
        explanations.append(f"{beginning}unknown key '{key}'. {known.explained(key, value)}")
    if len(explanations) == 1:
        raise ConfigError(explanations[0])
    if explanations:
        listed = "".join(f"\n  {explanation}" for explanation in explanations)
        raise ConfigError(
            f"{len(explanations)} keys are unknown:{listed}\nIn a file, a.b.c=value is written as nested keys."
        )
