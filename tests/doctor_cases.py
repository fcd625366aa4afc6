"""A model and machines that the doctor is asked about."""

from __future__ import annotations

from functools import cache
from typing import Any

from cepo.config.schema import LoraConfig
from cepo.doctor.machine import Machine
from cepo.hardware import BuildTools
from cepo.sizing import ModelShape, shape_of
from lab.support.published_models import published_config

GIB = 2**30


@cache
def published_shape(lora: LoraConfig) -> ModelShape:
    """Qwen3-VL-2B's shape with this adapter."""
    return shape_of(published_config("2B"), lora=lora)


def machine(**changes: Any) -> Machine:
    usual: dict[str, Any] = {
        "processors": 2,
        "memory_total": 24 * GIB,
        "memory_free": 20 * GIB,
        "shared_free": 8 * GIB,
        "torch_cuda": None,
        "compiled": (),
        "driver": None,
        "gpus": (),
        "faults": (),
        "tools": BuildTools(c_compiler="gcc", python_headers="include", flashinfer_kernels=False),
    }
    return Machine(**usual | changes)
