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

_DEFAULT_CUDA = "/usr/local/cuda"


@dataclass(frozen=True, kw_only=True)
class BuildTools:
    """Paths of this machine's build tools; None for missing ones.

    Attributes:
        c_compiler: for Triton's launchers, which vLLM's kernels, FlexAttention and the language head's kernel use.
        cpp_compiler, ninja, nvcc: for FlashInfer, which compiles kernels that are not installed precompiled.
        python_headers: the folder with Python.h, which Triton's launchers include.
        flashinfer_kernels: whether FlashInfer's precompiled kernels (flashinfer-jit-cache) are installed.
    """

    c_compiler: str | None
    cpp_compiler: str | None
    ninja: str | None
    nvcc: str | None
    python_headers: str | None
    flashinfer_kernels: bool

    @property
    def serves_flashinfer(self) -> bool:
        """Whether FlashInfer's kernels are installed or can be compiled."""
        return self.flashinfer_kernels or None not in (self.ninja, self.nvcc, self.cpp_compiler)


def look_for_tools(environment: Mapping[str, str] | None = None) -> BuildTools:
    """Searches the PATH of `environment` (by default this process's) and the running Python's folder."""
    variables = os.environ if environment is None else environment
    path = path_with(program_folder(), variables.get("PATH", ""))

    def program(*names: str) -> str | None:
        return next((found for name in names if (found := shutil.which(name, path=path))), None)

    headers = Path(sysconfig.get_path("include"))
    home = variables.get("CUDA_HOME") or variables.get("CUDA_PATH")
    # FlashInfer searches these three places, but not pip's packages in site-packages/nvidia.
    nvcc = None if home else program("nvcc")
    return BuildTools(
        c_compiler=program(variables["CC"]) if variables.get("CC") else program("gcc", "clang"),
        cpp_compiler=program(variables.get("CXX") or "c++"),
        ninja=program("ninja"),
        nvcc=nvcc or shutil.which(str(Path(home or _DEFAULT_CUDA) / "bin" / "nvcc")),
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
