"""Writes a configuration as YAML and for the record of its run, and reads such a record of an unknown source back.

A record keeps secrets out: it has references in place of values from the environment, and masks settings with secret-like
names. A run folder may have been downloaded, so its configuration must neither choose code that runs here nor read this
machine's environment. Users who trust it pass `config=<folder>/config.yaml` or the setting on the command line.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from cepo.algorithms.base import SHARED, own_fields
from cepo.config.easyr1 import EASYR1_KEYS
from cepo.config.paths import PACKAGE_FOLDER, SHIPPED_FOLDER, find_path, split_function, without_user
from cepo.config.schema import RunConfig, RunSettings
from cepo.config.sources import Origins, Source, read_file
from cepo.config.worker_schema import parts_of
from cepo.errors import ConfigError, DataError
from cepo.foreign_files import require_within
from cepo.sections import is_decisive
from cepo.trees import Fields, Tree, is_dict, is_list, is_mapping, leaves, nested, texts_of, with_texts

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
_KEYWORDS = "worker.reward.reward_function_kwargs"
_MASK = "***"
_SECRET_NAME = (
    r"(?:[\w-]*[_-])?(?:(?:api|access|private|secret|signing|encryption|ssh|openai|anthropic|azure|google|gemini|hf|wandb)"
    r"[_-]?key|secret|token|password|passwd|passphrase|pwd|auth|authorization|bearer|cookie|credentials?)"
)
_SECRET = re.compile(_SECRET_NAME, re.IGNORECASE)
_SECRET_ENTRY = re.compile(
    rf"(?P<name>(?<![\w-])[\"']?{_SECRET_NAME}[\"']?\s*[:=]\s*)(?P<value>\"[^\"]*\"|'[^']*'|(?!\$\{{)[^,}}\]]+)",
    re.IGNORECASE,
)
_USER_IN_URL = re.compile(r"(?<=://)[^/\s@]+:[^/\s@]*(?=@)")


def plain_tree(config: RunConfig) -> Tree:
    """Returns all settings as plain mappings, lists and values, under the keys of configuration files."""
    tree = dataclasses.asdict(config)
    tree.pop("from_environment")
    for name, settings in tree.pop("methods").items():
        if own := {field: settings[field] for field in own_fields(name)}:
            tree["algorithm"][name] = own
    return tree


def dump_config(config: RunConfig) -> str:
    """Returns all settings as YAML, with defaults and method sections; it loads as an equal `RunConfig`."""
    return OmegaConf.to_yaml(OmegaConf.create(_escaped(plain_tree(config))))


def record_tree(config: RunConfig) -> Tree:
    """Returns the settings of a run for records that others may read, without those that its method does not read.

    Values from the environment remain references, and secret settings (`api_key`, `token`, ...) are masked.
    """
    tree = plain_tree(config)
    read = config.methods[config.algorithm.adv_estimator]
    for name in SHARED:
        del tree["algorithm"][name]
    tree["algorithm"].update({name: value for name, value in read.items() if name in SHARED})
    return _with_references(_without_secrets(_escaped(tree)), config.from_environment)


def dump_for_record(config: RunConfig) -> str:
    return OmegaConf.to_yaml(OmegaConf.create(record_tree(config)))


def run_identity(config: RunConfig) -> Tree:
    """Returns the settings without which a checkpoint does not fit at all: method, model and form of the weights."""
    model, lora = config.worker.actor.model, config.worker.actor.model.lora
    return {
        "adv_estimator": config.algorithm.adv_estimator,
        "model_path": model.model_path,
        "lora_rank": lora.rank,
        "quantization": lora.quantization,
        "double_quantization": None if lora.quantization is None else lora.double_quantization,
    }


def decisive_settings(config: RunConfig) -> Tree:
    """Returns the recorded settings that decide what is trained, by dotted key, without empty mappings.

    They are those that the schema marks so. Of the reward function's keywords, which may be confidential, a digest is
    kept.
    """
    tree = leaves(record_tree(config))
    found = {key: value for key, value in tree if is_decisive(RunSettings, key) and not is_mapping(value)}
    keywords = {key: found.pop(key) for key in list(found) if key.startswith(_KEYWORDS)}
    digest = hashlib.sha256(json.dumps(keywords, sort_keys=True).encode()).hexdigest()[:16]
    return found | {f"{_KEYWORDS} (digest)": digest}


def _escaped(value: object) -> Any:
    """Escapes `${`, so that resolved text is not interpreted as a reference when it is loaded again."""
    return with_texts(value, lambda text: text.replace("${", "\\${"))


def without_interpolation(value: object) -> Any:
    """Returns the recorded value with `\\${`, the escaped form in records, replaced by `${`; nothing is resolved."""
    return with_texts(value, lambda text: text.replace("\\${", "${"))


def is_secret(name: str) -> bool:
    """Returns whether the name of a setting or an environment variable indicates a secret."""
    return _SECRET.fullmatch(name) is not None


def _without_secrets(value: object, *, name: str = "") -> Any:
    """Returns settings with all texts masked whose names indicate a secret, and users and passwords in URLs."""
    if is_mapping(value):
        return {key: _without_secrets(entry, name=str(key)) for key, entry in value.items()}
    if is_list(value):
        return [_without_secrets(entry, name=name) for entry in value]
    if not isinstance(value, str):
        return value
    return _MASK if value and is_secret(name) else _USER_IN_URL.sub(_MASK, value)


def _with_references(tree: Tree, references: Mapping[tuple[str, ...], object]) -> Tree:
    """Restores the unresolved text of settings that read the environment; changes and returns `tree`."""
    for path, text in references.items():
        section = tree
        for name in path[:-1]:
            section = section.get(name) if is_dict(section) else None
        if is_dict(section) and path[-1] in section:
            section[path[-1]] = text
    return tree


def masked_argument(argument: str) -> str:
    """Returns a command-line argument `a.b=value` with the values of secret settings masked."""
    key, separator, value = argument.partition("=")
    if separator and value and is_secret(key.rpartition(".")[2].lstrip("-")) and not value.startswith("${"):
        return f"{key}={_MASK}"
    return _USER_IN_URL.sub(_MASK, _SECRET_ENTRY.sub(rf"\g<name>{_MASK}", argument))


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
