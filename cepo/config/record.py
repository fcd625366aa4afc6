"""Writes a configuration as YAML and for the record of its run, which `cepo.config.untrusted_record` reads back.

A record keeps secrets out: it has references in place of values from the environment, and masks settings with secret-like
names.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Any

from omegaconf import OmegaConf

from cepo.algorithms.registry import METHODS
from cepo.config.paths import portable
from cepo.config.schema import RunConfig, RunSettings
from cepo.files.secrets import without_secrets
from cepo.files.trees import Tree, is_dict, is_mapping, leaves, with_texts
from cepo.sections.fields import is_decisive

_KEYWORDS = "worker.reward.reward_function_kwargs"


def plain_tree(config: RunConfig) -> Tree:
    """Returns all settings as plain mappings, lists and values, under the keys of configuration files."""
    tree = dataclasses.asdict(config)
    tree.pop("from_environment")
    tree.pop("set_with_method")
    for name, settings in tree.pop("methods").items():
        section = {field: settings[field] for field in METHODS.own_fields(name)}
        if section:
            tree["algorithm"][name] = section
    return tree


def dump_config(config: RunConfig) -> str:
    """Returns all settings as YAML, with defaults and method sections; it loads as an equal `RunConfig`."""
    return OmegaConf.to_yaml(OmegaConf.create(_escaped(plain_tree(config))))


def record_tree(config: RunConfig) -> Tree:
    """Returns the settings of a run for records that others may read, without those that its method does not read.

    Values from the environment remain references, secret settings (`api_key`, `token`, ...) are masked, and shipped files
    have names that hold in any checkout.
    """
    tree = plain_tree(config)
    settings_of_method = config.methods[config.algorithm.adv_estimator]
    for name in METHODS.shared:
        del tree["algorithm"][name]
    for name, value in settings_of_method.items():
        if name in METHODS.shared:
            tree["algorithm"][name] = value
    tree = with_texts(tree, portable)
    return _with_references(without_secrets(_escaped(tree)), config.from_environment)


def dump_for_record(config: RunConfig) -> str:
    return OmegaConf.to_yaml(OmegaConf.create(record_tree(config)))


def run_identity(config: RunConfig) -> Tree:
    """Returns the settings without which a checkpoint does not fit at all: method, model and form of the weights."""
    model = config.worker.actor.model
    lora = model.lora
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
    settings: Tree = {}
    keywords: Tree = {}
    for key, value in leaves(record_tree(config)):
        if not is_decisive(RunSettings, key) or is_mapping(value):
            continue
        if key.startswith(_KEYWORDS):
            keywords[key] = value
        else:
            settings[key] = value
    text = json.dumps(keywords, sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    return settings | {f"{_KEYWORDS} (digest)": digest}


def _escaped(value: object) -> Any:
    """Escapes `${`, so that resolved text is not interpreted as a reference when it is loaded again."""
    return with_texts(value, lambda text: text.replace("${", "\\${"))


def without_interpolation(value: object) -> Any:
    """Returns the recorded value with `\\${`, the escaped form in records, replaced by `${`; nothing is resolved."""
    return with_texts(value, lambda text: text.replace("\\${", "${"))


def _with_references(tree: Tree, references: Mapping[tuple[str, ...], object]) -> Tree:
    """Restores the unresolved text of settings that read the environment; changes and returns `tree`."""
    for path, text in references.items():
        section = tree
        for name in path[:-1]:
            section = section.get(name) if is_dict(section) else None
        if is_dict(section) and path[-1] in section:
            section[path[-1]] = text
    return tree
