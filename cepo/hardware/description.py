"""The devices of this machine in words, and whether a run's number of them is there."""

from __future__ import annotations

import os
import platform
from collections import Counter
from pathlib import Path

from cepo.errors import ConfigError

_CPU_FACTS = Path("/proc/cpuinfo")


def device_in_words() -> str:
    """What this process's training would run on: the GPUs by name and memory, or the processors and why they."""
    import torch

    if torch.cuda.is_available():
        properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
        names = Counter(f"{one.name}, {one.total_memory / 2**30:.0f} GiB" for one in properties)
        return "; ".join(f"{count} x {name}" if count > 1 else name for name, count in names.items())
    return f"CPU ({_processor()}, {num_processors()} processors): {_why_no_gpu()}"


def require_devices(per_machine: int) -> None:
    """Raises where this machine has fewer devices than a run asks of it.

    Without a GPU they are worker processes, for each of which there must be a processor.

    Raises:
        ConfigError: with what there is.
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
    """Those that this process may use."""
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
