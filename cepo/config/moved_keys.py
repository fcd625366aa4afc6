"""Names the present key of a setting that stood in the section of a method before version 0.4."""

from __future__ import annotations

from typing import Any

from cepo.algorithms import available_estimators
from cepo.algorithms.base import own_fields
from cepo.algorithms.settings import SharedSettings
from cepo.config.sources import Origins
from cepo.errors import ConfigError, did_you_mean
from cepo.sections import default_tree
from cepo.trees import Tree, is_mapping, leaves

_RENAMED = {"gae_lambda": "lam"}
_SECTIONS = [name for name, value in default_tree(SharedSettings).items() if is_mapping(value)]


def refuse_moved_keys(tree: Tree, origins: Origins) -> None:
    """Raises `ConfigError` for keys `algorithm.<method>.*` that are not the method's own, with their present names."""
    lines: list[str] = []
    for name in available_estimators():
        section: object = tree["algorithm"].get(name)
        for key, _ in leaves(section) if is_mapping(section) else ():
            if key and key.partition(".")[0] not in own_fields(name):
                old, new = f"algorithm.{name}.{key}", _present(key)
                known = [*own_fields(name), *(each.rpartition(".")[2] for each in _shared_keys())]
                near = did_you_mean(key.rpartition(".")[2], known)
                says = f"unknown key '{old}'.{near}" if new is None else f"{old} is now {new}, shared by the methods."
                lines.append(str(origins.error(old, says)))
    if lines:
        raise ConfigError("\n".join(lines))


def with_present_keys(config: Tree) -> Tree:
    """Returns a recorded configuration with the settings of its method under their present keys."""
    algorithm: Any = config.get("algorithm")
    section: object = algorithm.get(algorithm.get("adv_estimator")) if is_mapping(algorithm) else None
    if not is_mapping(section) or any(name in algorithm for name in _SECTIONS):
        return config
    moved: Tree = {**algorithm}
    for key, value in leaves(section):
        if (new := _present(key)) is not None:
            *around, last = new.split(".")[1:]
            group = moved
            for each in around:
                group = group.setdefault(each, {})
            group[last] = value
    name = algorithm["adv_estimator"]
    if name in available_estimators():
        own = {key: value for key, value in section.items() if key in own_fields(name)}
        moved = {key: value for key, value in moved.items() if key != name} | ({name: own} if own else {})
    return {**config, "algorithm": moved}


def _present(key: str) -> str | None:
    """Returns the present dotted key of a setting's key within a method's section."""
    key = _RENAMED.get(key, key)
    known = _shared_keys()
    found = [key] if key in known else [each for each in known if each.endswith(f".{key}")]
    return f"algorithm.{found[0]}" if len(found) == 1 else None


def _shared_keys() -> list[str]:
    return [key for key, _ in leaves(default_tree(SharedSettings))]
