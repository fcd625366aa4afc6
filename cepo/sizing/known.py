"""Shapes of published models that need no file to be read."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from cepo.config.schema import LoraConfig
from cepo.models.families.qwen3_vl import published_config
from cepo.sizing.memory import ModelShape
from cepo.sizing.needs import ShapeOf
from cepo.sizing.shape import shape_of


@cache
def known_shape(size: str, lora: LoraConfig) -> ModelShape:
    """Returns the shape of Qwen3-VL-`size` with this adapter."""
    return shape_of(published_config(size), lora=lora)


def shapes_of(size: str) -> ShapeOf:
    """Returns a look-up, as `estimate_needs` takes it, that answers with one size for every model."""

    def shape_of_path(path: str, trust: bool, override: Mapping[str, Any], lora: LoraConfig) -> ModelShape:
        return known_shape(size, lora)

    return shape_of_path
