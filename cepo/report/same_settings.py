"""Decides which runs have the same setting: all that can change training, apart from seeds, names, paths and loggers."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path

from cepo.algorithms.registry import SHARED
from cepo.config.listing import REQUIRED, settings_of
from cepo.files.trees import leaves
from cepo.report.recorded_run import RunData, as_yaml

METHOD = "algorithm.adv_estimator"
UNSET = "not set"
# Beginnings of the settings that cannot change what is trained or how it is measured: names, records, waiting.
_MAY_DIFFER = (
    "trainer.experiment_name",
    "trainer.project_name",
    "trainer.logger",
    "trainer.save_",
    "trainer.launcher",
    "trainer.load_checkpoint_path",
    "trainer.find_last_checkpoint",
    "trainer.accept_changes",
    "trainer.rollouts_",
    "trainer.val_generations_to_log",
    "trainer.val_freq",
    "trainer.val_before_train",
    "trainer.start_timeout",
    "trainer.stage_timeout",
    "trainer.ray_address",
    "trainer.max_restarts",
)
_LONGEST_LABEL = 28
_LARGEST_FOLDER = 50_000_000
"""Of the folders that are compared by content, such as the built-in toy task's model, whose path names cepo's version."""


def differing_keys(configs: Sequence[Mapping[str, str]]) -> list[str]:
    """Returns the settings in which the runs differ, in alphabetical order."""
    keys = sorted(set(chain.from_iterable(configs)))
    return [key for key in keys if _differs(key, configs)]


def configs_of(runs: Sequence[RunData]) -> list[dict[str, str]]:
    """Returns the settings of each run as text, with defaults, and what a path names by its content, however it is spelt."""
    defaults: dict[str, str] = {}
    for setting in settings_of():
        if setting.default is not REQUIRED and not _is_of_methods(setting.key):
            defaults[setting.key] = as_yaml(setting.default)
    configs: list[dict[str, str]] = []
    for run in runs:
        recorded = {key: as_yaml(value) for key, value in leaves(run.config)}
        configs.append(defaults | recorded)
    spellings: dict[str, str] = {}  # by key and content, the first spelling of a path
    for config in configs:
        for key, value in config.items():
            content = _content_of_path(value)
            longer = [other[key] for other in configs if other.get(key, "").endswith(f"/{value}")]
            if content:
                config[key] = spellings.setdefault(f"{key} {content}", value)
            elif longer:  # a relative path, from a folder that this machine does not know
                config[key] = longer[0]
    return configs


def _content_of_path(value: str) -> str:
    """Returns the digest of what a value such as `path` or `path:name` names, with the name; empty if it is no path."""
    if "/" not in value:
        return ""
    path, colon, name = value, "", ""
    if ":" in value:
        path, colon, name = value.rpartition(":")
    content = _content(Path(path))
    return f"{content}{colon}{name}" if content else ""


def _content(path: Path) -> str:
    """Returns the digest of a file or of a small folder of files, and nothing for what cannot be read here."""
    digests: list[str] = []
    try:
        is_folder = path.is_dir()
        files = sorted(path.iterdir()) if is_folder else [path]
        size = sum(file.stat().st_size for file in files)
        if is_folder and size > _LARGEST_FOLDER:
            return ""
        if not all(file.is_file() for file in files):
            return ""
        for file in files:
            with file.open("rb") as opened:
                digest = hashlib.file_digest(opened, "sha256").hexdigest()
            digests.append(f"{file.name} {digest}" if is_folder else digest)
    except OSError:
        return ""
    return " ".join(digests)


def _differs(key: str, configs: Sequence[Mapping[str, str]]) -> bool:
    """Returns whether runs differ in a setting that can change training; in one of some methods, between their runs."""
    values = {config.get(key, UNSET) for config in configs if key in config or not _is_of_methods(key)}
    return len(values) > 1 and not _is_seed(key) and not key.startswith(_MAY_DIFFER)


def _is_of_methods(key: str) -> bool:
    """Returns whether only some methods read a setting, so that the runs of others do not record it."""
    section, _, name = key.partition(".")
    return section == "algorithm" and ("." in name or name in SHARED)


def labels_of(methods: Sequence[str], values: Sequence[Sequence[str]], keys: Sequence[str]) -> Iterator[str]:
    """Yields a short label per setting: its method, then the value that differs within the method, or else a number."""
    for method, values_of_setting in zip(methods, values, strict=True):
        values_of_method = [row for row, name in zip(values, methods, strict=True) if name == method]
        varied_places: list[int] = []
        for place in range(len(keys)):
            variants = {row[place] for row in values_of_method}
            if len(variants) > 1:
                varied_places.append(place)
        if not varied_places:
            yield method
            continue
        place = varied_places[0]
        _, _, name = keys[place].rpartition(".")
        label = f"{method}, {name}={values_of_setting[place]}"
        if len(varied_places) == 1 and len(label) <= _LONGEST_LABEL:
            yield label
        else:
            yield f"{method} ({values_of_method.index(values_of_setting) + 1})"


def seeds_of(run: RunData) -> tuple[tuple[str, str], ...]:
    seeds = [(key, str(value)) for key, value in leaves(run.config) if _is_seed(key)]
    return tuple(sorted(seeds))


def _is_seed(key: str) -> bool:
    return key.rpartition(".")[2] == "seed"
