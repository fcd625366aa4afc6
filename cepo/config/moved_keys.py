"""Names the present key of a setting that stood in the section of a method before version 0.4."""

from __future__ import annotations

from typing import Any

from cepo.algorithms import available_estimators
from cepo.algorithms.base import own_fields
from cepo.algorithms.settings import SharedSettings
from cepo.sections import default_tree
from cepo.trees import Tree, is_mapping, leaves, put

SHARED_KEYS = [key for key, _ in leaves(default_tree(SharedSettings))]
_SECTIONS = {key.partition(".")[0] for key in SHARED_KEYS if "." in key}


def present_key(key: str) -> str | None:
    """Returns the present dotted key of a setting's key within a method's section, such as `weight.clip_radius`."""
    key = {"gae_lambda": "lam"}.get(key, key)
    return min((each for each in SHARED_KEYS if f".{each}".endswith(f".{key}")), key=len, default=None)


def with_present_keys(config: Tree) -> Tree:
    """Returns a recorded configuration with the settings of its method under their present keys."""
    algorithm: Any = config.get("algorithm")
    name = str(algorithm.get("adv_estimator")) if is_mapping(algorithm) else ""
    section: object = algorithm.get(name) if is_mapping(algorithm) else None
    if not is_mapping(section) or _SECTIONS & set(algorithm):
        return config
    own = own_fields(name) if name in available_estimators() else list(section)
    moved: Tree = {key: value for key, value in algorithm.items() if key != name}
    for key, value in leaves(section):
        new = present_key(key)
        put(moved, f"{name}.{key}" if new is None or key.partition(".")[0] in own else new, value)
    return {**config, "algorithm": moved}
