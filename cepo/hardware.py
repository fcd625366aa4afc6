"""Describes this machine's devices, checks that they suffice for a run, and explains why a GPU cannot be used."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from cepo.errors import ConfigError

_CPU_FACTS = Path("/proc/cpuinfo")
_DEVICES = Path("/dev")
_PCI_DEVICES = Path("/sys/bus/pci/devices")
_NVIDIA, _DISPLAY_CLASSES = "0x10de", ("0x0300", "0x0302")
_CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")
_LOAD = Path("/proc/loadavg")
_THREADS = "OMP_NUM_THREADS"
_SMALLEST_DRIVER = {11: 450, 12: 525, 13: 580}
"""The minimum NVIDIA driver for each major version of CUDA."""
_HIDDEN = ("", "-1")
"""Values of CUDA_VISIBLE_DEVICES that hide every GPU from a process."""


class Fault(NamedTuple):
    """What is wrong with the machine, and how to fix it."""

    found: str
    remedy: str


def driver_version() -> str | None:
    """Returns the NVIDIA driver's version; None if no driver answers."""
    lines = _nvidia_smi("--query-gpu=driver_version")
    return lines[0] if lines and lines[0][:1].isdigit() else None


def visible_gpus() -> list[tuple[str, float]]:
    """Returns name and memory in GiB of each GPU that this process sees.

    The driver is asked first: torch opens a context, which takes 0.5 GB on the first GPU for as long as the process
    lives, and the driver process of several GPUs computes nothing on them.
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
    """Returns the lines of the driver's answer; none if it does not answer."""
    command = ["nvidia-smi", *options, "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.splitlines() if done.returncode == 0 else []


def gpu_fault() -> Fault | None:
    """Explains why a CUDA build of torch sees no GPU where there is one that is not hidden; None if there is no such problem."""
    import torch

    cuda = torch.version.cuda
    if (
        cuda is None
        or os.environ.get("CUDA_VISIBLE_DEVICES") in _HIDDEN
        or torch.cuda.is_available()
        or not has_nvidia_gpu()
    ):
        return None
    driver, smallest = driver_version(), _SMALLEST_DRIVER.get(int(cuda.split(".")[0]), 0)
    if driver is not None and int(driver.split(".")[0]) < smallest:
        return Fault(
            found=f"driver {driver}, but torch's CUDA {cuda} needs at least {smallest}",
            remedy=f"install driver {smallest} or later, or a torch build for the CUDA version that `nvidia-smi` shows",
        )
    seen = "no NVIDIA driver answers" if driver is None else f"driver {driver} answers"
    return Fault(
        found=f"torch is built for CUDA {cuda} and sees no GPU ({seen})",
        remedy="check nvidia-smi, CUDA_VISIBLE_DEVICES and, in a container, --gpus all; without a GPU: pip install 'cepo[cpu]'",
    )


def has_nvidia_gpu() -> bool:
    """Returns whether this machine has an NVIDIA GPU, usable or not: a device file, a PCI device, or a driver that answers."""
    if any(_DEVICES.glob("nvidia[0-9]*")):
        return True
    for device in _PCI_DEVICES.glob("*"):
        try:
            vendor, kind = ((device / name).read_text("ascii").strip() for name in ("vendor", "class"))
        except OSError:  # unplugged meanwhile, or not readable in this container
            continue
        if vendor == _NVIDIA and kind.startswith(_DISPLAY_CLASSES):
            return True
    return driver_version() is not None


def require_usable_torch() -> None:
    """Checks that torch's CUDA build can use the NVIDIA GPU, if there is one, and that torchvision fits torch.

    A run that silently used the CPU would be hundreds of times slower. `CUDA_VISIBLE_DEVICES=` asks for the CPU.

    Raises:
        ConfigError: one of them cannot be used.
    """
    fault = gpu_fault()
    if fault is not None:
        raise ConfigError(
            f"no GPU can be used: {fault.found}. Remedy: {fault.remedy}. To run on the processors, set "
            "CUDA_VISIBLE_DEVICES= (empty)"
        )
    fault = torchvision_fault()
    if fault is not None:
        raise ConfigError(f"{fault.found}. Remedy: {fault.remedy}")


def torchvision_fault() -> Fault | None:
    """Returns the problem if torchvision cannot be imported beside this torch, as two different builds cannot, else None."""
    import torch

    try:
        import torchvision  # noqa: F401  # pyright: ignore[reportMissingTypeStubs]
    except ImportError:
        found = "torchvision is not installed, and the processors of vision-language models need it"
        return Fault(found=found, remedy="pip install 'cepo[cpu]' or 'cepo[gpu]'")
    except (RuntimeError, OSError, AttributeError) as error:
        return Fault(
            found=f"torchvision does not work with torch {torch.__version__}, as a build for another torch does not: {error}",
            remedy="install both in one command from one index: pip install --force-reinstall torch==2.13.0 torchvision==0.28.0",
        )
    return None


def device_in_words() -> str:
    """Describes where this process would train: the GPUs by name and memory, or the CPU and why no GPU is used."""
    names = Counter(f"{name}, {memory:.0f} GiB" for name, memory in visible_gpus())
    if names:
        return "; ".join(f"{count} x {name}" if count > 1 else name for name, count in names.items())
    return f"CPU ({processor_name()}, {num_processors()} processors): {_why_no_gpu()}"


def require_devices(per_machine: int) -> None:
    """Raises ConfigError if this machine has fewer GPUs than a run uses or, without any, fewer processors.

    Without a GPU, devices are worker processes, each of which needs a processor.
    """
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    usable = gpus or num_processors()
    if per_machine <= max(1, usable):
        return
    asked = f"trainer.n_gpus_per_node={per_machine}, but this machine has"
    if gpus:
        raise ConfigError(
            f"{asked} {gpus}: {device_in_words()}. Set it to at most {gpus}, or name a Ray cluster with trainer.ray_address"
        )
    raise ConfigError(
        f"{asked} no GPU: {_why_no_gpu()}. Without GPUs it is the number of worker processes, and there are {usable} "
        f"processors. Set it to 1 (at most {usable}), or run on a machine with GPUs"
    )


def num_processors() -> int:
    """Returns the number of processors that this process may use by its affinity and its cgroup's quota."""
    number = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, _, period = (
        _CPU_QUOTA.read_text(encoding="ascii").partition(" ") if _CPU_QUOTA.is_file() else ("max", "", "")
    )
    return number if quota == "max" else max(1, min(number, int(quota) // int(period)))


def _why_no_gpu() -> str:
    import torch

    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is a build without CUDA"
    if shown is not None:
        return f"CUDA_VISIBLE_DEVICES={shown} hides the GPUs"
    return f"this machine has no NVIDIA GPU, so torch {torch.__version__}, a CUDA build, runs on the processors"


def processor_name() -> str:
    """Returns the processor's name as the system gives it."""
    try:
        lines = _CPU_FACTS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # not Linux
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return (names or [platform.processor() or platform.machine()])[0]


def limit_threads(recorded: int | None = None) -> str | None:
    """Sets OMP_NUM_THREADS to the number of free processors if other programs use some, and says so.

    Spinning threads that share a processor slow each other down several times over. `recorded` is the number of threads
    with which the run began: a resumed run keeps it, because another one changes the rounding of sums. Does nothing if the
    user has set the limit or torch, which reads it once, is loaded.
    """
    usable, present, busy = num_processors(), os.cpu_count() or 1, _busy_processors()
    free = min(usable, recorded or max(1, round(usable * (1 - busy / present))))
    if _THREADS in os.environ or "torch" in sys.modules or free == present:
        return None
    os.environ[_THREADS] = str(free)
    why = f"as this process may use {usable} of {present} processors"
    if recorded:
        why = "as many as when the run began"
    elif free < usable:
        why = f"as other programs keep about {busy:.0f} of {present} processors busy"
    return f"threads: {free}, {why}; set {_THREADS} to choose another number"


def _busy_processors() -> float:
    """Returns how many processors other programs use: the mean of the last minute, and not more than run just now."""
    try:
        minute, _, _, tasks = _LOAD.read_text(encoding="ascii").split()[:4]
    except OSError:  # not Linux
        return os.getloadavg()[0]
    return min(float(minute), max(0, int(tasks.partition("/")[0]) - 1))


Capability = tuple[int, int]


class BuildTools(NamedTuple):
    """What this machine has for kernels that are compiled at the start of a run; None for missing paths.

    Attributes:
        c_compiler: for Triton's launchers, which vLLM's kernels, FlexAttention and the language head's kernel use.
        python_headers: the folder with Python.h, which Triton's launchers include.
        flashinfer_kernels: whether FlashInfer's precompiled kernels (flashinfer-jit-cache) are installed.
    """

    c_compiler: str | None
    python_headers: str | None
    flashinfer_kernels: bool


def find_build_tools(environment: Mapping[str, str] = os.environ) -> BuildTools:
    """Searches the PATH of `environment` and the running Python's folder."""
    path = path_with(program_folder(), environment.get("PATH", ""))
    compilers = [environment["CC"]] if environment.get("CC") else ["gcc", "clang"]
    headers = Path(sysconfig.get_path("include"))
    return BuildTools(
        c_compiler=next((found for name in compilers if (found := shutil.which(name, path=path))), None),
        python_headers=str(headers) if (headers / "Python.h").is_file() else None,
        flashinfer_kernels=importlib.util.find_spec("flashinfer_jit_cache") is not None,
    )


def program_folder() -> str:
    """Returns the folder of the running Python, where pip installs programs."""
    return str(Path(sys.executable).parent)


def path_with(folder: str, path: str) -> str:
    """Returns `path` with `folder` prepended if missing, as in environments that are not activated."""
    folders = [part for part in path.split(os.pathsep) if part]
    return path if folder in folders else os.pathsep.join([folder, *folders])
