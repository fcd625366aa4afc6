"""Checks whether the machine has what a configuration needs: devices, an engine, memory and disk."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from huggingface_hub import constants

from cepo.config import RunConfig, find_path
from cepo.doctor.machine import Machine
from cepo.doctor.versions import Finding
from cepo.errors import CepoError
from cepo.models.families import Family, family_of
from cepo.models.pretrained import read_config
from cepo.rollout.engine_options import EngineMachine, engine_environment, engine_options
from cepo.rollout.factory import choose_generator, settings_of_run
from cepo.sizing import WHAT_HELPS, Memory, estimate_memory, fit, gib

_LESS_ACTIVATIONS = (
    "if it runs out: lower worker.actor.micro_batch_size_per_device_for_update or data.max_response_length, or set "
    "worker.actor.model.enable_gradient_checkpointing=true"
)


def run_findings(config: RunConfig, machine: Machine) -> dict[str, list[Finding]]:
    """Returns the findings on a checked configuration, by their heading."""
    model, heading = config.worker.actor.model, "this config's devices"
    try:
        found = read_config(model.model_path, trust_remote_code=model.trust_remote_code)
        family = family_of(found, trust_remote_code=model.trust_remote_code)
        generator = chosen_generator(config, family, machine)
        memory = estimate_memory(config, with_vllm=generator == "vllm")
    except CepoError as error:
        remedy = "name a checkpoint of a supported family, and a generator that is installed"
        return {heading: [Finding("model", "fail", str(error), remedy)]}
    path = "rows that share tokens are packed" if family.packs else f"rows are padded: {family.why_padded}"
    findings = {
        heading: [
            _devices_finding(config, machine),
            Finding("model", "ok", f"{family.title}; {path}"),
            Finding("generator", "ok", generator),
        ]
    }
    if generator == "vllm" and machine.gpus:
        findings["this config's engine"] = engine_findings(config, machine)
    findings["this config's memory"] = memory_findings(memory, config, machine)
    findings["disk"] = disk_findings(memory, config)
    return findings


def chosen_generator(config: RunConfig, family: Family, machine: Machine) -> str:
    """Returns the generator that a run would choose; raises `ConfigError` if the configured one cannot run here."""
    device = "cuda" if machine.gpus else "cpu"
    settings = settings_of_run(
        config.data, config.worker, num_devices=config.trainer.num_devices, most_visuals=(int(family.reads_images), 0)
    )
    return choose_generator(settings, family, device)


def _devices_finding(config: RunConfig, machine: Machine) -> Finding:
    wanted, usable = config.trainer.n_gpus_per_node, len(machine.gpus)
    if not usable:
        return Finding("device", "info", "the processors: torch sees no GPU")
    if wanted <= usable:
        return Finding("device", "ok", f"{wanted} of {usable} GPUs")
    remedy = f"set trainer.n_gpus_per_node to at most {usable}, or check CUDA_VISIBLE_DEVICES"
    return Finding("device", "fail", f"{wanted} of {usable} GPUs", remedy)


def engine_findings(config: RunConfig, machine: Machine) -> list[Finding]:
    """Reports vLLM's options and environment as a run would start it on the first GPU."""
    settings = settings_of_run(config.data, config.worker, num_devices=config.trainer.num_devices, most_visuals=(1, 0))
    start = EngineMachine(
        capability=machine.gpus[0].capability,
        flashinfer_kernels=machine.tools.flashinfer_kernels,
        num_ranks=config.trainer.num_devices,
    )
    try:
        options = json.dumps(engine_options(settings, start), sort_keys=True)
    except CepoError as error:
        remedy = "change the setting that the message names, or set worker.rollout.name=transformers"
        return [Finding("options", "fail", str(error), remedy)]
    defaults = sorted(engine_environment(settings, start).items())
    environment = " ".join(f"{name}={os.environ.get(name, value)}" for name, value in defaults)
    return [Finding("options", "info", options), Finding("environment", "info", environment)]


def memory_findings(memory: Memory, config: RunConfig, machine: Machine) -> list[Finding]:
    """Reports the estimate, and whether it fits on each GPU or, without one, in this machine's memory."""
    parts = (
        f"{memory.parameters:,} parameters; weights {gib(memory.weights)}, optimizer {gib(memory.optimizer)}, generator "
        f"{gib(memory.engine)} with one request, largest pass at most {gib(memory.largest_pass)}"
    )
    findings = [Finding("needed", "info", parts)]
    for index, gpu in enumerate(machine.gpus):
        found, subject = fit(memory, config.worker.rollout, free=gpu.free, total=gpu.total), f"fits GPU {index}"
        if found.refused is not None:
            reason, _, remedy = found.refused.rpartition("; ")
            findings.append(Finding(subject, "fail", reason, remedy))
        elif found.short > 0:
            findings.append(Finding(subject, "warn", f"up to {gib(found.short)} short", _LESS_ACTIVATIONS))
        else:
            findings.append(Finding(subject, "ok", f"{gib(gpu.free)} are free"))
    if not machine.gpus:
        findings.append(memory_finding(memory, config.trainer.n_gpus_per_node, machine.memory_free))
    return findings


def memory_finding(memory: Memory, workers: int, free: int) -> Finding:
    """Compares what the workers need with the machine's free memory."""
    held = memory.weights + memory.optimizer + memory.engine
    least, most = workers * (held + memory.least_pass), workers * (held + memory.largest_pass)
    found = f"{gib(least)} needed, at most {gib(most)} with activations; {gib(free)} are free"
    if least > free:
        return Finding("fits", "fail", found, WHAT_HELPS)
    return Finding("fits", "warn", found, _LESS_ACTIVATIONS) if most > free else Finding("fits", "ok", found)


def disk_findings(memory: Memory, config: RunConfig) -> list[Finding]:
    """Checks that the disks hold a checkpoint, and weights that the hub's cache does not have yet."""
    cache, path = Path(constants.HF_HUB_CACHE), config.worker.actor.model.model_path
    wanted = [("checkpoints", config.trainer.run_folder, memory.checkpoint, "set trainer.save_checkpoint_path")]
    cached = cache / f"models--{path.replace('/', '--')}" / "snapshots"
    if find_path(path) is None and not any(cached.rglob("*.safetensors")):
        wanted.append(("weights", cache, 2 * memory.parameters, "set HF_HOME"))
    findings: list[Finding] = []
    for subject, folder, needed, remedy in wanted:
        free = _free_bytes(folder)
        found = f"{gib(free)} free for {folder}, which takes {gib(needed)}"
        failed = Finding(subject, "fail", found, f"{remedy} to a larger disk")
        findings.append(failed if needed > free else Finding(subject, "ok", found))
    return findings


def _free_bytes(folder: Path) -> int:
    """Returns the free bytes of the disk on which the folder is or would be."""
    whole = folder.absolute()
    return shutil.disk_usage(next(parent for parent in (whole, *whole.parents) if parent.exists())).free
