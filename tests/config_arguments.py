"""Configurations of the required settings and what a test adds, and EasyR1's own file and script."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

from cepo.config import RunConfig, load_config
from cepo.config.easyr1 import EASYR1_KEYS
from cepo.errors import ConfigError
from cepo.files.trees import Fields, nested

REQUIRED = ["data.train_files=microgeo:train", "worker.actor.model.model_path=microgeo:model"]
LORA_SCRIPT = [
    "data.train_files=hiyouga/geometry3k@train",
    "data.val_files=hiyouga/geometry3k@test",
    "worker.actor.model.model_path=Qwen/Qwen3-VL-4B-Instruct",
    "worker.actor.model.lora.rank=64",
    "worker.actor.model.lora.alpha=64",
    "worker.actor.model.lora.exclude_modules='.*visual.*'",
    "worker.actor.optim.lr=1e-5",
    "worker.rollout.tensor_parallel_size=1",
    "trainer.experiment_name=qwen3_vl_4b_geo_grpo_lora",
]
"""The arguments of EasyR1's script for Geometry3K with LoRA."""


def load(*arguments: str) -> RunConfig:
    return load_config([*REQUIRED, *arguments])


def write(folder: Path, name: str, text: str) -> str:
    (folder / name).write_text(text)
    return f"config={folder / name}"


def message_of(arguments: Sequence[str]) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(arguments)
    return str(caught.value)


def file_with(folder: Path, values: Fields) -> str:
    """`config=...` of a YAML file with values by dotted key."""
    return write(folder, "config.yaml", yaml.safe_dump(nested(values)))


def easyr1s_file(folder: Path) -> str:
    """`config=...` of a file with the keys and values of EasyR1's `examples/config.yaml`."""
    return file_with(folder, {key: entry.shipped[0] for key, entry in EASYR1_KEYS.items() if entry.shipped})
