"""Reads safe settings from the `config.yaml` of a run folder from an unknown source, and none that run code.

A run folder may have been downloaded, so its configuration must neither choose code that runs here nor read this
machine's environment. Users who trust it pass `config=<folder>/config.yaml` or the setting on the command line.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

from cepo.config.easyr1 import EASYR1_KEYS
from cepo.config.paths import PACKAGE_FOLDER, SHIPPED_FOLDER, find_path, split_function, without_user
from cepo.config.sources import Origins, Source, read_file
from cepo.config.worker_schema import parts_of
from cepo.errors import ConfigError, DataError
from cepo.foreign_files import require_within
from cepo.trees import Fields, Tree, is_list, leaves, nested, texts_of, with_texts

logger = logging.getLogger(__name__)

MODEL = "worker.actor.model"
CHAT_TEMPLATE, FORMAT_PROMPT = "data.override_chat_template", "data.format_prompt"
_EVALUATED = (
    "data",
    MODEL,
    "worker.rollout",
    "worker.reward.reward_function",
    "worker.reward.reward_function_kwargs",
    "worker.reward.reward_weights",
    "worker.reward.answer_function",
    "worker.reward.skip_special_tokens",
    "worker.reward.timeout_seconds",
    "algorithm.correct_key",
    "algorithm.correct_threshold",
)
_REMOTE_CODE = f"{MODEL}.trust_remote_code"
_FUNCTIONS = ("worker.reward.reward_function", "worker.reward.answer_function")
_INTERPOLATION = re.compile(r"(?<!\\)(?:\\\\)*\$\{")
"""Matches `${` after an even number of backslashes; after an odd number it is text."""


def recorded_for_evaluation(file: Path, given: Collection[str], *, also: Collection[str] = ()) -> Source:
    """Returns data, model, sampling and verdict settings of a run's `config.yaml`, without the keys `given` elsewhere.

    `also` are further sections to read, which must not name files. Raises `ConfigError` if a needed setting names a reward
    file that is not part of cepo, a chat template or a format prompt outside the run folder, or is a reference, which may
    read the environment.
    """
    kept, origins = _kept(file, (*_EVALUATED, *also), given)
    for key in _FUNCTIONS:
        value = kept.get(key)
        names = [] if value is None else value if is_list(value) else parts_of(str(value))
        for name in map(str, names):
            if not _is_shipped(split_function(name)[0]):
                raise ConfigError(
                    f"{origins.place_of(key)}: the run was rewarded by {name}, a file that is not part of cepo and would run "
                    f"here. If you trust it, give {key}={name}, or config={file} for the whole configuration"
                )
    for key in (CHAT_TEMPLATE, FORMAT_PROMPT):
        _require_own_file(kept, key, file, f"{key}=")
    return Source(nested(kept), origins)


def recorded_model(file: Path, given: Collection[str]) -> tuple[Fields, str | None]:
    """Returns the run's `worker.actor.model`, without `trust_remote_code`, and the file of its chat template."""
    kept, _ = _kept(file, (MODEL, CHAT_TEMPLATE), given)
    of_model = {key.removeprefix(f"{MODEL}."): value for key, value in kept.items() if key.startswith(f"{MODEL}.")}
    model = without_interpolation(nested(of_model))
    if not model:
        raise ConfigError(f"{file} is not the configuration of a run: {MODEL} is not a section")
    _require_own_file(kept, CHAT_TEMPLATE, file, "--chat-template ")
    return model, without_interpolation(kept.get(CHAT_TEMPLATE))


def _require_own_file(kept: Fields, key: str, file: Path, remedy: str) -> None:
    """Refuses a file outside the run folder, unless it is part of cepo: a record could expose any of this machine."""
    name = kept.get(key)
    if name is None or _is_shipped(str(name)):
        return
    try:
        require_within(without_user(str(name)), file.parent)
    except DataError as error:
        raise ConfigError(
            f"{file}: {key} is {name}, which is not in the run's folder. If you trust that record, give {remedy}{name}"
        ) from error


def without_interpolation(value: object) -> Any:
    """Returns the recorded value with `\\${`, the escaped form in records, replaced by `${`; nothing is resolved."""
    return with_texts(value, lambda text: text.replace("\\${", "${"))


def _kept(file: Path, taken: Collection[str], given: Collection[str]) -> tuple[Tree, Origins]:
    """Returns the file's settings below `taken` by dotted key, and the lines of all."""
    source, _ = read_file(file, within=file.parent)
    kept: Tree = {}
    for key, value in leaves(source.tree, whole=EASYR1_KEYS):
        if not _below(key, taken) or _below(key, given):
            continue
        if key == _REMOTE_CODE:
            if value:
                place = source.origins.place_of(key)
                logger.warning(f"{place}: {key} is not taken from a run's own record; if you trust it, set it yourself")
            continue
        if any(map(_INTERPOLATION.search, texts_of(value))):
            raise ConfigError(
                f"{source.origins.place_of(key)}: {key} refers to {value!r}, and references of a run's own record are not "
                f"followed, since they may read the environment; give {key}=..."
            )
        kept[key] = value
    return kept, source.origins


def _below(key: str, sections: Collection[str]) -> bool:
    return any(key == section or key.startswith(f"{section}.") for section in sections)


def _is_shipped(file: str) -> bool:
    found = find_path(file)
    folders = (PACKAGE_FOLDER, SHIPPED_FOLDER / "configs", SHIPPED_FOLDER / "examples")
    return found is not None and any(found.resolve().is_relative_to(folder.resolve()) for folder in folders)
