"""EasyR1's own configuration file and script, as its users have them, written from the table of its keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from cepo.config.easyr1 import EASYR1_KEYS
from cepo.trees import nested

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
"""The arguments of its script for Geometry3K with LoRA."""


def file_with(folder: Path, values: dict[str, Any]) -> str:
    """`config=...` of a YAML file with values by dotted key."""
    (folder / "config.yaml").write_text(yaml.safe_dump(nested(values)), encoding="utf-8")
    return f"config={folder / 'config.yaml'}"


def easyr1s_file(folder: Path) -> str:
    """`config=...` of a file with the keys and values of EasyR1's `examples/config.yaml`."""
    return file_with(folder, {key: entry.shipped[0] for key, entry in EASYR1_KEYS.items() if entry.shipped})
