"""Finds the compilers and headers for kernels that are built at the start of a run, as the libraries find them."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

Capability = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class BuildTools:
    """What this machine has for kernels that are compiled at the start of a run; None for missing paths.

    Attributes:
        c_compiler: for Triton's launchers, which vLLM's kernels, FlexAttention and the language head's kernel use.
        python_headers: the folder with Python.h, which Triton's launchers include.
        flashinfer_kernels: whether FlashInfer's precompiled kernels (flashinfer-jit-cache) are installed.
    """

    c_compiler: str | None
    python_headers: str | None
    flashinfer_kernels: bool


def look_for_tools(environment: Mapping[str, str] | None = None) -> BuildTools:
    """Searches the PATH of `environment` (by default this process's) and the running Python's folder."""
    variables = os.environ if environment is None else environment
    path = path_with(program_folder(), variables.get("PATH", ""))

    def program(*names: str) -> str | None:
        return next((found for name in names if (found := shutil.which(name, path=path))), None)

    headers = Path(sysconfig.get_path("include"))
    return BuildTools(
        c_compiler=program(variables["CC"]) if variables.get("CC") else program("gcc", "clang"),
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
