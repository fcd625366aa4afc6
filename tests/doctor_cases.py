"""A model and a card that the doctor is asked about."""

from __future__ import annotations

from functools import cache

from cepo.config.schema import LoraConfig
from cepo.sizing import ModelShape, shape_of
from lab.support.published_models import published_config

GIB = 2**30


@cache
def published_shape(lora: LoraConfig) -> ModelShape:
    """Qwen3-VL-2B's shape with this adapter."""
    return shape_of(published_config("2B"), lora=lora)
