"""Models, trainings and machines that the doctor is asked about."""

from __future__ import annotations

import dataclasses
from typing import Any

from cepo.config import RunConfig, load_config
from cepo.config.schema import LoraConfig
from cepo.doctor.machine import Machine
from cepo.sizing.memory import ModelShape, TrainingShape
from cepo.sizing.shape import shape_of

GIB = 2**30


_TEXT = {
    "2B": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16},
    "4B": {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32},
    "8B": {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32},
}
_LARGE_TOWER = {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "deepstack_visual_indexes": [8, 16, 24]}


def qwen3_vl_2b(lora: LoraConfig) -> ModelShape:
    return qwen3_vl("2B", lora)


def qwen3_vl(size: str, lora: LoraConfig) -> ModelShape:
    """From the sizes of the model's published configuration file, through transformers."""
    return shape_of(qwen3_vl_config(size), lora=lora)


def qwen3_vl_config(size: str) -> Any:
    from transformers import Qwen3VLConfig

    tied = size != "8B"
    text: dict[str, Any] = {
        "vocab_size": 151936,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": tied,
        **_TEXT[size],
    }
    vision: dict[str, Any] = {
        "depth": 24,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_heads": 16,
        "out_hidden_size": text["hidden_size"],
        "deepstack_visual_indexes": [5, 11, 17],
        "patch_size": 16,
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
        "num_position_embeddings": 2304,
        **(_LARGE_TOWER if size == "8B" else {}),
    }
    return Qwen3VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=tied)


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
