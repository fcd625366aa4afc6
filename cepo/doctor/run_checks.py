"""Checks whether a configuration can start here, mostly by calling what the run itself checks at its start."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from huggingface_hub import constants

from cepo.config import RunConfig, find_path, run_folder
from cepo.config.decisive import run_identity
from cepo.config.derived import num_devices
from cepo.data.dataset import ProblemSet
from cepo.data.reading import first_rows
from cepo.doctor.findings import DEVICES, Finding
from cepo.doctor.machine import Gpu, Machine
from cepo.errors import CepoError, ConfigError
from cepo.models.families import Family, family_of
from cepo.models.pretrained import read_config
from cepo.models.processing import load_processing
from cepo.preflight import check_before_imports
from cepo.rewards.combined import load_reward
from cepo.rollout.engine_options import EngineMachine, engine_environment, engine_options
from cepo.rollout.factory import choose_generator, settings_of_run, why_not_served
from cepo.sizing import WHAT_HELPS, Memory, estimate_memory, fit, gib
from cepo.tracking.sink import check_sinks
from cepo.trainer.run_policy import RunPolicy

ENGINE, MEMORY, START, DATA, DISK = "this config's engine", "this config's memory", "start", "data", "disk"
CHECKS = ("machine", "engine", "memory", "start", "data", "disk")
"""The checks that a user can select; only the first needs no configuration."""
FIRST_ROWS = 8
_LESS_ACTIVATIONS = (
    "if it runs out: lower worker.actor.micro_batch_size_per_device_for_update or data.max_response_length, or set "
    "worker.actor.model.enable_gradient_checkpointing=true"
)


def run_findings(config: RunConfig, machine: Machine, checks: Collection[str] = CHECKS) -> list[Finding]:
    """Runs `checks` on a checked configuration whose embedded parts have been built."""
    findings = start_findings(config) if "start" in checks else []
    if {"engine", "memory", "disk"} & set(checks):
        try:
            family = family_of_run(config)
            generator = chosen_generator(config, family, machine)
            memory = estimate_memory(config, with_vllm=generator == "vllm")
        except CepoError as error:
            remedy = (
                "name a checkpoint of a supported family, in a folder or on a hub that can be reached, and a generator"
            )
            return [*findings, Finding(DEVICES, "model", "fail", str(error), remedy=f"{remedy} that is installed")]
        findings += [devices_finding(config, machine), _family_finding(family), _ok(DEVICES, "generator", generator)]
        if "engine" in checks and generator == "vllm" and machine.gpus:
            findings += engine_findings(config, machine)
        findings += memory_findings(memory, config, machine) if "memory" in checks else []
        findings += disk_findings(memory, config) if "disk" in checks else []
    return findings + (data_findings(config) if "data" in checks else [])


def _ok(section: str, subject: str, found: str) -> Finding:
    return Finding(section, subject, "ok", found)


def family_of_run(config: RunConfig) -> Family:
    """Returns the family of the run's model, reading only its configuration file.

    Raises:
        ConfigError: no configuration can be read, or the architecture is not supported.
    """
    model = config.worker.actor.model
    found = read_config(model.model_path, trust_remote_code=model.trust_remote_code)
    return family_of(found, trust_remote_code=model.trust_remote_code)


def _family_finding(family: Family) -> Finding:
    path = "rows that share tokens are packed" if family.packs else f"rows are padded: {family.why_padded}"
    return _ok(DEVICES, "model", f"{family.title}; {path}")


def chosen_generator(config: RunConfig, family: Family, machine: Machine) -> str:
    """Returns the generator that a run would choose; raises `ConfigError` if the configured one cannot run here."""
    device = "cuda" if machine.gpus else "cpu"
    settings = settings_of_run(config, most_visuals=(int(family.reads_images), 0))
    return choose_generator(settings.name, device=device, unserved=why_not_served(settings, family, device))


def devices_finding(config: RunConfig, machine: Machine) -> Finding:
    """Checks that this machine has as many devices as the configuration uses per machine."""
    wanted, seen = config.trainer.n_gpus_per_node, len(machine.gpus)
    if not seen:
        return Finding(DEVICES, "device", "info", "the processors: torch sees no GPU")
    if wanted <= seen:
        return _ok(DEVICES, "device", f"{wanted} of {seen} GPUs")
    remedy = f"set trainer.n_gpus_per_node to at most {seen}, or check CUDA_VISIBLE_DEVICES"
    return Finding(DEVICES, "device", "fail", f"{wanted} of {seen} GPUs", remedy=remedy)


def engine_findings(config: RunConfig, machine: Machine) -> list[Finding]:
    """Reports vLLM's options and environment as a run would start it on the first GPU."""
    settings = settings_of_run(config, most_visuals=(1, 0))
    start = EngineMachine(
        capability=machine.gpus[0].capability,
        flashinfer_kernels=machine.tools.flashinfer_kernels,
        num_ranks=num_devices(config),
    )
    try:
        options = json.dumps(engine_options(settings, start), sort_keys=True)
    except CepoError as error:
        remedy = "change the setting that the message names, or set worker.rollout.name=transformers"
        return [Finding(ENGINE, "options", "fail", str(error), remedy=remedy)]
    defaults = sorted(engine_environment(settings, start).items())
    environment = " ".join(f"{name}={os.environ.get(name, value)}" for name, value in defaults)
    return [Finding(ENGINE, "options", "info", options), Finding(ENGINE, "environment", "info", environment)]


def memory_findings(memory: Memory, config: RunConfig, machine: Machine) -> list[Finding]:
    """Reports the estimate, and whether it fits on each GPU or, without one, in this machine's memory."""
    parts = (
        f"{memory.parameters:,} parameters; weights {gib(memory.weights)}, optimizer {gib(memory.optimizer)}, generator "
        f"{gib(memory.engine)} with one request, largest pass at most {gib(memory.largest_pass)}"
    )
    fitting = [_gpu_finding(memory, config, index, gpu) for index, gpu in enumerate(machine.gpus)]
    if not machine.gpus:
        fitting = [memory_finding(memory, config.trainer.n_gpus_per_node, machine.memory_free)]
    return [Finding(MEMORY, "needed", "info", parts), *fitting]


def _gpu_finding(memory: Memory, config: RunConfig, index: int, gpu: Gpu) -> Finding:
    found, subject = fit(memory, config.worker.rollout, free=gpu.free, total=gpu.total), f"fits GPU {index}"
    if found.refused is not None:
        reason, _, remedy = found.refused.rpartition("; ")
        return Finding(MEMORY, subject, "fail", reason, remedy=remedy)
    if found.short > 0:
        return Finding(MEMORY, subject, "warn", f"up to {gib(found.short)} short", remedy=_LESS_ACTIVATIONS)
    return _ok(MEMORY, subject, f"{gib(gpu.free)} are free")


def memory_finding(memory: Memory, workers: int, free: int) -> Finding:
    """Compares what the workers need with the machine's free memory."""
    held = memory.weights + memory.optimizer + memory.engine
    least, most = workers * (held + memory.least_pass), workers * (held + memory.largest_pass)
    found = f"{gib(least)} needed, at most {gib(most)} with activations; {gib(free)} are free"
    if least > free:
        return Finding(MEMORY, "fits", "fail", found, remedy=WHAT_HELPS)
    if most > free:
        return Finding(MEMORY, "fits", "warn", found, remedy=_LESS_ACTIVATIONS)
    return _ok(MEMORY, "fits", found)


def start_findings(config: RunConfig) -> list[Finding]:
    """Checks weights, cluster, trackers, reward function, run folder and checkpoint as the run does, and writes nothing."""
    reward = config.worker.reward

    def inputs() -> str:
        check_before_imports(config)
        load_reward(reward.reward_function, reward.reward_function_kwargs, reward.reward_weights)
        return f"reward {reward.reward_function}"

    new = "trainer.find_last_checkpoint=false or another trainer.experiment_name starts a new run"
    return [
        _tried("model, cluster, reward", inputs, "correct the file or the setting that the message names"),
        _tried("trackers", lambda: check_sinks(config.trainer.logger), "install it, or take it out of trainer.logger"),
        _tried("run folder", lambda: _folder(config), "set trainer.save_checkpoint_path to another"),
        _tried("checkpoint", lambda: _checkpoint(config), new),
    ]


def _tried(subject: str, look: Callable[[], str | None], remedy: str) -> Finding:
    try:
        return _ok(START, subject, look() or "checked")
    except CepoError as error:
        return Finding(START, subject, "fail", str(error), remedy=remedy)


def _folder(config: RunConfig) -> str:
    folder = run_folder(config)
    existing = next(each for each in (folder.absolute(), *folder.absolute().parents) if each.exists())
    if existing.is_dir() and os.access(existing, os.W_OK | os.X_OK):
        return str(folder)
    reason = "permission denied" if existing.is_dir() else f"{existing} is a file"
    raise ConfigError(f"{folder} cannot be written: {reason}")


def _checkpoint(config: RunConfig) -> str:
    policy = RunPolicy(run_folder(config), config.trainer, identity=run_identity(config))
    checkpoint = policy.checkpoint_to_load()
    if checkpoint is None:
        return "none: the run starts at step 1"
    return f"{checkpoint}: the run continues with step {policy.store.read(checkpoint).step + 1}"


def data_findings(config: RunConfig) -> list[Finding]:
    """Checks the tokenizer and processor, and the first rows of the training and validation sets."""
    try:
        processing = load_processing(config)
    except CepoError as error:
        remedy = "give a folder that also has the tokenizer and the processor, or set worker.actor.model.tokenizer_path"
        return [Finding(DATA, "processor", "fail", str(error), remedy=remedy)]
    sources = [("data.train_files", source) for source in config.data.train_sources]
    sources += [] if config.data.val_files is None else [("data.val_files", config.data.val_files)]
    return [_source_finding(key, source, config, processing) for key, source in sources]


def _source_finding(key: str, source: str, config: RunConfig, processing: Any) -> Finding:
    """Checks the first rows in the same way as a run checks all of them."""
    size = config.data.rollout_batch_size
    with tempfile.TemporaryDirectory(prefix="cepo-doctor-") as folder:
        sample = Path(folder) / "first_rows.parquet"
        try:
            rows, total = first_rows(source, FIRST_ROWS)
            rows.to_parquet(str(sample))
            problems = ProblemSet(str(sample), config.data, processing)
            lengths = [_length(problem, processing) for problem in problems]
            if key == "data.train_files" and len(config.data.train_sources) == 1 and total is not None and total < size:
                raise ConfigError(f"{total} rows, but data.rollout_batch_size is {size}; set it to at most {total}")
        except CepoError as error:
            remedy = "correct the row or the setting that the message names; without a hub, give a file"
            return Finding(DATA, f"{key}, {source}", "fail", str(error).replace(str(sample), source), remedy=remedy)
    counted = "a hub name" if total is None else f"{total} rows"
    found = f"{counted}; the first {len(lengths)} have prompts of {min(lengths)} to {max(lengths)} tokens"
    found += f"; left out: {dict(problems.skipped)}" if problems.skipped else ""
    return _ok(DATA, f"{key}, {source}", found)


def _length(problem: Any, processing: Any) -> int:
    visuals = processing.load_visuals(problem.images, problem.videos)
    return len(processing.encode(problem.text, visuals, history=problem.history).token_ids)


def disk_findings(memory: Memory, config: RunConfig) -> list[Finding]:
    """Checks that the disks hold a checkpoint, and weights that the hub's cache does not have yet."""
    cache, path = Path(constants.HF_HUB_CACHE), config.worker.actor.model.model_path
    wanted = [("checkpoints", run_folder(config), memory.checkpoint, "set trainer.save_checkpoint_path")]
    held = cache / f"models--{path.replace('/', '--')}" / "snapshots"
    if find_path(path) is None and not any(held.rglob("*.safetensors")):
        wanted.append(("weights", cache, 2 * memory.parameters, "set HF_HOME"))
    findings: list[Finding] = []
    for subject, folder, needed, remedy in wanted:
        free, fails = _free_for(folder), needed > _free_for(folder)
        found, remedy = f"{gib(free)} free for {folder}, which takes {gib(needed)}", f"{remedy} to a larger disk"
        findings.append(Finding(DISK, subject, "fail" if fails else "ok", found, remedy=remedy if fails else ""))
    return findings


def _free_for(folder: Path) -> int:
    """Returns the free bytes of the disk on which the folder is or would be."""
    whole = folder.absolute()
    return shutil.disk_usage(next(parent for parent in (whole, *whole.parents) if parent.exists())).free
