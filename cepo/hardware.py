"""Describes this machine's devices, checks that they suffice for a run, and explains why a GPU cannot be used."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cepo.errors import ConfigError

Capability = tuple[int, int]

_CPU_FACTS, _CPU_QUOTA = Path("/proc/cpuinfo"), Path("/sys/fs/cgroup/cpu.max")
_DEVICES, _PCI_DEVICES = Path("/dev"), Path("/sys/bus/pci/devices")
_NVIDIA, _DISPLAY_CLASSES = "0x10de", ("0x0300", "0x0302")
_SMALLEST_DRIVER = {"12": "525 or later", "13": "580 or later"}
"""The NVIDIA driver that each major version of CUDA needs."""


@dataclass(frozen=True)
class Finding:
    """A fact about the machine or the run: `fail` if training cannot start, `warn` if it can, with a drawback or a risk."""

    subject: str
    mark: Literal["ok", "info", "warn", "fail"]
    found: str
    remedy: str = ""

    def __post_init__(self) -> None:
        assert self.mark != "fail" or self.remedy, f"{self.subject}: a failure names its remedy"


def driver_version() -> str | None:
    """Returns the NVIDIA driver's version; None if no driver answers."""
    lines = _nvidia_smi("--query-gpu=driver_version")
    return lines[0] if lines and lines[0][:1].isdigit() else None


def visible_gpus() -> list[tuple[str, float]]:
    """Returns name and memory in GiB of each GPU that this process sees.

    The driver is asked first, because torch's context takes 0.5 GB of the first GPU for as long as the process lives.
    """
    import torch

    if not torch.cuda.is_available():
        return []
    shown, count = os.environ.get("CUDA_VISIBLE_DEVICES"), torch.cuda.device_count()
    lines = _nvidia_smi("--query-gpu=name,memory.total", *([] if shown is None else ["-i", shown]))
    parts = [line.rpartition(", ") for line in lines]
    if len(parts) == count and all(mebibytes.isdigit() for _, _, mebibytes in parts):
        return [(name, int(mebibytes) / 2**10) for name, _, mebibytes in parts]
    # A part of a GPU, or a GPU that shares the host's memory.
    properties = [torch.cuda.get_device_properties(index) for index in range(count)]
    return [(one.name, one.total_memory / 2**30) for one in properties]


def _nvidia_smi(*options: str) -> list[str]:
    command = ["nvidia-smi", *options, "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.splitlines() if done.returncode == 0 else []


def _system_text(file: Path) -> str:
    """Returns the file's text; empty if it does not exist or cannot be read here."""
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def has_nvidia_gpu() -> bool:
    """Returns whether this machine has an NVIDIA GPU, usable or not: a PCI device, a device file, or a driver that answers."""
    makers = {
        _system_text(device / "vendor").strip()
        for device in _PCI_DEVICES.glob("*")
        if _system_text(device / "class").startswith(_DISPLAY_CLASSES)
    }
    return _NVIDIA in makers or any(_DEVICES.glob("nvidia[0-9]*")) or driver_version() is not None


def torch_build() -> Finding:
    """Reports torch's build. It is a failure if it is for CUDA and sees no GPU where there is one that is not hidden."""
    import torch

    subject, cuda, driver = "torch's build", torch.version.cuda, driver_version()
    seen = "no NVIDIA driver answers" if driver is None else f"driver {driver} answers"
    if cuda is None and driver is not None:
        remedy = "install the extra for GPUs into a fresh environment: pip install 'cepo[gpu]'"
        return Finding(subject, "warn", f"for CPUs, which cannot use the NVIDIA GPU ({seen})", remedy)
    if cuda is None:
        return Finding(subject, "ok", "for CPUs")
    is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    if is_hidden or torch.cuda.is_available() or not has_nvidia_gpu():
        return Finding(subject, "ok", f"CUDA {cuda}, compiled for {', '.join(torch.cuda.get_arch_list())}; {seen}")
    needed = _SMALLEST_DRIVER.get(cuda.partition(".")[0], "a newer one")
    remedy = (
        "check nvidia-smi, its driver, CUDA_VISIBLE_DEVICES and, in a container, --gpus all. To run on the processors, set "
        "CUDA_VISIBLE_DEVICES= (empty), or pip install 'cepo[cpu]'"
    )
    found = f"torch is built for CUDA {cuda} and sees no GPU ({seen}; needed: {needed})"
    return Finding(subject, "fail", found, remedy)


def torchvision_fault() -> Finding | None:
    """Returns the problem if torchvision cannot be imported beside this torch, as two different builds cannot, else None."""
    import torch

    try:
        import torchvision  # noqa: F401  # pyright: ignore[reportMissingTypeStubs]
    except (ImportError, RuntimeError, OSError, AttributeError) as error:
        found = f"torchvision, which vision-language models need, does not work with torch {torch.__version__}: {error}"
        together = "pip install --force-reinstall torch==2.13.0 torchvision==0.28.0"
        return Finding("torchvision", "fail", found, f"install both in one command from one index: {together}")
    return None


def require_usable_torch() -> None:
    """Checks that torch's CUDA build can use the NVIDIA GPU, if there is one, and that torchvision fits torch.

    A run that silently used the CPU would be hundreds of times slower. `CUDA_VISIBLE_DEVICES=` asks for the CPU.
    """
    for finding in (torch_build(), torchvision_fault()):
        if finding is not None and finding.mark == "fail":
            raise ConfigError(f"{finding.found}. Remedy: {finding.remedy}")


def device_in_words() -> str:
    """Describes where this process would train: the GPUs by name and memory, or the CPU and why no GPU is used."""
    import torch

    names = Counter(f"{name}, {memory:.0f} GiB" for name, memory in visible_gpus())
    if names:
        return "; ".join(f"{count} x {name}" if count > 1 else name for name, count in names.items())
    why = f"this machine has no NVIDIA GPU, so torch {torch.__version__}, a CUDA build, runs on the processors"
    if torch.version.cuda is None:
        why = f"torch {torch.__version__} is a build without CUDA"
    elif (shown := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        why = f"CUDA_VISIBLE_DEVICES={shown} hides the GPUs"
    return f"CPU ({processor_name()}, {num_processors()} processors): {why}"


def require_devices(per_machine: int) -> None:
    """Raises ConfigError if this machine has fewer GPUs than a run uses or, without any, fewer processors."""
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    usable = gpus or num_processors()
    if per_machine > usable:
        has = gpus or "no GPU, and without one it is the number of worker processes"
        raise ConfigError(
            f"trainer.n_gpus_per_node={per_machine}, but this machine has {has}: {device_in_words()}. Set it to at most "
            f"{usable}, or name a Ray cluster with trainer.ray_address"
        )


def num_processors() -> int:
    """Returns the number of processors that this process may use by its affinity and its cgroup's quota."""
    number = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, _, period = _system_text(_CPU_QUOTA).partition(" ")
    return max(1, min(number, int(quota) // int(period))) if quota.isdecimal() else number


def processor_name() -> str:
    found = re.search(r"^model name\s*: (.*)$", _system_text(_CPU_FACTS), flags=re.MULTILINE)
    return found[1].strip() if found else platform.machine()


def with_own_programs(path: str) -> str:
    """Returns `path` with the folder of the running Python prepended if missing, where pip installs programs."""
    folder, folders = str(Path(sys.executable).parent), [part for part in path.split(os.pathsep) if part]
    return path if folder in folders else os.pathsep.join([folder, *folders])
