"""Checks this machine (processors, memory, GPUs, compilers), and whether it has what a run needs: engine, memory, disk."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil
import torch

from cepo.config import RunConfig
from cepo.errors import CepoError
from cepo.hardware import Capability, CheckResult, num_processors, torch_build, torchvision_fault, with_own_programs
from cepo.models.families import family_of
from cepo.models.pretrained import read_config
from cepo.rollout.factory import choose_generator, settings_of_run
from cepo.run_folder.environment import installed_version
from cepo.runtime.preflight import check_devices
from cepo.workers.memory import LESS_ACTIVATIONS, MEASURED, WHAT_HELPS, Memory, engine_sleeps, estimate_memory, fit, gib
from cepo.workers.pass_sizes import with_numbers

_CONTAINER = Path("/sys/fs/cgroup")
_SHARED_MEMORY = Path("/dev/shm")
_SHARED_PER_DEVICE = 2 * 2**30


class Gpu(NamedTuple):
    """A GPU as torch reports it; sizes in bytes."""

    name: str
    capability: Capability
    free: int
    total: int


def usable_gpus() -> list[Gpu]:
    if not torch.cuda.is_available():
        return []
    gpus: list[Gpu] = []
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        gpus.append(
            Gpu(
                name=torch.cuda.get_device_name(index),
                capability=torch.cuda.get_device_capability(index),
                free=free,
                total=total,
            )
        )
    return gpus


def usable_memory() -> tuple[int, int]:
    """Returns (total, free) bytes; a container's limit applies if it is below the machine's memory."""
    memory = psutil.virtual_memory()
    limit_file = _CONTAINER / "memory.max"
    limit = limit_file.read_text("ascii").strip() if limit_file.is_file() else "max"
    if not limit.isdecimal() or int(limit) >= memory.total:
        return memory.total, memory.available
    used = int((_CONTAINER / "memory.current").read_text("ascii"))
    return int(limit), min(memory.available, int(limit) - used)


def machine_findings(gpus: Sequence[Gpu]) -> list[CheckResult]:
    """Reports processors, memory, shared memory, torch's build, each GPU and, with GPUs, the compilers."""
    total, free = usable_memory()
    findings = [
        CheckResult("processors", "ok", f"{num_processors()} usable"),
        CheckResult("memory", "ok", f"{gib(free)} free of {gib(total)}"),
    ]
    if _SHARED_MEMORY.is_dir():
        shared = shutil.disk_usage(_SHARED_MEMORY).free
        is_short = shared < _SHARED_PER_DEVICE * max(1, len(gpus))
        remedy = "in a container: --shm-size=16g or --ipc=host" if is_short else ""
        findings.append(CheckResult(str(_SHARED_MEMORY), "warn" if is_short else "ok", f"{gib(shared)} free", remedy))
    findings += [finding for finding in (torch_build(), torchvision_fault()) if finding is not None]
    findings += [gpu_finding(index, gpu) for index, gpu in enumerate(gpus)]
    if gpus:
        findings += tool_findings(with_vllm=installed_version("vllm") is not None)
    return findings


def gpu_finding(index: int, gpu: Gpu) -> CheckResult:
    """Reports the GPU, and whether it has bf16. Torch itself warns of one that its build has no code for."""
    subject = f"GPU {index}"
    major, minor = gpu.capability
    description = f"{gpu.name}, compute capability {major}.{minor}, {gib(gpu.free)} free of {gib(gpu.total)}"
    if gpu.capability < (8, 0):
        remedy = (
            "bf16 needs compute capability 8.0 or later: set worker.actor.fsdp.mp_param_dtype=fp32 worker.rollout.dtype=fp16 "
            "(fp16 in training would lose small gradients, because the loss is not scaled)"
        )
        return CheckResult(subject, "warn", description, remedy)
    return CheckResult(subject, "ok", description)


def tool_findings(*, with_vllm: bool) -> list[CheckResult]:
    """Reports the tools with which Triton compiles the C launchers of its kernels."""
    headers = Path(sysconfig.get_path("include"), "Python.h")
    headers_package = f"python3.{sys.version_info.minor}-dev"
    place_of_headers = str(headers) if headers.is_file() else None
    return [
        _tool_finding("C compiler", c_compiler(), "gcc", with_vllm=with_vllm),
        _tool_finding("Python headers", place_of_headers, headers_package, with_vllm=with_vllm),
    ]


def _tool_finding(subject: str, place: str | None, package: str, *, with_vllm: bool) -> CheckResult:
    if place is not None:
        return CheckResult(subject, "ok", place)
    mark = "warn"
    consequence = "packed rows and the language head take slower paths"
    if with_vllm:
        mark = "fail"
        consequence = "vLLM cannot start"
    fault = f"not found; Triton compiles the launchers of its kernels with it; without it {consequence}"
    return CheckResult(subject, mark, fault, f"apt-get install -y {package}")


def c_compiler(environment: Mapping[str, str] = os.environ) -> str | None:
    """Returns the compiler of Triton's launchers, from the PATH of `environment` or the running Python's folder."""
    path = with_own_programs(environment.get("PATH", ""))
    compilers = [environment["CC"]] if environment.get("CC") else ["gcc", "clang"]
    for name in compilers:
        compiler = shutil.which(name, path=path)
        if compiler is not None:
            return compiler
    return None


def run_findings(config: RunConfig, gpus: Sequence[Gpu]) -> dict[str, list[CheckResult]]:
    """Returns the findings on a checked configuration, by their heading: what `cepo train` would refuse is one failure."""
    model = config.worker.actor.model
    trainer = config.trainer
    heading = "this config's devices"
    try:
        devices = check_devices(trainer)
        family = family_of(read_config(model.model_path, trust_remote_code=model.trust_remote_code))
        visuals = (int(family.reads_images), 0)
        settings = settings_of_run(config.data, config.worker, num_devices=trainer.num_devices, most_visuals=visuals)
        generator = choose_generator(settings, family, "cuda" if gpus else "cpu")
        memory = estimate_memory(with_numbers(config), with_vllm=generator == "vllm" and bool(gpus))
    except CepoError as error:
        return {heading: [CheckResult("run", "fail", str(error), "change what the message names")]}
    path = "rows that share tokens are packed" if family.packs else f"rows are padded: {family.why_padded}"
    return {
        heading: [
            CheckResult("device", "ok", devices),
            CheckResult("model", "ok", f"{family.title}; {path}"),
            CheckResult("generator", "ok", generator),
        ],
        "this config's memory": memory_findings(memory, config, gpus),
        "disk": [disk_finding(memory, trainer.run_folder)],
    }


def memory_findings(memory: Memory, config: RunConfig, gpus: Sequence[Gpu]) -> list[CheckResult]:
    """Reports the estimate, and whether it fits on each GPU or, without one, in each worker's part of the memory."""
    parts = (
        f"{memory.parameters:,} parameters; weights {gib(memory.weights)}, optimizer {gib(memory.optimizer)}, generator "
        f"{gib(memory.engine)}, largest pass at most {gib(memory.largest_pass)} ({MEASURED})"
    )
    findings = [CheckResult("needed", "info", parts)]
    places = {f"fits GPU {index}": (gpu.free, gpu.total) for index, gpu in enumerate(gpus)}
    if not gpus:
        total, free = usable_memory()
        workers = config.trainer.n_gpus_per_node
        places = {"fits each worker": (free // workers, total // workers)}
    for subject, (free, total) in places.items():
        rollout = config.worker.rollout
        refused, short = fit(memory, rollout, free=free, total=total)
        if refused is not None:
            findings.append(CheckResult(subject, "fail", refused, WHAT_HELPS))
        elif short > 0:
            findings.append(CheckResult(subject, "warn", f"up to {gib(short)} short", LESS_ACTIVATIONS))
        else:
            findings.append(CheckResult(subject, "ok", f"{gib(free)} are free"))
        if memory.with_vllm and refused is None:
            sleeps = engine_sleeps(memory, rollout, free=free, total=total)
            habit = "frees its memory during scoring and updates" if sleeps else "keeps its memory beside the trainer's"
            findings.append(CheckResult("vLLM", "info", f"{habit} (worker.rollout.sleep={rollout.sleep})"))
    return findings


def disk_finding(memory: Memory, folder: Path) -> CheckResult:
    existing = folder.absolute()
    while not existing.exists():
        existing = existing.parent
    free = shutil.disk_usage(existing).free
    description = f"{gib(free)} free for {folder}, which takes {gib(memory.checkpoint)}"
    if memory.checkpoint > free:
        return CheckResult("checkpoints", "fail", description, "set trainer.save_checkpoint_path to a larger disk")
    return CheckResult("checkpoints", "ok", description)
