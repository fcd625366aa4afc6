"""Checks this machine (processors, memory, GPUs, compilers), and whether it has what a run needs: engine, memory, disk."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import psutil
import torch

from cepo.config import RunConfig
from cepo.doctor.versions import Finding
from cepo.errors import CepoError
from cepo.hardware import (
    Capability,
    c_compiler,
    driver_version,
    gpu_fault,
    has_flashinfer_kernels,
    num_processors,
    python_headers,
    torchvision_fault,
)
from cepo.models.families import Family, family_of
from cepo.models.pretrained import read_config
from cepo.rollout.engine_options import EngineMachine, engine_environment, engine_options
from cepo.rollout.factory import choose_generator, settings_of_run
from cepo.sizing import WHAT_HELPS, Memory, estimate_memory, fit, gib
from cepo.tracking.environment import installed_version

_SMALLEST_CAPABILITY = (8, 0)
"""The lowest compute capability whose tensor cores support bf16."""
_CONTAINER = Path("/sys/fs/cgroup")
_SHARED_MEMORY = Path("/dev/shm")
_SHARED_PER_DEVICE = 2 * 2**30
_LESS_ACTIVATIONS = (
    "if it runs out: lower worker.actor.micro_batch_size_per_device_for_update or data.max_response_length, or set "
    "worker.actor.model.enable_gradient_checkpointing=true"
)


class Gpu(NamedTuple):
    """A GPU as torch reports it; sizes in bytes."""

    name: str
    capability: Capability
    total: int
    free: int


def usable_gpus() -> list[Gpu]:
    gpus: list[Gpu] = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        free, total = torch.cuda.mem_get_info(index)
        gpus.append(Gpu(torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index), total, free))
    return gpus


def usable_memory() -> tuple[int, int]:
    """Returns (total, free) bytes; a container's limit applies if it is below the machine's memory."""
    memory, limit = psutil.virtual_memory(), _CONTAINER / "memory.max"
    allowed = limit.read_text("ascii").strip() if limit.is_file() else "max"
    if not allowed.isdecimal() or int(allowed) >= memory.total:
        return memory.total, memory.available
    used = int((_CONTAINER / "memory.current").read_text("ascii"))
    return int(allowed), min(memory.available, int(allowed) - used)


def machine_findings(gpus: Sequence[Gpu]) -> list[Finding]:
    """Reports processors, memory, shared memory, torch's build, each GPU and, with GPUs, the compilers."""
    total, free = usable_memory()
    findings = [
        Finding("processors", "ok", f"{num_processors()} usable"),
        Finding("memory", "ok", f"{gib(free)} free of {gib(total)}"),
    ]
    if _SHARED_MEMORY.is_dir():
        shared = shutil.disk_usage(_SHARED_MEMORY).free
        is_short = shared < _SHARED_PER_DEVICE * max(1, len(gpus))
        remedy = "in a container: --shm-size=16g or --ipc=host" if is_short else ""
        findings.append(Finding(str(_SHARED_MEMORY), "warn" if is_short else "ok", f"{gib(shared)} free", remedy))
    faults = {"torch's build": gpu_fault(), "torchvision": torchvision_fault()}
    failed = [Finding(subject, "fail", *fault) for subject, fault in faults.items() if fault is not None]
    findings += failed or [_torch_build(has_gpus=bool(gpus))]
    findings += [gpu_finding(index, gpu, torch.cuda.get_arch_list()) for index, gpu in enumerate(gpus)]
    if gpus:
        findings += tool_findings(with_vllm=installed_version("vllm") is not None)
    return findings


def _torch_build(*, has_gpus: bool) -> Finding:
    subject, cuda, driver = "torch's build", torch.version.cuda, driver_version()
    found = "for CPUs" if cuda is None else f"CUDA {cuda}, compiled for {', '.join(torch.cuda.get_arch_list())}"
    if cuda is None and driver is not None:
        remedy = "install the extra for GPUs into a fresh environment: pip install 'cepo[gpu]'"
        return Finding(subject, "warn", f"{found}, which cannot use the NVIDIA GPU of driver {driver}", remedy)
    found += "" if driver is None else f", driver {driver}"
    if cuda is None or has_gpus:
        return Finding(subject, "ok", found)
    return Finding(subject, "info", f"{found}; no NVIDIA GPU is visible, so runs use the processors")


def gpu_finding(index: int, gpu: Gpu, compiled: Sequence[str]) -> Finding:
    """Reports the GPU, and whether torch has code for it and it has bf16."""
    capability = f"{gpu.capability[0]}.{gpu.capability[1]}"
    found = f"{gpu.name}, compute capability {capability}, {gib(gpu.free)} free of {gib(gpu.total)}"
    if not wheel_serves(gpu.capability, compiled):
        found += f"; torch's build has no code for it, only for {', '.join(compiled)}"
        remedy = "install torch 2.13.0 built for CUDA 13: pip install 'cepo[gpu]' into a fresh environment"
        return Finding(f"GPU {index}", "fail", found, remedy)
    if gpu.capability < _SMALLEST_CAPABILITY:
        remedy = "bf16 training needs compute capability 8.0 or later; see docs/gpus.md"
        return Finding(f"GPU {index}", "warn", found, remedy)
    return Finding(f"GPU {index}", "ok", found)


def wheel_serves(capability: Capability, compiled: Sequence[str]) -> bool:
    """Returns whether a torch build with the architectures `compiled` (`torch.cuda.get_arch_list()`) runs on the GPU.

    `sm_XY` is machine code: it runs on major version X from minor version Y on, or with a letter suffix on XY only.
    `compute_XY` is PTX, which the driver translates for every later card.
    """
    for kind, major, minor, letter in re.findall(r"(sm|compute)_(\d+)(\d)([a-z]?)", " ".join(compiled)):
        built = (int(major), int(minor))
        later = built <= capability if kind == "compute" else built[0] == capability[0] and built <= capability
        if built == capability or (later and not letter):
            return True
    return False


def tool_findings(*, with_vllm: bool) -> list[Finding]:
    """Reports the tools with which Triton compiles the C launchers of its kernels.

    Without them vLLM's model runner cannot start, and training uses slower paths.
    """
    without = "vLLM cannot start" if with_vllm else "packed rows and the language head take slower paths"
    python = f"python{sys.version_info.major}.{sys.version_info.minor}"
    wanted = (("C compiler", c_compiler(), "gcc"), ("Python headers", python_headers(), f"{python}-dev"))
    why = f"not found; Triton compiles the launchers of its kernels with it; without it {without}"
    return [
        Finding(subject, "fail" if with_vllm else "warn", why, f"apt-get install -y {package}")
        if path is None
        else Finding(subject, "ok", path)
        for subject, path, package in wanted
    ]


def run_findings(config: RunConfig, gpus: Sequence[Gpu]) -> dict[str, list[Finding]]:
    """Returns the findings on a checked configuration, by their heading."""
    model, heading = config.worker.actor.model, "this config's devices"
    try:
        found = read_config(model.model_path, trust_remote_code=model.trust_remote_code)
        family = family_of(found, trust_remote_code=model.trust_remote_code)
        generator = chosen_generator(config, family, "cuda" if gpus else "cpu")
        memory = estimate_memory(config, with_vllm=generator == "vllm")
    except CepoError as error:
        remedy = "name a checkpoint of a supported family, and a generator that is installed"
        return {heading: [Finding("model", "fail", str(error), remedy)]}
    path = "rows that share tokens are packed" if family.packs else f"rows are padded: {family.why_padded}"
    findings = {
        heading: [
            _devices_finding(config.trainer.n_gpus_per_node, len(gpus)),
            Finding("model", "ok", f"{family.title}; {path}"),
            Finding("generator", "ok", generator),
        ]
    }
    if generator == "vllm" and gpus:
        findings["this config's engine"] = engine_findings(config, gpus[0].capability)
    findings["this config's memory"] = memory_findings(memory, config, gpus)
    findings["disk"] = [disk_finding(memory, config.trainer.run_folder)]
    return findings


def chosen_generator(config: RunConfig, family: Family, device: str) -> str:
    """Returns the generator that a run would choose; raises `ConfigError` if the configured one cannot run here."""
    visuals = (int(family.reads_images), 0)
    settings = settings_of_run(config.data, config.worker, num_devices=config.trainer.num_devices, most_visuals=visuals)
    return choose_generator(settings, family, device)


def _devices_finding(wanted: int, usable: int) -> Finding:
    if not usable:
        return Finding("device", "info", "the processors: torch sees no GPU")
    is_short = wanted > usable
    remedy = f"set trainer.n_gpus_per_node to at most {usable}, or check CUDA_VISIBLE_DEVICES" if is_short else ""
    return Finding("device", "fail" if is_short else "ok", f"{wanted} of {usable} GPUs", remedy)


def engine_findings(config: RunConfig, capability: Capability) -> list[Finding]:
    """Reports vLLM's options and environment as a run would start it on the first GPU."""
    num_devices = config.trainer.num_devices
    settings = settings_of_run(config.data, config.worker, num_devices=num_devices, most_visuals=(1, 0))
    start = EngineMachine(capability=capability, flashinfer_kernels=has_flashinfer_kernels(), num_ranks=num_devices)
    try:
        options = json.dumps(engine_options(settings, start), sort_keys=True)
    except CepoError as error:
        remedy = "change the setting that the message names, or set worker.rollout.name=transformers"
        return [Finding("options", "fail", str(error), remedy)]
    defaults = sorted(engine_environment(settings, start).items())
    environment = " ".join(f"{name}={os.environ.get(name, value)}" for name, value in defaults)
    return [Finding("options", "info", options), Finding("environment", "info", environment)]


def memory_findings(memory: Memory, config: RunConfig, gpus: Sequence[Gpu]) -> list[Finding]:
    """Reports the estimate, and whether it fits on each GPU or, without one, in this machine's memory."""
    parts = (
        f"{memory.parameters:,} parameters; weights {gib(memory.weights)}, optimizer {gib(memory.optimizer)}, generator "
        f"{gib(memory.engine)} with one request, largest pass at most {gib(memory.largest_pass)}"
    )
    findings = [Finding("needed", "info", parts)]
    for index, gpu in enumerate(gpus):
        found, subject = fit(memory, config.worker.rollout, free=gpu.free, total=gpu.total), f"fits GPU {index}"
        if found.refused is not None:
            reason, _, remedy = found.refused.rpartition("; ")
            findings.append(Finding(subject, "fail", reason, remedy))
        elif found.short > 0:
            findings.append(Finding(subject, "warn", f"up to {gib(found.short)} short", _LESS_ACTIVATIONS))
        else:
            findings.append(Finding(subject, "ok", f"{gib(gpu.free)} are free"))
    return findings if gpus else [*findings, memory_finding(memory, config.trainer.n_gpus_per_node)]


def memory_finding(memory: Memory, workers: int) -> Finding:
    """Compares what the workers of a machine without a GPU need with its free memory."""
    _, free = usable_memory()
    held = memory.weights + memory.optimizer + memory.engine
    least, most = workers * (held + memory.least_pass), workers * (held + memory.largest_pass)
    found = f"{gib(least)} needed, at most {gib(most)} with activations; {gib(free)} are free"
    if least > free:
        return Finding("fits", "fail", found, WHAT_HELPS)
    return Finding("fits", "warn", found, _LESS_ACTIVATIONS) if most > free else Finding("fits", "ok", found)


def disk_finding(memory: Memory, folder: Path) -> Finding:
    whole = folder.absolute()
    free = shutil.disk_usage(next(parent for parent in (whole, *whole.parents) if parent.exists())).free
    found = f"{gib(free)} free for {folder}, which takes {gib(memory.checkpoint)}"
    if memory.checkpoint > free:
        return Finding("checkpoints", "fail", found, "set trainer.save_checkpoint_path to a larger disk")
    return Finding("checkpoints", "ok", found)
