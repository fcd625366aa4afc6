"""Finds the compiler and headers for kernels that are built at the start of a run, as the libraries find them."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

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
