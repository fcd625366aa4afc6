"""Models, trainings and machines that the doctor is asked about."""

from __future__ import annotations

import dataclasses
from typing import Any

from cepo.config import RunConfig, load_config
from cepo.config.schema import LoraConfig
from cepo.doctor.machine import Machine
from cepo.sizing.memory import ModelShape, TrainingShape
from cepo.sizing.table import known_shape

GIB = 2**30


def qwen3_vl_2b(lora: LoraConfig) -> ModelShape:
    return known_shape("2B", lora)


def training(**changes: Any) -> TrainingShape:
    usual: dict[str, Any] = {
        "lora_rank": 0,
        "trained_type": "fp32",
        "compute_type": "fp32",
        "freeze_vision_tower": False,
        "full_shard": True,
        "gradient_checkpointing": True,
        "rows": 4,
        "prompt_tokens": 1024,
        "response_tokens": 2048,
        "head_chunk_elements": 2**25,
    }
    return TrainingShape(**usual | changes)


def machine(**changes: Any) -> Machine:
    usual: dict[str, Any] = {
        "processors": 2,
        "memory_total": 24 * GIB,
        "memory_free": 20 * GIB,
        "shared_total": 8 * GIB,
        "shared_free": 8 * GIB,
        "torch_cuda": None,
        "compiled": (),
        "driver": None,
        "mismatched": (),
        "gpus": (),
    }
    return Machine(**usual | changes)


def on_devices(**trainer: Any) -> RunConfig:
    config = load_config(["config=configs/microgeo/base.yaml"])
    return dataclasses.replace(config, trainer=dataclasses.replace(config.trainer, **trainer))
