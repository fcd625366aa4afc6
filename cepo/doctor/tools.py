"""Compilers and headers, of which some are needed on every GPU and some on none of the paths that a run takes by default."""

from __future__ import annotations

import sys

from cepo.doctor.findings import Finding, Mark
from cepo.hardware.tools import BuildTools

SECTION = "machine"
_PYTHON = f"python{sys.version_info.major}.{sys.version_info.minor}"
_KERNELS = "vllm download-kernels (compiled kernels of FlashInfer), with this environment's vllm"


def tool_findings(tools: BuildTools, *, with_vllm: bool, flashinfer_first: bool) -> list[Finding]:
    """One finding for each tool.

    Triton compiles a launcher in C for each of its kernels: vLLM's model runner cannot start without, training alone goes on
    with slower paths. FlashInfer's tools matter for cards on which vLLM prefers it, and even there FLASH_ATTN stands in.

    Args:
        with_vllm: vLLM's CUDA build is installed.
        flashinfer_first: vLLM's own choice of attention on a card of this machine is FlashInfer.
    """
    needed: Mark = "fail" if with_vllm else "warn"
    use = "Triton compiles the launchers of its kernels with it"
    without = "vLLM cannot start" if with_vllm else "packed rows and the language head take slower paths"
    findings = [
        _tool("C compiler", tools.c_compiler, needed, f"{use}; without, {without}", "apt-get install -y gcc"),
        _tool(
            "Python headers", tools.python_headers, needed, f"Python.h, likewise: without, {without}",
            f"apt-get install -y {_PYTHON}-dev",
        ),
    ]  # fmt: skip
    if tools.flashinfer_kernels:
        return [*findings, _tool("FlashInfer's kernels", "flashinfer-jit-cache is installed", "ok", "", "")]
    why = "FlashInfer would compile its attention with it; without, FLASH_ATTN stands in"
    if not flashinfer_first:
        why = "not needed: no kernel of FlashInfer is used on the chosen path"
    return [
        *findings,
        _tool("ninja", tools.ninja, "info", why, "pip install ninja" if flashinfer_first else ""),
        _tool(
            "nvcc", tools.nvcc, "info", why,
            f"apt-get install -y cuda-nvcc-13-0 (NVIDIA's repository), or {_KERNELS}" if flashinfer_first else "",
        ),
    ]  # fmt: skip


def _tool(subject: str, place: str | None, missing: Mark, why: str, remedy: str) -> Finding:
    if place is not None:
        return Finding(section=SECTION, subject=subject, mark="ok", found=place)
    return Finding(section=SECTION, subject=subject, mark=missing, found=f"not found; {why}", remedy=remedy)
