"""Reads the settings that a run has recorded in its `config.yaml`.

A run folder may have been downloaded. What such a record may decide is marked `FROM_RECORD` in the schema: keys of columns,
lengths, sampling, the form of the model. Besides, it may choose a reward that computes and does nothing else, the built-in
toy task, and templates in its own folder. What opens a host, a file, a model or a program needs the command line, or a
configuration that the user names.

A record that a run of this user's has written (`cepo.run_folder.own_records`) may decide more: it repeats what they
have chosen. References to the environment, remote code and other reward files need the user's word even there.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from cepo.config.easyr1 import EASYR1_KEYS
from cepo.config.paths import (
    MICROGEO_DATA,
    MICROGEO_MODELS,
    PACKAGE_FOLDER,
    SHIPPED_FOLDER,
    find_path,
    split_function,
    without_user,
)
from cepo.config.record import without_interpolation
from cepo.config.schema import RunSettings
from cepo.config.sources import Origins, Source, read_file
from cepo.config.worker_schema import parts_of
from cepo.errors import ConfigError, DataError
from cepo.files.safe_files import require_within
from cepo.files.trees import Fields, Tree, is_dict, is_list, leaves, nested, texts_of
from cepo.run_folder.own_records import is_own_record
from cepo.sections.fields import may_come_from_record
from cepo.sections.reader import default_tree

logger = logging.getLogger(__name__)

MODEL = "worker.actor.model"
CHAT_TEMPLATE, FORMAT_PROMPT = "data.override_chat_template", "data.format_prompt"
TRAIN_FILES, VAL_FILES = "data.train_files", "data.val_files"
_MODEL_PATH, _REMOTE_CODE = f"{MODEL}.model_path", f"{MODEL}.trust_remote_code"
_REWARD, _ANSWER = "worker.reward.reward_function", "worker.reward.answer_function"
_KEYWORDS = "worker.reward.reward_function_kwargs"
EVALUATED = (
    "data",
    MODEL,
    "worker.rollout",
    _REWARD,
    _KEYWORDS,
    "worker.reward.reward_weights",
    _ANSWER,
    "worker.reward.skip_special_tokens",
    "worker.reward.timeout_seconds",
    "algorithm.correct_key",
    "algorithm.correct_threshold",
)
"""The settings that an evaluation reads, by their sections."""
TRAINED = ("worker.actor",)
"""The further section that a measurement of credit reads."""
_INTERPOLATION = re.compile(r"(?<!\\)(?:\\\\)*\$\{")
"""Matches `${` after an even number of backslashes; after an odd number it is text."""

LISTED_REWARDS = (
    "cepo/rewards/math.py",
    *(f"examples/reward_function/{name}.py" for name in ("math", "r1v", "dapo", "rounded")),
)
"""The reward files that any record may choose, with numbers for keywords: they open no host and no file."""
_REWARD_NAME = "compute_score"
_SHIPPED = {TRAIN_FILES: MICROGEO_DATA, VAL_FILES: MICROGEO_DATA, _MODEL_PATH: MICROGEO_MODELS}
"""The data sets and models that any record may choose, because they come with the package."""


@dataclass(frozen=True)
class Record:
    """The settings that a `config.yaml` decides, by dotted key, with their places in the file.

    Attributes:
        everything: the settings that were asked for, as they stand in the file.
        settings: those of them that the record may decide.
        refused: those that differ from the defaults and that it may not decide.
    """

    file: Path
    everything: Fields
    settings: Tree
    origins: Origins
    is_own: bool
    refused: Fields


def read_record(file: Path, given: Collection[str], sections: Collection[str] = EVALUATED) -> Record:
    """Returns what a run's record may decide of `sections`, without the keys `given` elsewhere.

    Raises `ConfigError` if the file cannot be read, or if a setting is a reference, which may read the environment.
    """
    source, _ = read_file(file, within=file.parent)
    is_own = is_own_record(file)
    everything: Tree = {}
    for key, value in leaves(source.tree, whole=EASYR1_KEYS):
        if _below(key, sections) and not _below(key, given):
            everything[key] = value
    place_of = source.origins.place_of
    if everything.pop(_REMOTE_CODE, False):
        logger.warning(
            f"{place_of(_REMOTE_CODE)}: {_REMOTE_CODE} is not taken from a run's own record; if you trust it, set it yourself"
        )
    for key, value in everything.items():
        if any(map(_INTERPOLATION.search, texts_of(value))):
            raise ConfigError(
                f"{place_of(key)}: {key} refers to {value!r}, and references of a run's own record are not followed, since "
                f"they may read the environment; give {key}=..."
            )
    if is_own:
        return Record(file, everything, everything, source.origins, is_own=True, refused={})
    accepted: Tree = {}
    refused: Tree = {}
    has_listed_reward = _listed_functions(everything.get(_REWARD)) is not None
    for key, value in _single_values(everything):
        if _may_decide(key, value, has_listed_reward=has_listed_reward):
            accepted[key] = value
        elif not _is_default(key, value):
            refused[key] = value
    if _REWARD in accepted:
        accepted[_REWARD] = _listed_functions(accepted[_REWARD])
    return Record(file, everything, accepted, source.origins, is_own=False, refused=refused)


def recorded_for_evaluation(
    file: Path, given: Collection[str], *, also: Collection[str] = (), without_data: Collection[str] = ()
) -> Source:
    """Returns data, model, sampling and verdict settings of a run's `config.yaml`, without the keys `given` elsewhere.

    `also` are further sections to read. The data sets of the keys `without_data` are not read by the command. Raises
    `ConfigError` if the record names what it may not decide, if it has a reference, or if it names a chat template or a
    format prompt outside the run folder.
    """
    record = read_record(file, given, (*EVALUATED, *also))
    for key in (CHAT_TEMPLATE, FORMAT_PROMPT):
        _require_file_of_run(record.settings, key, file, f"{key}=")
    if record.is_own:
        _require_shipped_functions(record)
        return Source(nested(record.settings), record.origins)
    refused = {key: value for key, value in record.refused.items() if key not in without_data}
    if refused:
        raise ConfigError(_refusal(record, refused))
    settings = dict(record.settings)
    if TRAIN_FILES in without_data and not _below(TRAIN_FILES, given):
        settings[TRAIN_FILES] = MICROGEO_DATA[0]  # the schema needs one; the command reads other data
    return Source(nested(settings), record.origins)


def recorded_model(
    file: Path, given: Collection[str], *, named: Fields | None = None, trusted: bool = False
) -> tuple[Fields, str | None]:
    """Returns the run's `worker.actor.model`, without `trust_remote_code`, and the file of its chat template.

    `named` are entries of `worker.actor.model` that the user has named elsewhere: a stranger's record may repeat them.
    With `trusted`, the user has named the file itself. Raises `ConfigError` as `recorded_for_evaluation`.
    """
    record = read_record(file, given, (MODEL, CHAT_TEMPLATE))
    entries = record.everything
    of_model: Tree = {}
    for key, value in entries.items():
        if key.startswith(f"{MODEL}."):
            of_model[key.removeprefix(f"{MODEL}.")] = value
    model = without_interpolation(nested(of_model))
    if not model:
        raise ConfigError(f"{file} is not the configuration of a run: {MODEL} is not a section")
    template = entries.get(CHAT_TEMPLATE)
    if trusted:
        return model, without_interpolation(template)
    known = named or {}
    own_choice: list[str] = []  # of the entries that decide which model is read, those that the user has not named
    for name in ("model_path", "tokenizer_path", "override_config"):
        if name not in known or known[name] != model.get(name):
            own_choice.append(f"{MODEL}.{name}")
    refused = {key: value for key, value in record.refused.items() if _below(key, own_choice)}
    if refused:
        raise ConfigError(_refusal(record, refused))
    _require_file_of_run(entries, CHAT_TEMPLATE, file, "--chat-template ")
    return model, without_interpolation(template)


def _single_values(settings: Fields) -> Iterator[tuple[str, object]]:
    """Yields the entries of mappings as settings of their own."""
    for key, value in settings.items():
        yield from leaves(value, key)


def _may_decide(key: str, value: object, *, has_listed_reward: bool) -> bool:
    """Returns whether a stranger's record may decide a setting."""
    if key == _REWARD:
        return has_listed_reward
    if key.startswith(f"{_KEYWORDS}."):
        return has_listed_reward and isinstance(value, bool | int | float)
    if key in (CHAT_TEMPLATE, FORMAT_PROMPT):
        return value is not None  # `_require_file_of_run` decides
    return value in _SHIPPED.get(key, ()) or may_come_from_record(RunSettings, key)


def _listed_functions(value: object) -> str | None:
    """Returns the recorded reward functions as this installation's own; None if one is among them that is not listed.

    A record has the paths of the machine that wrote it, so that a file is recognised by the end of its path.
    """
    names = value if is_list(value) else parts_of(str(value))
    functions: list[str] = []
    for name in names:
        path, function = split_function(str(name))
        listed = next((file for file in LISTED_REWARDS if f"/{path}".endswith(f"/{file}")), None)
        if listed is None or function != _REWARD_NAME:
            return None
        root = PACKAGE_FOLDER.parent if listed.startswith("cepo/") else SHIPPED_FOLDER
        functions.append(f"{root / listed}:{function}")
    return ",".join(functions)


def _is_default(key: str, value: object) -> bool:
    """Returns whether a setting says no more than its default, or nothing."""
    if value == {}:
        return True
    node: object = default_tree(RunSettings)
    for name in key.split("."):
        if not is_dict(node) or name not in node:
            return value is None or value == []
        node = node[name]
    return value == node and type(value) is type(node)


def _refusal(record: Record, refused: Fields) -> str:
    lines: list[str] = []
    arguments: list[str] = []
    for key, value in refused.items():
        value_in_words = str(without_interpolation(value))[:200]
        lines.append(f"{record.origins.place_of(key)}: {key} is {value_in_words!r}")
        argument = _remedy(key)
        if argument not in arguments:
            arguments.append(argument)
    return (
        f"{record.file} was not recorded by a run of yours, and the record of a stranger decides no host, file, data, model, "
        f"tokenizer or program: give {', '.join(arguments)} yourself, or the whole file as config={record.file} (cepo merge: "
        "--config) if you trust it. It has:\n" + "\n".join(lines)
    )


def _remedy(key: str) -> str:
    """Returns the argument that repeats a setting."""
    for section in (_KEYWORDS, f"{MODEL}.override_config"):
        if key.startswith(section):
            return f"{section}=..."
    if key in (TRAIN_FILES, VAL_FILES):
        return "data=..."
    return f"{key}=... (cepo merge: --base)" if key == _MODEL_PATH else f"{key}=..."


def _require_shipped_functions(record: Record) -> None:
    for key in (_REWARD, _ANSWER):
        value = record.settings.get(key)
        names = [] if value is None else value if is_list(value) else parts_of(str(value))
        for name in map(str, names):
            if not _is_shipped(split_function(name)[0]):
                raise ConfigError(
                    f"{record.origins.place_of(key)}: the run was rewarded by {name}, a file that is not part of cepo and "
                    f"would run here. If you trust it, give {key}={name}, or config={record.file} for the whole configuration"
                )


def _require_file_of_run(settings: Fields, key: str, file: Path, remedy: str) -> None:
    """Refuses a file outside the run folder, unless it is part of cepo: a record could expose any of this machine."""
    name = settings.get(key)
    if name is None or _is_shipped(str(name)):
        return
    try:
        require_within(without_user(str(name)), file.parent)
    except DataError as error:
        raise ConfigError(
            f"{file}: {key} is {name}, which is not in the run's folder. If you trust that record, give {remedy}{name}"
        ) from error


def _below(key: str, sections: Collection[str]) -> bool:
    return any(key == section or key.startswith(f"{section}.") for section in sections)


def _is_shipped(file: str) -> bool:
    path = find_path(file)
    folders = (PACKAGE_FOLDER, SHIPPED_FOLDER / "configs", SHIPPED_FOLDER / "examples")
    return path is not None and any(path.resolve().is_relative_to(folder.resolve()) for folder in folders)
