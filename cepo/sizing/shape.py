"""Derives a model's shape from its configuration file on the meta device, without reading or allocating weights."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch

from cepo.config.schema import LoraConfig
from cepo.errors import ConfigError
from cepo.models import pretrained
from cepo.models.families import family_of
from cepo.sizing.memory import Layers, ModelShape


def model_shape(
    path: str, *, trust_remote_code: bool, override_config: Mapping[str, Any], lora: LoraConfig
) -> ModelShape:
    """Returns the shape of the model at `path` (a folder or hub name).

    Raises:
        ConfigError: no configuration can be read there, or this version of transformers cannot build the model.
    """
    config = pretrained.read_config(path, trust_remote_code=trust_remote_code)
    for key, value in override_config.items():
        setattr(config, key, value)
    return shape_of(config, lora=lora, trust_remote_code=trust_remote_code)


def shape_of(config: Any, *, lora: LoraConfig, trust_remote_code: bool = False) -> ModelShape:
    """Returns the shape of the model that a transformers configuration describes.

    Raises:
        ConfigError: this version of transformers cannot build a model from the configuration.
    """
    import transformers

    family = family_of(config, trust_remote_code=trust_remote_code)
    multimodal = family.reads_images
    auto: Any = transformers.AutoModelForImageTextToText if multimodal else transformers.AutoModelForCausalLM
    try:
        with torch.device("meta"):
            model: Any = auto.from_config(config, trust_remote_code=trust_remote_code)
    except (ValueError, TypeError, AttributeError, RuntimeError) as error:
        raise ConfigError(f"no model can be built from this configuration: {error}") from error
    tower = family.vision_parts(model)
    blocks = [_size(block) for block in pretrained.sharded_blocks(model)]
    text_blocks = [_size(block) for block in pretrained.sharded_blocks(model, without=tower)]
    total, vision = _size(model), sum(map(_size, tower))
    adapted = _adapted(model, lora)
    in_tower = {inner for part in tower for inner in part.modules()}
    text_linear = [
        module.in_features * module.out_features
        for module in model.modules()
        if type(module) is torch.nn.Linear and module not in in_tower and module is not model.get_output_embeddings()
    ]
    return ModelShape(
        parameters=total,
        vision_parameters=vision,
        largest_block=max(blocks, default=0),
        outside_blocks=total - sum(blocks),
        adapted=tuple((module.in_features, module.out_features) for module in adapted),
        text=_text_layers(config.get_text_config()),
        vision=_vision_layers(config.vision_config) if multimodal else None,
        vocabulary=model.get_output_embeddings().weight.shape[0],
        # Towers without merging, or with other names for it, count as 2 x 2 like those of Qwen-VL.
        patches_per_token=getattr(config.vision_config, "spatial_merge_size", 2) ** 2 if multimodal else 1,
        vision_outside_blocks=vision - (sum(blocks) - sum(text_blocks)),
        adapts_vision=not in_tower.isdisjoint(adapted),
        text_linear=sum(text_linear),
    )


def _size(module: Any) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _adapted(model: Any, lora: LoraConfig) -> list[Any]:
    """Returns the linear layers that PEFT would adapt under these settings; none if the rank is 0."""
    if lora.rank == 0:
        return []
    targets = [part.strip() for part in lora.target_modules.split(",")]
    head = model.get_output_embeddings()
    excluded = pretrained.excluded_from_adapter(lora, model.config)
    found: list[Any] = []
    for name, module in model.named_modules():
        if not isinstance(module, torch.nn.Linear):
            continue
        if excluded is not None and re.fullmatch(excluded, name):
            continue
        named = any(name == target or name.endswith(f".{target}") for target in targets)
        if named or (targets == ["all-linear"] and module is not head):
            found.append(module)
    return found


def _text_layers(config: Any) -> Layers:
    # Configurations of older families omit the head's size, or the number of key heads if it equals that of all heads.
    heads = config.num_attention_heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // heads
    return Layers(
        depth=config.num_hidden_layers,
        hidden=config.hidden_size,
        queries=heads * head_size,
        keys=(getattr(config, "num_key_value_heads", None) or heads) * head_size,
        intermediate=config.intermediate_size,
    )


def _vision_layers(config: Any) -> Layers | None:
    """Returns None if the tower's sizes have other names; only its weights are counted then."""
    depth = getattr(config, "depth", None) or getattr(config, "num_hidden_layers", None)
    if depth is None or not hasattr(config, "intermediate_size"):
        return None
    hidden = config.hidden_size
    return Layers(depth=depth, hidden=hidden, queries=hidden, keys=hidden, intermediate=config.intermediate_size)
