"""Whether a GPU that is there can be used, and in words why it cannot."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from cepo.errors import ConfigError

_SMALLEST_DRIVER = {11: 450, 12: 525, 13: 580}
"""NVIDIA's minimum driver for each major version of CUDA."""

_HIDDEN = ("", "-1")
"""Values of CUDA_VISIBLE_DEVICES that show no GPU to a process."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What is wrong, and what to do about it."""

    found: str
    remedy: str


def driver_version() -> str | None:
    """The NVIDIA driver's version; None where no driver answers."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = done.stdout.split()
    return lines[0] if done.returncode == 0 and lines and lines[0][0].isdigit() else None


def smallest_driver(cuda: str) -> int | None:
    """The least major version of the driver for a torch built for that CUDA; None where no rule is known."""
    return _SMALLEST_DRIVER.get(int(cuda.split(".")[0]))


def driver_problem(driver: str, cuda: str) -> Problem | None:
    """A driver that is too old for a torch built for that CUDA; None where it is new enough, or no rule is known."""
    smallest = smallest_driver(cuda)
    if smallest is None or int(driver.split(".")[0]) >= smallest:
        return None
    return Problem(
        found=f"driver {driver}, but torch's CUDA {cuda} wants at least {smallest}",
        remedy=f"install driver {smallest} or later, or a torch for the CUDA that `nvidia-smi` names",
    )


def unseen_gpu_problem(driver: str | None, cuda: str) -> Problem:
    """Why a torch built for that CUDA sees no GPU."""
    old = None if driver is None else driver_problem(driver, cuda)
    if old is not None:
        return old
    seen = "no NVIDIA driver answers" if driver is None else f"driver {driver} answers"
    return Problem(
        found=f"torch is built for CUDA {cuda} and sees no GPU ({seen})",
        remedy="check nvidia-smi, CUDA_VISIBLE_DEVICES and, in a container, --gpus all; without a GPU: pip install 'cepo[cpu]'",
    )


def gpus_are_hidden(environment: Mapping[str, str] | None = None) -> bool:
    """Whether CUDA_VISIBLE_DEVICES is set and shows no GPU: the processors are wanted then."""
    return (os.environ if environment is None else environment).get("CUDA_VISIBLE_DEVICES") in _HIDDEN


def require_wanted_device() -> None:
    """Raises where torch is a CUDA build that sees no GPU, unless `CUDA_VISIBLE_DEVICES=` asks for the processors.

    A run would else go on without a word on the processors, hundreds of times slower.

    Raises:
        ConfigError: with what `cepo doctor` says about it.
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
