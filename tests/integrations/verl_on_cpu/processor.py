"""Lets verl's FSDP2 engine run on a processor: verl has platforms for CUDA and NPU alone."""

from __future__ import annotations

import types
from contextlib import nullcontext
from typing import Any

import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry


def _device_module() -> types.ModuleType:
    """Returns torch.cpu with what torch.cuda has beyond it and verl calls."""
    module = types.ModuleType("torch_cpu_as_device")
    vars(module).update({name: value for name, value in vars(torch.cpu).items() if not name.startswith("_")})
    for name in ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"):
        setattr(module, name, lambda *_, **__: 0)
    for name in ("empty_cache", "reset_peak_memory_stats", "ipc_collect"):
        setattr(module, name, lambda *_, **__: None)
    module.mem_get_info = lambda *_: (2**33, 2**34)
    module.is_initialized = lambda: True
    module.get_device_name = lambda *_: "cpu"
    for name in ("get_rng_state", "set_rng_state", "manual_seed"):
        setattr(module, name, getattr(torch, name))
    module.manual_seed_all = torch.manual_seed
    return module


@PlatformRegistry.register("cpu")
class Processor(PlatformBase):
    """A machine without an accelerator, whose processes talk over gloo."""

    device_name = "cpu"
    vendor_name = "generic"
    device_module = _device_module()

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        return True

    def current_device(self) -> Any:
        return "cpu"

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None: ...

    def synchronize(self, device_index: int | None = None) -> None: ...

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None: ...

    def empty_cache(self) -> None: ...

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    def nvtx_range(self, msg: str) -> Any:
        return nullcontext()

    def profiler_start(self) -> None: ...

    def profiler_stop(self) -> None: ...

    def ray_resource_name(self) -> str:
        return "CPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> Any:
        return None


def register_engine() -> None:
    """Registers verl's FSDP2 engine for this platform; the platform must be chosen before the engine is imported."""
    from verl.workers.engine.base import EngineRegistry
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

    EngineRegistry.register(model_type="language_model", backend=["fsdp2"], device="cpu")(FSDPEngineWithLMHead)
