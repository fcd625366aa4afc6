"""Describes this machine's devices, checks that they suffice for a run, and explains why a GPU cannot be used."""

from __future__ import annotations

import os
import platform
import subprocess
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cepo.errors import ConfigError

_CPU_FACTS = Path("/proc/cpuinfo")
_SMALLEST_DRIVER = {11: 450, 12: 525, 13: 580}
"""The minimum NVIDIA driver for each major version of CUDA."""

_HIDDEN = ("", "-1")
"""Values of CUDA_VISIBLE_DEVICES that hide every GPU from a process."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A fault of the machine and how to fix it."""

    found: str
    remedy: str


def driver_version() -> str | None:
    """Returns the NVIDIA driver's version; None if no driver answers."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = done.stdout.split()
    return lines[0] if done.returncode == 0 and lines and lines[0][0].isdigit() else None


def smallest_driver(cuda: str) -> int | None:
    """Returns the minimum major driver version for a torch built for this CUDA version; None if unknown."""
    return _SMALLEST_DRIVER.get(int(cuda.split(".")[0]))


def driver_problem(driver: str, cuda: str) -> Problem | None:
    """Returns the problem if the driver is too old for a torch built for this CUDA version, else None."""
    smallest = smallest_driver(cuda)
    if smallest is None or int(driver.split(".")[0]) >= smallest:
        return None
    return Problem(
        found=f"driver {driver}, but torch's CUDA {cuda} needs at least {smallest}",
        remedy=f"install driver {smallest} or later, or a torch build for the CUDA version that `nvidia-smi` shows",
    )


def unseen_gpu_problem(driver: str | None, cuda: str) -> Problem:
    """Explains why a torch built for this CUDA version sees no GPU."""
    old = None if driver is None else driver_problem(driver, cuda)
    if old is not None:
        return old
    seen = "no NVIDIA driver answers" if driver is None else f"driver {driver} answers"
    return Problem(
        found=f"torch is built for CUDA {cuda} and sees no GPU ({seen})",
        remedy="check nvidia-smi, CUDA_VISIBLE_DEVICES and, in a container, --gpus all; without a GPU: pip install 'cepo[cpu]'",
    )


def gpus_are_hidden(environment: Mapping[str, str] | None = None) -> bool:
    """Returns whether CUDA_VISIBLE_DEVICES hides every GPU, which requests the CPU."""
    return (os.environ if environment is None else environment).get("CUDA_VISIBLE_DEVICES") in _HIDDEN


def require_wanted_device() -> None:
    """Raises if torch is a CUDA build that sees no GPU, unless `CUDA_VISIBLE_DEVICES=` requests the CPU.

    Otherwise a run would silently use the CPU and be hundreds of times slower.

    Raises:
        ConfigError: with the same advice as `cepo doctor`.
    """
    import torch

    cuda = torch.version.cuda
    if cuda is None or gpus_are_hidden() or torch.cuda.is_available():
        return
    problem = unseen_gpu_problem(driver_version(), cuda)
    raise ConfigError(
        f"no GPU can be used: {problem.found}. Remedy: {problem.remedy}. To run on the processors, set "
        "CUDA_VISIBLE_DEVICES= (empty)"
    )


def device_in_words() -> str:
    """Describes where this process would train: the GPUs by name and memory, or the CPU and why no GPU is used."""
    import torch

    if torch.cuda.is_available():
        properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
        names = Counter(f"{one.name}, {one.total_memory / 2**30:.0f} GiB" for one in properties)
        return "; ".join(f"{count} x {name}" if count > 1 else name for name, count in names.items())
    return f"CPU ({_processor()}, {num_processors()} processors): {_why_no_gpu()}"


def require_devices(per_machine: int) -> None:
    """Raises if this machine has fewer devices than a run requires.

    Without a GPU, devices are worker processes, each of which needs a processor.

    Raises:
        ConfigError: with the available devices.
    """
    import torch

    if per_machine == 1:
        return
    asked = f"trainer.n_gpus_per_node={per_machine}"
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpus and gpus < per_machine:
        raise ConfigError(
            f"{asked}, but this machine has {gpus}: {device_in_words()}. Set it to at most {gpus}, or name a Ray cluster with "
            "trainer.ray_address"
        )
    if not gpus and per_machine > num_processors():
        raise ConfigError(
            f"{asked}, but this machine has no GPU: {_why_no_gpu()}. Without GPUs it is the number of worker processes, and "
            f"there are {num_processors()} processors. Set it to 1 (at most {num_processors()}), or run on a machine with GPUs"
        )


def num_processors() -> int:
    """Returns the number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _why_no_gpu() -> str:
    import torch

    if torch.version.cuda is None:
        return f"torch {torch.__version__} is a build without CUDA"
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    return f"CUDA_VISIBLE_DEVICES={hidden} hides the GPUs" if hidden is not None else "torch sees no GPU"


def _processor() -> str:
    try:
        lines = _CPU_FACTS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # not Linux
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return (names or [platform.processor() or platform.machine()])[0]
