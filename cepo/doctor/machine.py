"""Inspects the machine without changing it: processors, memory, GPUs, compilers."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import psutil
import torch

from cepo.doctor.versions import Finding
from cepo.hardware import (
    BuildTools,
    Capability,
    Fault,
    driver_version,
    find_build_tools,
    gpu_fault,
    num_processors,
    torchvision_fault,
)
from cepo.sizing import gib
from cepo.tracking.environment import installed_version

_SMALLEST_CAPABILITY = (8, 0)
"""The lowest compute capability whose tensor cores support bf16."""
_CONTAINER = Path("/sys/fs/cgroup")
_SHARED_MEMORY = Path("/dev/shm")
_SHARED_PER_DEVICE = 2 * 2**30


class Gpu(NamedTuple):
    """A GPU as torch reports it; sizes in bytes."""

    name: str
    capability: Capability
    total: int
    free: int


class Machine(NamedTuple):
    """The resources of this machine, in bytes.

    Attributes:
        shared_free: of /dev/shm, where the processes of several devices exchange data; None where there is none.
        torch_cuda: the CUDA version for which torch was built; None for a CPU build. compiled: architectures in the build.
        driver: version of the NVIDIA driver, whether or not torch can use the GPUs.
        faults: why torch or torchvision cannot be used, by subject.
    """

    processors: int
    memory_total: int
    memory_free: int
    shared_free: int | None
    torch_cuda: str | None
    compiled: tuple[str, ...]
    driver: str | None
    gpus: tuple[Gpu, ...]
    faults: tuple[tuple[str, Fault], ...]
    tools: BuildTools


def inspect_machine() -> Machine:
    """Returns the current resources of this machine."""
    gpus: list[Gpu] = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        free, total = torch.cuda.mem_get_info(index)
        gpus.append(Gpu(torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index), total, free))
    memory_total, memory_free = usable_memory()
    faults = (("torch's build", gpu_fault()), ("torchvision", torchvision_fault()))
    return Machine(
        processors=num_processors(),
        memory_total=memory_total,
        memory_free=memory_free,
        shared_free=shutil.disk_usage(_SHARED_MEMORY).free if _SHARED_MEMORY.is_dir() else None,
        torch_cuda=torch.version.cuda,
        compiled=tuple(torch.cuda.get_arch_list()),
        driver=driver_version(),
        gpus=tuple(gpus),
        faults=tuple((subject, fault) for subject, fault in faults if fault is not None),
        tools=find_build_tools(),
    )


def usable_memory() -> tuple[int, int]:
    """Returns (total, free) bytes; a container's limit applies if it is below the machine's memory."""
    memory, limit = psutil.virtual_memory(), _CONTAINER / "memory.max"
    allowed = limit.read_text("ascii").strip() if limit.is_file() else "max"
    if not allowed.isdecimal() or int(allowed) >= memory.total:
        return memory.total, memory.available
    used = int((_CONTAINER / "memory.current").read_text("ascii"))
    return int(allowed), min(memory.available, int(allowed) - used)


def machine_findings(machine: Machine) -> list[Finding]:
    """Reports processors, memory, shared memory, torch's build, each GPU and, with GPUs, the compilers."""
    findings = [
        Finding("processors", "ok", f"{machine.processors} usable"),
        Finding("memory", "ok", f"{gib(machine.memory_free)} free of {gib(machine.memory_total)}"),
    ]
    if machine.shared_free is not None:
        is_short = machine.shared_free < _SHARED_PER_DEVICE * max(1, len(machine.gpus))
        remedy = "in a container: --shm-size=16g or --ipc=host" if is_short else ""
        mark = "warn" if is_short else "ok"
        findings.append(Finding(str(_SHARED_MEMORY), mark, f"{gib(machine.shared_free)} free", remedy))
    faults = [Finding(name, "fail", fault.found, fault.remedy) for name, fault in machine.faults]
    findings += faults or [_torch_build(machine)]
    findings += [gpu_finding(index, gpu, machine.compiled) for index, gpu in enumerate(machine.gpus)]
    if machine.gpus:
        findings += tool_findings(machine.tools, with_vllm=installed_version("vllm") is not None)
    return findings


def _torch_build(machine: Machine) -> Finding:
    subject, driver = "torch's build", "" if machine.driver is None else f", driver {machine.driver}"
    if machine.torch_cuda is not None and machine.gpus:
        found = f"CUDA {machine.torch_cuda}, compiled for {', '.join(machine.compiled)}{driver}"
        return Finding(subject, "ok", found)
    if machine.torch_cuda is not None:
        found = f"CUDA {machine.torch_cuda}{driver}; no NVIDIA GPU is visible, so runs use the processors"
        return Finding(subject, "info", found)
    if not driver:
        return Finding(subject, "ok", "for CPUs: suitable only for trying small models")
    remedy = "install the extra for GPUs into a fresh environment: pip install 'cepo[gpu]'"
    return Finding(subject, "warn", f"for CPUs, which cannot use the NVIDIA GPU{driver}", remedy)


def gpu_finding(index: int, gpu: Gpu, compiled: Sequence[str]) -> Finding:
    """Reports the GPU, and whether torch has code for it and it has bf16."""
    capability = f"{gpu.capability[0]}.{gpu.capability[1]}"
    found = f"{gpu.name}, compute capability {capability}, {gib(gpu.free)} free of {gib(gpu.total)}"
    if not wheel_serves(gpu.capability, compiled):
        found += f"; torch's build has no code for it, only for {', '.join(compiled)}"
        remedy = "install torch 2.13.0 built for CUDA 13: pip install 'cepo[gpu]' into a fresh environment"
        return Finding(f"GPU {index}", "fail", found, remedy)
    if gpu.capability < _SMALLEST_CAPABILITY:
        remedy = "bf16 training needs compute capability 8.0 or later; see docs/gpus.md"
        return Finding(f"GPU {index}", "warn", found, remedy)
    return Finding(f"GPU {index}", "ok", found)


def wheel_serves(capability: Capability, compiled: Sequence[str]) -> bool:
    """Returns whether a torch build with the architectures `compiled` (`torch.cuda.get_arch_list()`) runs on the GPU.

    `sm_XY` is machine code: it runs on major version X from minor version Y on, or with a letter suffix on XY only.
    `compute_XY` is PTX, which the driver translates for every later card.
    """
    for kind, major, minor, letter in re.findall(r"(sm|compute)_(\d+)(\d)([a-z]?)", " ".join(compiled)):
        built = (int(major), int(minor))
        later = built <= capability if kind == "compute" else built[0] == capability[0] and built <= capability
        if built == capability or (later and not letter):
            return True
    return False


def tool_findings(tools: BuildTools, *, with_vllm: bool) -> list[Finding]:
    """Reports the tools with which Triton compiles the C launchers of its kernels.

    Without them vLLM's model runner cannot start, and training uses slower paths.
    """
    without = "vLLM cannot start" if with_vllm else "packed rows and the language head take slower paths"
    python = f"python{sys.version_info.major}.{sys.version_info.minor}"
    wanted = (("C compiler", tools.c_compiler, "gcc"), ("Python headers", tools.python_headers, f"{python}-dev"))
    why = f"not found; Triton compiles the launchers of its kernels with it; without it {without}"
    return [
        Finding(subject, "fail" if with_vllm else "warn", why, f"apt-get install -y {package}")
        if path is None
        else Finding(subject, "ok", path)
        for subject, path, package in wanted
    ]
