"""The cards that are stood for, the environment of a process that is to see one of them, and how it reports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from lab.support.machine import ROOT

SOURCES = Path(__file__).parent / "hollow"


@dataclass(frozen=True, kw_only=True)
class Card:
    """A GPU as its driver describes it.

    Attributes:
        memory: bytes of device memory.
        shared: bytes of shared memory that a block may have by opt-in.
    """

    name: str
    capability: tuple[int, int]
    memory: int
    shared: int
    processors: int

    def described(self, count: int) -> str:
        """Returns the value of CEPO_DRY_CARD for `count` such devices."""
        parts = (self.name, *self.capability, self.memory, self.shared, self.processors, count)
        return "|".join(map(str, parts))


CARDS = {
    "H100": Card(
        name="NVIDIA H100 80GB HBM3", capability=(9, 0), memory=85_029_158_912, shared=232_448, processors=132
    ),
    "B200": Card(name="NVIDIA B200", capability=(10, 0), memory=191_514_017_792, shared=232_448, processors=148),
    "RTX PRO 6000": Card(
        name="NVIDIA RTX PRO 6000 Blackwell Server Edition",
        capability=(12, 0),
        memory=101_973_622_784,
        shared=101_376,
        processors=188,
    ),
    "RTX 4090": Card(
        name="NVIDIA GeForce RTX 4090", capability=(8, 9), memory=25_393_692_672, shared=101_376, processors=128
    ),
}


def headers() -> Path:
    """Returns the folder with CUDA's headers that Triton contains.

    Raises:
        FileNotFoundError: Triton is not installed.
    """
    found = find_spec("triton")
    if found is None or found.origin is None:
        raise FileNotFoundError("Triton, which contains CUDA's headers, is not installed")
    return Path(found.origin).parent / "backends" / "nvidia" / "include"


def libraries_of_cute(library: Path) -> dict[str, str]:
    """Returns the variable that puts the hollow GPU before the runtime of CuTe (`hollow/cute.c`); none without CuTe."""
    package = find_spec("nvidia_cutlass_dsl")
    if package is None or package.submodule_search_locations is None:
        return {}
    (folder,) = package.submodule_search_locations
    runtime = Path(folder) / "cu13" / "lib" / "libcute_dsl_runtime.so"
    return {"CUTE_DSL_LIBS": os.pathsep.join([str(library), str(runtime)])}


def build_library(folder: Path) -> Path:
    """Compiles the hollow GPU into `folder`, under the names of the driver's two libraries, and returns its path."""
    library = folder / "libcuda.so.1"
    options = ["-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-pthread", "-I", str(headers())]
    sources = sorted(str(file) for file in SOURCES.glob("*.c"))
    subprocess.run(["gcc", *options, *sources, "-o", str(library)], check=True)
    (folder / "libnvidia-ml.so.1").symlink_to(library.name)
    return library


def environment(library: Path, card: Card, count: int, cache: Path) -> dict[str, str]:
    """Returns the environment of a process that sees `count` cards, with empty caches for compiled kernels."""
    folder = str(library.parent)
    found = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    return (
        found
        | libraries_of_cute(library)
        | {
            # Without nvcc, whatever this machine has, as on most rented ones.
            "CUDA_HOME": str(cache / "no-cuda"),
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), "/usr/bin", "/bin"]),
            "CEPO_DRY_CARD": card.described(count),
            "LD_LIBRARY_PATH": folder,
            "LD_PRELOAD": str(library),
            "TRITON_LIBCUDA_PATH": folder,
            "TRITON_CACHE_DIR": str(cache / "triton"),
            "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
            "VLLM_CACHE_ROOT": str(cache / "vllm"),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            # The tests' tiny checkpoints are used too.
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
        }
    )


MARK = "gpu_dry: "


def report(*, ok: bool, found: str) -> None:
    """Prints the outcome of this process's check."""
    print(MARK + json.dumps({"ok": ok, "found": found}), flush=True)


def reported(output: str) -> dict[str, object] | None:
    """Returns the outcome that a process printed; None if it printed none."""
    lines = [line.removeprefix(MARK) for line in output.splitlines() if line.startswith(MARK)]
    return json.loads(lines[-1]) if lines else None
