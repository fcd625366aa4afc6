"""A machine with GPUs that are not there, for commands run as processes of their own; see fake_cuda beside this file."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
STAND_IN = Path(__file__).resolve().parent / "fake_cuda"
_OWN = ("CUDA_VISIBLE_DEVICES", "CUDA_HOME", "CUDA_PATH", "CC", "CXX", "RAY_ADDRESS")
_OTHERS = ("VLLM_", "TRITON_")  # an engine that an earlier test started has set some


def fake_machine(*devices: dict[str, Any], driver: str = "580.65.06", **variables: str) -> dict[str, str]:
    """The environment of a process on a machine with these devices, a CUDA 13 build of torch and that driver."""
    fake = {"cuda": "13.0", "devices": devices}
    inherited = {name: value for name, value in os.environ.items() if name not in _OWN and not name.startswith(_OTHERS)}
    return inherited | {
        "CEPO_FAKE_CUDA": json.dumps(fake),
        "CEPO_FAKE_DRIVER": driver,
        "CEPO_PYTHON": sys.executable,
        "PATH": os.pathsep.join((str(STAND_IN), os.environ.get("PATH", ""))),
        "PYTHONPATH": os.pathsep.join((str(STAND_IN), str(REPOSITORY))),
        **variables,
    }


def card(name: str, capability: tuple[int, int], gigabytes: float) -> dict[str, Any]:
    """A device of that many GB (10^9 bytes), half a GB of them taken by the driver."""
    total = int(gigabytes * 1e9)
    return {"name": name, "capability": capability, "total": total, "free": total - 500_000_000}
