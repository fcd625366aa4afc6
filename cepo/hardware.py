"""Describes this machine's devices, checks that they suffice for a run, and explains why a GPU cannot be used."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from collections import Counter
from collections.abc import MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cepo.errors import ConfigError

Capability = tuple[int, int]

_CPU_FACTS = Path("/proc/cpuinfo")
_CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")
_DEVICES = Path("/dev")
_PCI_DEVICES = Path("/sys/bus/pci/devices")
_NVIDIA = "0x10de"
_DISPLAY_CLASSES = ("0x0300", "0x0302")
_SMALLEST_DRIVER = {"12": "525 or later", "13": "580 or later"}
"""The NVIDIA driver that each major version of CUDA needs."""


@dataclass(frozen=True)
class CheckResult:
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
    # Without a driver the program may print a sentence.
    if not lines or not lines[0][:1].isdigit():
        return None
    return lines[0]


def visible_gpus() -> list[tuple[str, float]]:
    """Returns name and memory in GiB of each GPU that this process sees.

    The driver is asked first, because torch's context takes 0.5 GB of the first GPU for as long as the process lives.
    """
    import torch

    if not torch.cuda.is_available():
        return []
    count = torch.cuda.device_count()
    options = ["--query-gpu=name,memory.total"]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        options += ["-i", visible]
    names_and_mebibytes: list[tuple[str, str]] = []
    for line in _nvidia_smi(*options):
        name, _, mebibytes = line.rpartition(", ")
        names_and_mebibytes.append((name, mebibytes))
    if len(names_and_mebibytes) == count and all(mebibytes.isdigit() for _, mebibytes in names_and_mebibytes):
        return [(name, int(mebibytes) / 2**10) for name, mebibytes in names_and_mebibytes]
    # A part of a GPU, or a GPU that shares the host's memory.
    gpus = [torch.cuda.get_device_properties(index) for index in range(count)]
    return [(gpu.name, gpu.total_memory / 2**30) for gpu in gpus]


def _nvidia_smi(*options: str) -> list[str]:
    command = ["nvidia-smi", *options, "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return []
    if done.returncode != 0:
        return []
    return done.stdout.splitlines()


def _system_text(file: Path) -> str:
    """Returns the file's text; empty if it does not exist or cannot be read here."""
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def has_nvidia_gpu() -> bool:
    """Returns whether this machine has an NVIDIA GPU, usable or not: a PCI device, a device file, or a driver that answers."""
    for device in _PCI_DEVICES.glob("*"):
        is_display = _system_text(device / "class").startswith(_DISPLAY_CLASSES)
        if is_display and _system_text(device / "vendor").strip() == _NVIDIA:
            return True
    return any(_DEVICES.glob("nvidia[0-9]*")) or driver_version() is not None


def torch_build() -> CheckResult:
    """Reports torch's build. It is a failure if it is for CUDA and sees no GPU where there is one that is not hidden."""
    import torch

    subject = "torch's build"
    cuda = torch.version.cuda
    driver = driver_version()
    driver_in_words = "no NVIDIA driver answers" if driver is None else f"driver {driver} answers"
    if cuda is None and driver is not None:
        remedy = "install the extra for GPUs into a fresh environment: pip install -e '.[gpu]', in cepo's checkout"
        return CheckResult(subject, "warn", f"for CPUs, which cannot use the NVIDIA GPU ({driver_in_words})", remedy)
    if cuda is None:
        return CheckResult(subject, "ok", "for CPUs")
    is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    if is_hidden or torch.cuda.is_available() or not has_nvidia_gpu():
        architectures = ", ".join(torch.cuda.get_arch_list())
        return CheckResult(subject, "ok", f"CUDA {cuda}, compiled for {architectures}; {driver_in_words}")
    major_version = cuda.partition(".")[0]
    smallest_driver = _SMALLEST_DRIVER.get(major_version, "a newer one")
    remedy = (
        "check nvidia-smi, its driver, CUDA_VISIBLE_DEVICES and, in a container, --gpus all. To run on the processors, set "
        "CUDA_VISIBLE_DEVICES= (empty), or pip install -e '.[cpu]', in cepo's checkout"
    )
    problem = f"torch is built for CUDA {cuda} and sees no GPU ({driver_in_words}; needed: {smallest_driver})"
    return CheckResult(subject, "fail", problem, remedy)


def torchvision_fault() -> CheckResult | None:
    """Returns the problem if torchvision cannot be imported beside this torch, as two different builds cannot, else None."""
    import torch

    try:
        import torchvision  # noqa: F401  # pyright: ignore[reportMissingTypeStubs]
    except (ImportError, RuntimeError, OSError, AttributeError) as error:
        problem = (
            f"torchvision, which vision-language models need, does not work with torch {torch.__version__}: {error}"
        )
        command = "pip install --force-reinstall torch==2.13.0 torchvision==0.28.0"
        return CheckResult("torchvision", "fail", problem, f"install both in one command from one index: {command}")
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

    counts = Counter(f"{name}, {memory:.0f} GiB" for name, memory in visible_gpus())
    if counts:
        return "; ".join(f"{count} x {name}" if count > 1 else name for name, count in counts.items())
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if torch.version.cuda is None:
        reason = f"torch {torch.__version__} is a build without CUDA"
    elif visible is not None:
        reason = f"CUDA_VISIBLE_DEVICES={visible} hides the GPUs"
    else:
        reason = f"this machine has no NVIDIA GPU, so torch {torch.__version__}, a CUDA build, runs on the processors"
    return f"CPU ({processor_name()}, {num_processors()} processors): {reason}"


def require_devices(per_machine: int) -> None:
    """Raises ConfigError if this machine has fewer GPUs than a run uses or, without any, fewer processors."""
    import torch

    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    usable = num_gpus or num_processors()
    if per_machine > usable:
        devices = num_gpus or "no GPU, and without one it is the number of worker processes"
        raise ConfigError(
            f"trainer.n_gpus_per_node={per_machine}, but this machine has {devices}: {device_in_words()}. Set it to at most "
            f"{usable}, or name a Ray cluster with trainer.ray_address"
        )


def drawing_devices() -> list[int]:
    """Returns the GPU whose random stream this process draws from, as a list for `torch.random.fork_rng`; empty without one.

    Without a list torch saves the streams of all GPUs, opens a context on each, and warns.
    """
    import torch

    return [torch.cuda.current_device()] if torch.cuda.is_available() else []


_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def reserve_memory_in_growing_segments(environment: MutableMapping[str, str] = os.environ) -> None:
    """Has torch's allocator on GPUs grow its segments, which wastes less memory between tensors of changing sizes.

    It must be called before torch first uses a GPU. It does nothing if the user has configured the allocator.
    """
    if not any(name in environment for name in _ALLOCATOR_VARIABLES):
        environment["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def num_processors() -> int:
    """Returns the number of processors that this process may use by its affinity and its cgroup's quota."""
    number = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):  # only on Linux
        number = len(os.sched_getaffinity(0))
    # The quota is "<microseconds> <period>", or "max <period>" without a limit.
    quota, _, period = _system_text(_CPU_QUOTA).partition(" ")
    if not quota.isdecimal():
        return number
    return max(1, min(number, int(quota) // int(period)))


def processor_name() -> str:
    """Returns the processor's name, such as "AMD EPYC 9355"; its architecture where the system does not tell the name."""
    return _processor_fact("model name") or platform.machine()


def processor_vendor() -> str | None:
    """Returns "AuthenticAMD", "GenuineIntel" or another vendor's name; None where the system does not tell it."""
    return _processor_fact("vendor_id")


def _processor_fact(name: str) -> str | None:
    line = re.search(rf"^{name}\s*: (.*)$", _system_text(_CPU_FACTS), flags=re.MULTILINE)
    return None if line is None else line[1].strip()


def with_own_programs(path: str) -> str:
    """Returns `path` with the folder of the running Python prepended if missing, where pip installs programs."""
    own_folder = str(Path(sys.executable).parent)
    folders = [folder for folder in path.split(os.pathsep) if folder]
    if own_folder in folders:
        return path
    return os.pathsep.join([own_folder, *folders])
