"""Inspects the machine without changing it: processors, memory, shared memory, GPUs, compilers."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from cepo.doctor.findings import Finding, Mark
from cepo.hardware.devices import Problem, driver_version, gpu_problem, num_processors, torchvision_problem
from cepo.hardware.tools import BuildTools, Capability, look_for_tools
from cepo.sizing import gib
from cepo.tracking.environment import installed_version

SECTION = "machine"
_SMALLEST_CAPABILITY = (8, 0)
"""The lowest compute capability whose tensor cores support bf16."""
_CONTAINER = Path("/sys/fs/cgroup")
_SHARED_MEMORY = Path("/dev/shm")
_SHARED_PER_DEVICE = 2 * 2**30


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU as torch reports it; sizes in bytes."""

    name: str
    capability: Capability
    total: int
    free: int


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The resources of this machine, in bytes.

    Attributes:
        shared_free: None where there is no /dev/shm.
        torch_cuda: the CUDA version for which torch was built; None for a CPU build. compiled: architectures in the build.
        driver: version of the NVIDIA driver, whether or not torch can use the GPUs.
        problems: why torch or torchvision cannot be used, by subject.
    """

    processors: int
    memory_total: int
    memory_free: int
    shared_free: int | None
    torch_cuda: str | None
    compiled: tuple[str, ...]
    driver: str | None
    gpus: tuple[Gpu, ...]
    problems: tuple[tuple[str, Problem], ...]
    tools: BuildTools


def look_at_machine() -> Machine:
    """Returns the current resources of this machine."""
    gpus: list[Gpu] = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        free, total = torch.cuda.mem_get_info(index)
        capability, name = torch.cuda.get_device_capability(index), torch.cuda.get_device_name(index)
        gpus.append(Gpu(name=name, capability=capability, total=total, free=free))
    memory_total, memory_free = usable_memory()
    found = (("torch's build", gpu_problem()), ("torchvision", torchvision_problem()))
    return Machine(
        processors=num_processors(),
        memory_total=memory_total,
        memory_free=memory_free,
        shared_free=shutil.disk_usage(_SHARED_MEMORY).free if _SHARED_MEMORY.is_dir() else None,
        torch_cuda=torch.version.cuda,
        compiled=tuple(torch.cuda.get_arch_list()),
        driver=driver_version(),
        gpus=tuple(gpus),
        problems=tuple((subject, problem) for subject, problem in found if problem is not None),
        tools=look_for_tools(),
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
    memory = f"{gib(machine.memory_free)} free of {gib(machine.memory_total)}"
    findings = [
        Finding(SECTION, "processors", "ok", f"{machine.processors} usable"),
        Finding(SECTION, "memory", "ok", memory),
    ]
    if machine.shared_free is not None:
        short = machine.shared_free < _SHARED_PER_DEVICE * max(1, len(machine.gpus))
        remedy = "in a container: --shm-size=16g or --ipc=host; the processes of several devices exchange data there"
        found = f"{gib(machine.shared_free)} free"
        findings.append(
            Finding(SECTION, str(_SHARED_MEMORY), "warn" if short else "ok", found, remedy=remedy if short else "")
        )
    failed = [Finding(SECTION, name, "fail", each.found, remedy=each.remedy) for name, each in machine.problems]
    findings += failed or [_torch_build(machine)]
    for index, gpu in enumerate(machine.gpus):
        findings.append(gpu_finding(index, gpu, machine.compiled))
    if machine.gpus:
        findings += tool_findings(machine.tools, with_vllm=installed_version("vllm") is not None)
    return findings


def _torch_build(machine: Machine) -> Finding:
    subject = "torch's build"
    if machine.torch_cuda is None and machine.driver is not None:
        remedy = "install the extra for GPUs into a fresh environment: pip install 'cepo[gpu]'"
        found = f"for CPUs, but there is an NVIDIA GPU (driver {machine.driver}), which it cannot use"
        return Finding(SECTION, subject, "warn", found, remedy=remedy)
    if machine.torch_cuda is None:
        return Finding(SECTION, subject, "ok", "for CPUs: suitable only for trying small models")
    driver = "" if machine.driver is None else f", driver {machine.driver}"
    if machine.gpus:
        found = f"CUDA {machine.torch_cuda}, compiled for {', '.join(machine.compiled)}{driver}"
        return Finding(SECTION, subject, "ok", found)
    found = f"CUDA {machine.torch_cuda}{driver}; no NVIDIA GPU is visible, so runs use the processors"
    return Finding(SECTION, subject, "info", found)


def gpu_finding(index: int, gpu: Gpu, compiled: Sequence[str]) -> Finding:
    """Reports the GPU, and whether torch has code for it and it has bf16."""
    capability = f"{gpu.capability[0]}.{gpu.capability[1]}"
    found = f"{gpu.name}, compute capability {capability}, {gib(gpu.free)} free of {gib(gpu.total)}"
    if not wheel_serves(gpu.capability, compiled):
        found += f"; torch's build has no code for it, only for {', '.join(compiled)}"
        remedy = "install torch 2.13.0 built for CUDA 13: pip install 'cepo[gpu]' into a fresh environment"
        return Finding(SECTION, f"GPU {index}", "fail", found, remedy=remedy)
    if gpu.capability < _SMALLEST_CAPABILITY:
        remedy = "bf16 training needs compute capability 8.0 or later; see docs/gpus.md"
        return Finding(SECTION, f"GPU {index}", "warn", found, remedy=remedy)
    return Finding(SECTION, f"GPU {index}", "ok", found)


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
    """Returns one finding per tool with which Triton compiles the C launchers of its kernels.

    Without them vLLM's model runner cannot start, and training uses slower paths.
    """
    missing: Mark = "fail" if with_vllm else "warn"
    without = "vLLM cannot start" if with_vllm else "packed rows and the language head take slower paths"
    python = f"python{sys.version_info.major}.{sys.version_info.minor}"
    wanted = (("C compiler", tools.c_compiler, "gcc"), ("Python headers", tools.python_headers, f"{python}-dev"))
    why = f"not found; Triton compiles the launchers of its kernels with it; without it {without}"
    return [
        Finding(SECTION, subject, "ok", place)
        if place is not None
        else Finding(SECTION, subject, missing, why, remedy=f"apt-get install -y {package}")
        for subject, place, package in wanted
    ]
