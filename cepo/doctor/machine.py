"""Inspects the machine without changing it: processors, memory, shared memory, disks, GPUs."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from _cepo_cpu_torch import mismatched_builds
from cepo.doctor.findings import Finding, Mark
from cepo.hardware.devices import driver_problem, driver_version, gpus_are_hidden, smallest_driver, unseen_gpu_problem
from cepo.hardware.tools import BuildTools, Capability, look_for_tools
from cepo.rollout.engine_options import prefers_flashinfer
from cepo.sizing.phases import gib
from cepo.tracking.environment import installed_version

SECTION = "machine"
_PYTHON = f"python{sys.version_info.major}.{sys.version_info.minor}"
_KERNELS = "vllm download-kernels (compiled kernels of FlashInfer), with this environment's vllm"
_SMALLEST_CAPABILITY = (8, 0)
"""The lowest compute capability whose tensor cores support bf16."""
SHARED_MEMORY = Path("/dev/shm")
_SMALLEST_SHARED_MEMORY = 2 * 2**30
GPU_INSTALL_GB = 10
"""Disk space of the GPU extra, without 4 GB of wheels in pip's cache; scripts/common.sh has the same number."""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU as torch reports it; sizes in bytes."""

    name: str
    capability: Capability
    total: int
    free: int


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The resources of this machine. Sizes are in bytes, and None if the system does not report them.

    Attributes:
        torch_cuda: the CUDA version for which torch was built; None for a CPU build.
        compiled: architectures in torch's build.
        driver: version of the NVIDIA driver, whether or not torch can use the GPUs.
        mismatched: packages, such as "torchvision", that are CUDA builds although torch is a CPU build.
        hidden: CUDA_VISIBLE_DEVICES is set and shows no GPU.
        tools: compilers and headers; None if not looked for.
        environment_free: free bytes on the disk with this Python's packages.
    """

    processors: int
    memory_total: int | None
    memory_free: int | None
    shared_total: int | None
    shared_free: int | None
    torch_cuda: str | None
    compiled: tuple[str, ...]
    driver: str | None
    mismatched: tuple[str, ...]
    gpus: tuple[Gpu, ...]
    hidden: bool = False
    tools: BuildTools | None = None
    environment_free: int | None = None


def look_at_machine() -> Machine:
    """Returns the current resources of this machine."""
    total, free = usable_memory(
        _text(Path("/proc/meminfo")),
        _text(Path("/sys/fs/cgroup/memory.max")),
        _text(Path("/sys/fs/cgroup/memory.current")),
    )
    shared = shutil.disk_usage(SHARED_MEMORY) if SHARED_MEMORY.is_dir() else None
    gpus: list[Gpu] = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        free_bytes, total_bytes = torch.cuda.mem_get_info(index)
        major, minor = torch.cuda.get_device_capability(index)
        name = torch.cuda.get_device_name(index)
        gpus.append(Gpu(name=name, capability=(major, minor), total=total_bytes, free=free_bytes))
    return Machine(
        processors=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory_total=total,
        memory_free=free,
        shared_total=None if shared is None else shared.total,
        shared_free=None if shared is None else shared.free,
        torch_cuda=torch.version.cuda,
        compiled=tuple(torch.cuda.get_arch_list()),
        driver=driver_version(),
        mismatched=mismatched_builds(),
        gpus=tuple(gpus),
        hidden=gpus_are_hidden(),
        tools=look_for_tools(),
        environment_free=shutil.disk_usage(sys.prefix).free,
    )


def usable_memory(meminfo: str | None, limit: str | None, used: str | None) -> tuple[int | None, int | None]:
    """Returns (total, free) bytes from the texts of /proc/meminfo and of a container's memory.max and memory.current.

    A container's limit applies if it is below the machine's memory. The result is (None, None) without /proc/meminfo.
    """
    values = dict(line.split(":", 1) for line in (meminfo or "").splitlines() if ":" in line)
    if "MemTotal" not in values or "MemAvailable" not in values:
        return None, None
    total, free = (int(values[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
    if limit is not None and used is not None and limit.strip().isdigit() and int(limit) < total:
        total, free = int(limit), min(free, int(limit) - int(used))
    return total, free


def machine_findings(machine: Machine) -> list[Finding]:
    """Reports processors, memory, shared memory, torch's build, and each GPU with its attention backend."""
    findings = [Finding(SECTION, "processors", "ok", f"{machine.processors} usable")]
    if machine.memory_total is None or machine.memory_free is None:
        findings.append(Finding(SECTION, "memory", "info", "not reported by this system"))
    else:
        found = f"{gib(machine.memory_free)} free of {gib(machine.memory_total)}"
        findings.append(Finding(SECTION, "memory", "ok", found))
    findings.append(_shared_memory(machine))
    findings.append(_torch_build(machine))
    if machine.torch_cuda is not None and machine.driver is not None:
        findings.append(driver_finding(machine.driver, machine.torch_cuda))
    for index, gpu in enumerate(machine.gpus):
        findings += gpu_findings(index, gpu, machine.compiled)
    if machine.gpus and machine.tools is not None:
        flashinfer_first = any(prefers_flashinfer(gpu.capability) for gpu in machine.gpus)
        with_vllm = installed_version("vllm") is not None
        findings += tool_findings(machine.tools, with_vllm=with_vllm, flashinfer_first=flashinfer_first)
    return findings


def _shared_memory(machine: Machine) -> Finding:
    subject = str(SHARED_MEMORY)
    if machine.shared_total is None or machine.shared_free is None:
        return Finding(SECTION, subject, "info", "this system has none")
    found = f"{gib(machine.shared_free)} free of {gib(machine.shared_total)}"
    if machine.shared_free >= _SMALLEST_SHARED_MEMORY:
        return Finding(SECTION, subject, "ok", found)
    remedy = "in a container: --shm-size=16g or --ipc=host; runs on several devices exchange data there"
    return Finding(SECTION, subject, "warn", found, remedy=remedy)


def _torch_build(machine: Machine) -> Finding:
    subject = "torch's build"
    if machine.torch_cuda is None:
        if machine.driver is not None:
            remedy = (
                f"install the extra for GPUs into a fresh environment: pip install 'cepo[gpu]', {GPU_INSTALL_GB} GB"
            )
            found = f"for CPUs, but there is an NVIDIA GPU (driver {machine.driver}), which it cannot use"
            if machine.environment_free is not None:
                remedy += f" ({gib(machine.environment_free)} are free on its disk)"
            return Finding(SECTION, subject, "warn", found, remedy=remedy)
        found = "for CPUs, with SDPA's own attention kernel: suitable only for trying small models"
        if machine.mismatched:
            found += f"; CUDA builds of {', '.join(machine.mismatched)} are also installed; cepo works around them"
        return Finding(SECTION, subject, "ok", found)
    if machine.gpus:
        found = f"CUDA {machine.torch_cuda}, compiled for {', '.join(machine.compiled)}"
        return Finding(SECTION, subject, "ok", found)
    if machine.hidden:
        found = f"CUDA {machine.torch_cuda}; CUDA_VISIBLE_DEVICES shows no GPU, so runs use the processors"
        return Finding(SECTION, subject, "info", found)
    problem = unseen_gpu_problem(machine.driver, machine.torch_cuda)
    return Finding(SECTION, subject, "fail", problem.found, remedy=problem.remedy)


def driver_finding(driver: str, cuda: str) -> Finding:
    """Checks that a driver is recent enough for a torch built for that CUDA version."""
    problem, smallest = driver_problem(driver, cuda), smallest_driver(cuda)
    if problem is not None:
        return Finding(SECTION, "driver", "fail", problem.found, remedy=problem.remedy)
    if smallest is None:
        return Finding(SECTION, "driver", "info", f"{driver}; the driver that CUDA {cuda} needs is not known")
    found = f"{driver}; CUDA {cuda} needs at least {smallest}"
    return Finding(SECTION, "driver", "ok", found)


def gpu_findings(index: int, gpu: Gpu, compiled: Sequence[str]) -> list[Finding]:
    """Reports the GPU, whether torch has code for it, and its attention backend."""
    subject = f"GPU {index}"
    capability = f"{gpu.capability[0]}.{gpu.capability[1]}"
    found = f"{gpu.name}, compute capability {capability}, {gib(gpu.free)} free of {gib(gpu.total)}"
    if not wheel_serves(gpu.capability, compiled):
        found += f"; torch's build has no code for it, only for {', '.join(compiled)}"
        remedy = "install torch 2.13.0 built for CUDA 13: pip install 'cepo[gpu]' into a fresh environment"
        return [Finding(SECTION, subject, "fail", found, remedy=remedy)]
    if gpu.capability < _SMALLEST_CAPABILITY:
        remedy = "bf16 training needs compute capability 8.0 or later; see docs/gpus.md"
        return [Finding(SECTION, subject, "warn", found, remedy=remedy)]
    attention = "SDPA for padded rows, FlexAttention for packed rows (padding_free), which Triton compiles for the card"
    return [
        Finding(SECTION, subject, "ok", found),
        Finding(SECTION, "  attention", "info", attention),
    ]


def wheel_serves(capability: Capability, compiled: Sequence[str]) -> bool:
    """Returns whether a torch build with the architectures `compiled` (`torch.cuda.get_arch_list()`) runs on the GPU.

    `sm_XY` is machine code: it runs on major version X from minor version Y on, or with a letter suffix on XY only.
    `compute_XY` is PTX, which the driver translates for every later card.
    """
    for entry in compiled:
        matched = re.fullmatch(r"(sm|compute)_(\d+)(\d)([a-z]?)", entry)
        if matched is None:
            continue
        kind, major, minor, letter = matched.groups()
        built = (int(major), int(minor))
        if letter:
            runs = built == capability
        elif kind == "sm":
            runs = built[0] == capability[0] and built[1] <= capability[1]
        else:
            runs = built <= capability
        if runs:
            return True
    return False


def tool_findings(tools: BuildTools, *, with_vllm: bool, flashinfer_first: bool) -> list[Finding]:
    """Returns one finding per build tool.

    Triton compiles a C launcher for each of its kernels. Without a C compiler, vLLM's model runner cannot start, and
    training uses slower paths. FlashInfer's tools matter on cards where vLLM prefers it; without them vLLM uses
    FLASH_ATTN.

    Args:
        with_vllm: vLLM's CUDA build is installed.
        flashinfer_first: vLLM by itself would choose FlashInfer for attention on a card of this machine.
    """
    needed: Mark = "fail" if with_vllm else "warn"
    use = "Triton compiles the launchers of its kernels with it"
    without = "vLLM cannot start" if with_vllm else "packed rows and the language head take slower paths"
    findings = [
        _tool("C compiler", tools.c_compiler, needed, f"{use}; without it {without}", "apt-get install -y gcc"),
        _tool(
            "Python headers", tools.python_headers, needed, f"Python.h; {use}; without it {without}",
            f"apt-get install -y {_PYTHON}-dev",
        ),
    ]  # fmt: skip
    if tools.flashinfer_kernels:
        return [*findings, _tool("FlashInfer's kernels", "flashinfer-jit-cache is installed", "ok", "", "")]
    why = "FlashInfer would compile its attention with it; without it vLLM uses FLASH_ATTN"
    if not flashinfer_first:
        why = "not needed: the chosen attention backend uses no FlashInfer kernel"
    return [
        *findings,
        _tool("ninja", tools.ninja, "info", why, "pip install ninja" if flashinfer_first else ""),
        _tool(
            "nvcc", tools.nvcc, "info", why,
            f"apt-get install -y cuda-nvcc-13-0 (NVIDIA's repository), or {_KERNELS}" if flashinfer_first else "",
        ),
    ]  # fmt: skip


def _tool(subject: str, place: str | None, missing: Mark, why: str, remedy: str) -> Finding:
    if place is not None:
        return Finding(SECTION, subject, "ok", place)
    return Finding(SECTION, subject, missing, f"not found; {why}", remedy=remedy)


def _text(file: Path) -> str | None:
    try:
        return file.read_text("utf-8")
    except OSError:
        return None
