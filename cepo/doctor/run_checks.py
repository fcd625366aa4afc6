"""Checks whether a configuration can start here: devices, model, memory, data, disk."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import Any

from huggingface_hub import constants

from cepo.config import RunConfig, find_path, run_folder
from cepo.data.dataset import ProblemSet
from cepo.data.reading import first_rows
from cepo.doctor.findings import DEVICES, Finding, Mark
from cepo.doctor.machine import Machine
from cepo.doctor.model_and_engine import engine_findings, family_finding, generator_finding
from cepo.doctor.start import ray_findings, start_findings
from cepo.errors import CepoError, ConfigError
from cepo.models.processing import load_processing
from cepo.sizing.fitting import phases_on, what_would_fit
from cepo.sizing.needs import Needs, ShapeOf, estimate_needs
from cepo.sizing.phases import Phases, gib

MEMORY, DATA, DISK = "this config's memory", "data", "disk"
CHECKS = ("machine", "engine", "memory", "start", "data", "disk")
"""The checks that a user can select; only the first needs no configuration."""
_VLLM = "vllm"
_WEIGHT_FILES = ("*.safetensors", "pytorch_model*.bin")
FIRST_ROWS = 8
_LESS_CERTAIN = (
    "use LoRA (worker.actor.model.lora.rank=16), a smaller worker.actor.model.model_path, or a machine with more memory"
)
_LESS_ACTIVATIONS = (
    "if it runs out: lower worker.actor.micro_batch_size_per_device_for_update or data.max_response_length, or set "
    "worker.actor.model.enable_gradient_checkpointing=true"
)


def run_findings(config: RunConfig, machine: Machine, checks: Collection[str] = CHECKS) -> list[Finding]:
    """Runs `checks` on a checked configuration whose embedded parts have been built."""
    device, generator = devices_finding(config, machine), generator_finding(config, machine)
    with_vllm = generator.found == _VLLM
    findings = [device, family_finding(config), generator] if {"engine", "memory"} & set(checks) else []
    if "start" in checks:
        findings += [weights_finding(config.worker.actor.model.model_path)]
        findings += [*ray_findings(config, machine), *start_findings(config)]
    needs = None
    if {"engine", "memory", "disk"} & set(checks):
        try:
            needs = estimate_needs(config, cpu_engine=with_vllm and not machine.gpus)
        except ConfigError as error:
            remedy = "give a folder with config.json, or a hub name where the hub can be reached (or is in the cache)"
            return [*findings, Finding(MEMORY, "model", "fail", str(error), remedy=remedy)]
        if "engine" in checks and with_vllm:
            findings += engine_findings(config, machine, sleeps=_sleeps(config, needs, machine))
        if "memory" in checks:
            findings += memory_findings(needs, config, machine, with_vllm=with_vllm)
    if "data" in checks:
        findings += data_findings(config)
    if needs is not None and "disk" in checks:
        findings += disk_findings(needs, config)
    return findings


def _sleeps(config: RunConfig, needs: Needs, machine: Machine) -> bool:
    if not machine.gpus:
        return False
    gpu = machine.gpus[0]
    return phases_on(config, needs, free=gpu.free, total=gpu.total, with_vllm=True).sleeps


def devices_finding(config: RunConfig, machine: Machine) -> Finding:
    """Checks that this machine has as many devices as the configuration uses per machine."""
    wanted, seen = config.trainer.n_gpus_per_node, len(machine.gpus)
    if not seen:
        return Finding(DEVICES, "device", "info", "the processors: torch sees no GPU")
    found = f"{wanted} of {seen} GPUs"
    if wanted <= seen:
        return Finding(DEVICES, "device", "ok", found)
    remedy = f"set trainer.n_gpus_per_node to at most {seen}, or check CUDA_VISIBLE_DEVICES"
    return Finding(DEVICES, "device", "fail", found, remedy=remedy)


def weights_finding(path: str) -> Finding:
    """Checks by their names that a local checkpoint has all its weight files."""
    folder = find_path(path)
    if folder is None:
        found = f"{path} is a hub name: a run loads the weights from the hub's cache, or downloads them"
        return Finding(DEVICES, "weights", "info", found)
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        wanted = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    else:
        wanted = sorted(file.name for pattern in _WEIGHT_FILES for file in folder.glob(pattern)) or [
            "model.safetensors"
        ]
    missing = [name for name in wanted if not (folder / name).is_file()]
    if not missing:
        return Finding(DEVICES, "weights", "ok", f"{len(wanted)} files in {path}")
    found = f"{path} lacks {', '.join(missing[:3])}{' and more' if len(missing) > 3 else ''}"
    remedy = "download or copy the complete checkpoint again"
    return Finding(DEVICES, "weights", "fail", found, remedy=remedy)


def memory_findings(
    needs: Needs, config: RunConfig, machine: Machine, *, with_vllm: bool, shape_of_path: ShapeOf | None = None
) -> list[Finding]:
    """Reports the parts of the memory estimate and whether it fits next to the generator."""
    actor = needs.actor
    findings = [
        Finding(MEMORY, "model", "info", f"{needs.model.parameters:,} parameters"),
        Finding(
            section=MEMORY,
            subject="actor",
            mark="info",
            found=f"weights {gib(actor.weights)}, gathered by FSDP {gib(actor.gathered)}, gradients {gib(actor.gradients)}, "
            f"optimizer {gib(actor.optimizer)}, copies {gib(actor.copies)}; at most {gib(actor.activations)} of activations in "
            f"an update, {gib(actor.scoring)} in a scoring pass",
        ),
    ]
    if needs.critic is not None:
        found = f"{gib(needs.critic.certain)}, activations at most {gib(needs.critic.activations)}"
        findings.append(Finding(MEMORY, "critic", "info", found))
    if not machine.gpus:
        if machine.memory_free is None:
            return [*findings, Finding(MEMORY, "fits", "info", "free memory is not known")]
        workers = config.trainer.n_gpus_per_node
        certain, activations = workers * (needs.certain + needs.generator), workers * (needs.total - needs.certain)
        where = "memory" if workers == 1 else f"memory, which {workers} workers share"
        return [*findings, fits(certain, activations, machine.memory_free, where)]
    for index, gpu in enumerate(machine.gpus):
        if with_vllm:
            share = int(config.worker.rollout.gpu_memory_utilization * gpu.total)
            findings.append(engine_share(needs.generator, share, index))
        phases = phases_on(config, needs, free=gpu.free, total=gpu.total, with_vllm=with_vllm)
        fitting = ""
        if not phases.fits:
            fitting = what_would_fit(
                config, free=gpu.free, total=gpu.total, with_vllm=with_vllm, shape_of_path=shape_of_path
            )
        findings.append(phases_finding(needs, phases, index, fitting, with_vllm=with_vllm))
    return findings


def phases_finding(needs: Needs, phases: Phases, index: int, fitting: str, *, with_vllm: bool) -> Finding:
    """Reports whether all phases fit on a GPU and whether vLLM sleeps, as a run would decide; else what would fit."""
    subject = "fits" if index == 0 else f"fits GPU {index}"
    parts = f"{gib(needs.certain)} needed, at most {gib(needs.total)} with activations"
    if phases.refused is not None:
        return Finding(MEMORY, subject, "fail", f"{parts}; {phases.refused}", remedy=fitting)
    beside = "" if not with_vllm else " with vLLM asleep" if phases.sleeps else " beside vLLM"
    found = (
        f"{parts}; scoring and update{beside}: {_left(phases.training_left)}; sampling: {_left(phases.sampling_left)}"
    )
    if phases.fits:
        return Finding(MEMORY, subject, "ok", found)
    return Finding(MEMORY, subject, "warn", found, remedy=f"if it runs out: {fitting}")


def _left(free: int) -> str:
    return f"{gib(free)} left" if free >= 0 else f"{gib(-free)} short at the upper bound"


def engine_share(needed: int, share: int, index: int) -> Finding:
    """Checks that vLLM's share of a GPU holds its weights and the KV cache of one request."""
    found = f"vLLM's share of GPU {index} is {gib(share)}; weights and one request need {gib(needed)}"
    if needed <= share:
        return Finding(MEMORY, "generator", "ok", found)
    remedy = "raise worker.rollout.gpu_memory_utilization, or lower worker.rollout.max_model_len"
    return Finding(MEMORY, "generator", "fail", found, remedy=remedy)


def fits(certain: int, activations: int, available: int, where: str) -> Finding:
    """Compares the estimate with the free memory; fails if the `certain` part exceeds it, warns if the bound does."""
    found = (
        f"{gib(certain)} needed, at most {gib(certain + activations)} with activations; {where}: {gib(available)} free"
    )
    if certain > available:
        return Finding(MEMORY, "fits", "fail", found, remedy=_LESS_CERTAIN)
    if certain + activations > available:
        return Finding(MEMORY, "fits", "warn", found, remedy=_LESS_ACTIVATIONS)
    return Finding(MEMORY, "fits", "ok", found)


def data_findings(config: RunConfig) -> list[Finding]:
    """Checks the tokenizer and processor, and the first rows of the training and validation sets."""
    try:
        processing = load_processing(config)
    except CepoError as error:
        remedy = "give a folder that also has the tokenizer and the processor, or set worker.actor.model.tokenizer_path"
        return [Finding(DATA, "processor", "fail", str(error), remedy=remedy)]
    names = [("data.train_files", source) for source in config.data.train_sources]
    if config.data.val_files is not None:
        names.append(("data.val_files", config.data.val_files))
    return [_source_finding(key, name, config, processing) for key, name in names]


def _source_finding(key: str, source: str, config: RunConfig, processing: Any) -> Finding:
    """Checks the first rows in the same way as a run checks all of them."""
    several = key == "data.train_files" and len(config.data.train_sources) > 1
    subject = f"{key}, {source}" if several else key
    with tempfile.TemporaryDirectory(prefix="cepo-doctor-") as folder:
        sample = Path(folder) / "first_rows.parquet"
        try:
            rows, total = first_rows(source, FIRST_ROWS)
            rows.to_parquet(str(sample))
            problems = ProblemSet(str(sample), config.data, processing)
            lengths, sizes = _measured(problems, processing)
        except CepoError as error:
            remedy = "correct the row or the setting that the message names"
            if find_path(source.partition("@")[0]) is None:
                remedy = (
                    "where no hub can be reached, give a file, or a name that the datasets library has in its cache"
                )
            found = str(error).replace(str(sample), source)
            return Finding(DATA, subject, "fail", found, remedy=remedy)
    size = config.data.rollout_batch_size
    if subject == "data.train_files" and total is not None and total < size:
        found = f"{total} rows, but data.rollout_batch_size is {size}"
        remedy = (
            f"set data.rollout_batch_size to at most {total}, and worker.actor.global_batch_size to a divisor of it"
        )
        return Finding(DATA, subject, "fail", found, remedy=remedy)
    counted = "a hub name" if total is None else f"{total} rows"
    found = f"{counted}; the first {len(lengths)} have prompts of {min(lengths)} to {max(lengths)} tokens"
    found += f" and images of {', '.join(sizes[:4])}" if sizes else " and no images"
    if problems.skipped:
        found += f"; left out: {dict(problems.skipped)}"
    return Finding(DATA, subject, "ok", found)


def _measured(problems: Any, processing: Any) -> tuple[list[int], list[str]]:
    """Returns the problems' prompt lengths and the distinct sizes of their images with their token counts."""
    lengths, sizes = [], {}
    for problem in problems:
        visuals = processing.load_visuals(problem.images, problem.videos)
        prompt = processing.encode(problem.text, visuals, history=problem.history)
        lengths.append(len(prompt.token_ids))
        for image in problem.images:
            sizes[f"{image.width} x {image.height} ({processing.reader.num_tokens(image.size)} tokens)"] = None
        for video in problem.videos:
            shown = f"{len(video.frames)} frames of {video.size[0]} x {video.size[1]}"
            sizes[f"{shown} ({processing.reader.num_video_tokens(video)} tokens)"] = None
    return lengths, list(sizes)


def disk_findings(needs: Needs, config: RunConfig) -> list[Finding]:
    """Checks that the disks hold the weights to download, the checkpoints that the run keeps, and one more."""
    free, folder = _free_for(run_folder(config)), run_folder(config)
    trainer = config.trainer
    kept = checkpoints_kept(trainer.save_freq, trainer.save_limit, trainer.max_steps)
    found = f"{gib(free)} free for {folder}; a checkpoint has {gib(needs.checkpoint)}, {kept} at a time"
    remedy = "set trainer.save_checkpoint_path to a larger disk, or lower trainer.save_limit"
    mark: Mark = "fail" if needs.checkpoint > free else "warn" if kept * needs.checkpoint > free else "ok"
    checkpoints = Finding(
        section=DISK, subject="checkpoints", mark=mark, found=found, remedy="" if mark == "ok" else remedy
    )
    return [*download_findings(needs, config), checkpoints]


def download_findings(needs: Needs, config: RunConfig) -> list[Finding]:
    """Checks that the hub's cache has room for missing weights; returns nothing if there is nothing to download."""
    path = config.worker.actor.model.model_path
    cache = Path(constants.HF_HUB_CACHE)
    held = cache / f"models--{path.replace('/', '--')}" / "snapshots"
    if find_path(path) is not None or any(held.rglob("*.safetensors")):
        return []
    free, wanted = _free_for(cache), 2 * needs.model.parameters
    found = f"{gib(free)} free for the hub's cache {cache}; the weights of {path} have about {gib(wanted)}"
    if wanted <= free:
        return [Finding(DISK, "weights", "ok", found)]
    remedy = "set HF_HOME to a folder on a larger disk, or worker.actor.model.model_path to a folder with the weights"
    return [Finding(DISK, "weights", "fail", found, remedy=remedy)]


def _free_for(folder: Path) -> int:
    """Returns the free bytes of the disk on which the folder is or would be."""
    whole = folder.absolute()
    return shutil.disk_usage(next(parent for parent in (whole, *whole.parents) if parent.exists())).free


def checkpoints_kept(save_freq: int, save_limit: int, max_steps: int | None) -> int:
    """Returns the largest number of checkpoints on the disk at once: all of them, or the limit and one being written.

    A run always writes one at its end. Without `max_steps` and a limit the number is unknown, so one is counted.
    """
    if save_freq < 1:
        return 1
    written = None if max_steps is None else max(1, -(-max_steps // save_freq))
    if save_limit < 1:
        return written or 1
    return save_limit + 1 if written is None else min(written, save_limit + 1)
