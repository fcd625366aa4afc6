"""Lets verl's FSDP2 engine run on a processor: verl has platforms for CUDA and NPU alone."""

from __future__ import annotations

import types
from contextlib import nullcontext
from typing import Any

import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry


def _constant(value: Any) -> Any:
    return lambda *_, **__: value


def _device_module() -> types.ModuleType:
    """Returns torch.cpu with what torch.cuda has beyond it and verl calls."""
    module: Any = types.ModuleType("torch_cpu_as_device")
    for name, value in vars(torch.cpu).items():
        if not name.startswith("_"):
            setattr(module, name, value)
    module.mem_get_info = _constant((2**33, 2**34))
    module.is_initialized = _constant(True)
    module.get_device_name = _constant("cpu")
    for name in ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"):
        setattr(module, name, _constant(0))
    for name in ("empty_cache", "reset_peak_memory_stats", "ipc_collect"):
        setattr(module, name, _constant(None))
    module.get_rng_state = torch.get_rng_state
    module.set_rng_state = torch.set_rng_state
    module.manual_seed = torch.manual_seed
    module.manual_seed_all = torch.manual_seed
    return module


ANSWERS = {
    "is_available": True,
    "is_platform_available": True,
    "current_device": "cpu",
    "device_count": 1,
    "get_device_capability": (None, None),
    "communication_backend_name": "gloo",
    "visible_devices_envvar": "CUDA_VISIBLE_DEVICES",
    "nvtx_range": nullcontext(),
    "ray_resource_name": "CPU",
    "ray_noset_envvars": [],
    "is_ipc_supported": False,
    **dict.fromkeys(("set_device", "synchronize", "set_allocator_settings", "empty_cache", "cudart")),
    **dict.fromkeys(("profiler_start", "profiler_stop")),
}
"""What a machine without an accelerator, whose processes talk over gloo, answers to each of the platform's questions."""

_methods = {name: _constant(value) for name, value in ANSWERS.items()}
_methods |= dict.fromkeys(("manual_seed", "manual_seed_all"), lambda _, seed: torch.manual_seed(seed))
_named = {"device_name": "cpu", "vendor_name": "generic", "device_module": _device_module()}
Processor = PlatformRegistry.register("cpu")(type("Processor", (PlatformBase,), _methods | _named))


def register_engine() -> None:
    """Registers verl's FSDP2 engine for this platform; the platform must be chosen before the engine is imported."""
    from verl.workers.engine.base import EngineRegistry
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

    EngineRegistry.register(model_type="language_model", backend=["fsdp2"], device="cpu")(FSDPEngineWithLMHead)
