"""Whether a given configuration could start here: memory, data, disk."""

from __future__ import annotations

import json
import logging
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cepo.algorithms import build_estimator
from cepo.config import RunConfig, find_path, resolved_critic, run_folder
from cepo.config.schema import FsdpConfig, LoraConfig
from cepo.doctor.findings import Finding, gib
from cepo.doctor.machine import Machine
from cepo.doctor.memory import (
    Estimate,
    ModelShape,
    TrainingShape,
    checkpoint_bytes,
    generator_memory,
    trained_parameters,
    training_memory,
)
from cepo.doctor.shape import model_shape
from cepo.doctor.start import ray_findings, start_findings
from cepo.errors import CepoError, ConfigError
from cepo.rollout.factory import choose_generator

DEVICES, MEMORY, DATA, DISK = "this config's devices", "this config's memory", "data", "disk"
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


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What a run needs on one device, in bytes, and the checkpoints it writes."""

    model: ModelShape
    actor: Estimate
    critic: Estimate | None
    generator: int
    checkpoint: int

    @property
    def certain(self) -> int:
        """Of the trained models, whatever the lengths."""
        return self.actor.certain + (0 if self.critic is None else self.critic.certain)

    @property
    def activations(self) -> int:
        """Upper bound; actor and critic are updated one after the other."""
        return max(self.actor.activations, 0 if self.critic is None else self.critic.activations)


def run_findings(config: RunConfig, machine: Machine) -> list[Finding]:
    """Memory, data and disk of a checked configuration whose embedded parts are built already."""
    device, generator = devices_finding(config, machine), generator_finding(config, machine)
    begin = [*ray_findings(config, machine), *start_findings(config)]
    try:
        needs = estimate_needs(config, cpu_engine=generator.found == _VLLM and not machine.gpus)
    except ConfigError as error:
        remedy = "give a folder with config.json, or a hub name where the hub can be reached (or is in the cache)"
        model = Finding(section=MEMORY, subject="model", mark="fail", found=str(error), remedy=remedy)
        return [device, generator, *begin, model]
    memory = memory_findings(needs, config, machine, with_vllm=generator.found == _VLLM)
    return [
        device,
        generator,
        weights_finding(config.worker.actor.model.model_path),
        *begin,
        *memory,
        *data_findings(config),
        *disk_findings(needs, config),
    ]


def devices_finding(config: RunConfig, machine: Machine) -> Finding:
    """Whether this machine has the devices that the config asks of each machine."""
    wanted, seen = config.trainer.n_gpus_per_node, len(machine.gpus)
    if not seen:
        return Finding(section=DEVICES, subject="device", mark="info", found="the processors: torch sees no GPU")
    found = f"{wanted} of {seen} GPUs"
    if wanted <= seen:
        return Finding(section=DEVICES, subject="device", mark="ok", found=found)
    remedy = f"set trainer.n_gpus_per_node to at most {seen}, or check CUDA_VISIBLE_DEVICES"
    return Finding(section=DEVICES, subject="device", mark="fail", found=found, remedy=remedy)


def generator_finding(config: RunConfig, machine: Machine) -> Finding:
    """Which generator a run would take; fails where it asks for one that cannot run here."""
    generators_log = logging.getLogger("cepo.rollout.factory")
    before = generators_log.level
    generators_log.setLevel(logging.ERROR)  # its choice is reported here, as a finding
    try:
        name = choose_generator(config.worker.rollout.name, device="cuda" if machine.gpus else "cpu")
    except ConfigError as error:
        remedy = "set worker.rollout.name=auto, or install the package with the extra 'gpu' or 'cpu'"
        return Finding(section=DEVICES, subject="generator", mark="fail", found=str(error), remedy=remedy)
    finally:
        generators_log.setLevel(before)
    return Finding(section=DEVICES, subject="generator", mark="ok", found=name)


def weights_finding(path: str) -> Finding:
    """Whether a local checkpoint has all its weight files, by their names alone."""
    folder = find_path(path)
    if folder is None:
        found = f"{path} is a hub name: a run loads the weights from the hub's cache, or downloads them"
        return Finding(section=DEVICES, subject="weights", mark="info", found=found)
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        wanted = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    else:
        wanted = sorted(file.name for pattern in _WEIGHT_FILES for file in folder.glob(pattern)) or [
            "model.safetensors"
        ]
    missing = [name for name in wanted if not (folder / name).is_file()]
    if not missing:
        return Finding(section=DEVICES, subject="weights", mark="ok", found=f"{len(wanted)} files in {path}")
    found = f"{path} lacks {', '.join(missing[:3])}{' and more' if len(missing) > 3 else ''}"
    remedy = "download or copy the checkpoint again, whole"
    return Finding(section=DEVICES, subject="weights", mark="fail", found=found, remedy=remedy)


def estimate_needs(config: RunConfig, *, cpu_engine: bool) -> Needs:
    """What a run needs on each device; with `cpu_engine` vLLM's keys and values are set aside in the machine's memory.

    Raises:
        ConfigError: the model's configuration cannot be read.
    """
    from cepo.workers.scoring_model import HEAD_CHUNK_ELEMENTS

    actor, data, rollout = config.worker.actor, config.data, config.worker.rollout
    estimator = build_estimator(
        config.algorithm.adv_estimator, config.algorithm.methods[config.algorithm.adv_estimator]
    )
    model = model_shape(
        actor.model.model_path,
        trust_remote_code=actor.model.trust_remote_code,
        override_config=actor.model.override_config,
        lora=actor.model.lora,
    )
    common: dict[str, Any] = {
        "prompt_tokens": data.max_prompt_length,
        "response_tokens": data.max_response_length,
        "head_chunk_elements": HEAD_CHUNK_ELEMENTS,
        "devices": config.trainer.nnodes * config.trainer.n_gpus_per_node,
    }
    training = TrainingShape(
        lora_rank=actor.model.lora.rank,
        freeze_vision_tower=actor.model.freeze_vision_tower,
        gradient_checkpointing=actor.model.enable_gradient_checkpointing,
        rows=actor.micro_batch_size_per_device_for_update,
        weight_copies=_weight_copies(config, estimator),
        optimizer=actor.optim.strategy,
        **_types(actor.fsdp),
        **common,
    )
    critic = _critic_estimate(config, common) if estimator.needs_values else None
    trained, trained_type = trained_parameters(model, training), actor.fsdp.torch_dtype or "fp32"
    weights_only = config.trainer.save_model_only
    checkpoint = checkpoint_bytes(
        trained, trained_type, training.weight_copies, training.optimizer, weights_only=weights_only
    )
    if critic is not None:
        checkpoint += training.devices * (critic.weights + (0 if weights_only else critic.optimizer))
    own_cache = _cpu_cache_bytes() if cpu_engine else 0
    return Needs(
        model=model,
        actor=training_memory(model, training),
        critic=critic,
        generator=-(-generator_memory(model, rollout.dtype, _cache_tokens(config)) // rollout.tensor_parallel_size)
        + own_cache,
        checkpoint=checkpoint,
    )


def _critic_estimate(config: RunConfig, common: Mapping[str, Any]) -> Estimate:
    """The value model's: all its weights are trained."""
    settings = resolved_critic(config.worker)
    assert settings.model.model_path is not None
    training = TrainingShape(
        lora_rank=0,
        freeze_vision_tower=settings.model.freeze_vision_tower,
        gradient_checkpointing=settings.model.enable_gradient_checkpointing,
        rows=settings.micro_batch_size_per_device_for_update,
        optimizer=settings.optim.strategy,
        **_types(settings.fsdp),
        **common,
    )
    model = model_shape(
        settings.model.model_path,
        trust_remote_code=settings.model.trust_remote_code,
        override_config=settings.model.override_config,
        lora=LoraConfig(),
    )
    return training_memory(model, training)


def _types(fsdp: FsdpConfig) -> dict[str, Any]:
    return {
        "trained_type": fsdp.torch_dtype or "fp32",
        "compute_type": fsdp.mp_param_dtype,
        "full_shard": fsdp.enable_full_shard,
    }


def _weight_copies(config: RunConfig, estimator: Any) -> int:
    """Copies of the trained weights: the teacher's, unless it is the actor, and the reference's; LoRA turns its adapter off."""
    with_adapter = config.worker.actor.model.lora.rank > 0
    sources = [estimator.teacher.source] if estimator.views else []
    sources += [] if config.algorithm.disable_kl else ["reference"]
    return sum(source != "actor" and not (with_adapter and source == "reference") for source in sources)


def _cache_tokens(config: RunConfig) -> int:
    """Keys and values that one request at its longest needs, the least an engine starts with."""
    return config.worker.rollout.max_model_len or config.data.max_prompt_length + config.data.max_response_length


def _cpu_cache_bytes() -> int:
    """What vLLM sets aside for keys and values where there is no GPU."""
    return int(float(os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1")) * 2**30)


def memory_findings(needs: Needs, config: RunConfig, machine: Machine, *, with_vllm: bool) -> list[Finding]:
    """The estimate part by part, and whether it fits beside the generator's share."""
    actor = needs.actor
    findings = [
        Finding(section=MEMORY, subject="model", mark="info", found=f"{needs.model.parameters:,} parameters"),
        Finding(
            section=MEMORY,
            subject="actor",
            mark="info",
            found=f"weights {gib(actor.weights)}, gathered by FSDP {gib(actor.gathered)}, gradients {gib(actor.gradients)}, "
            f"optimizer {gib(actor.optimizer)}, copies {gib(actor.copies)}, activations at most {gib(actor.activations)}",
        ),
    ]
    if needs.critic is not None:
        found = f"{gib(needs.critic.certain)}, activations at most {gib(needs.critic.activations)}"
        findings.append(Finding(section=MEMORY, subject="critic", mark="info", found=found))
    if not machine.gpus:
        if machine.memory_free is None:
            return [*findings, Finding(section=MEMORY, subject="fits", mark="info", found="free memory is not known")]
        workers = config.trainer.n_gpus_per_node
        certain, activations = workers * (needs.certain + needs.generator), workers * needs.activations
        where = "memory" if workers == 1 else f"memory, which {workers} workers share"
        return [*findings, fits(certain, activations, machine.memory_free, where)]
    for index, gpu in enumerate(machine.gpus):
        share = 0
        if with_vllm:
            share = int(config.worker.rollout.gpu_memory_utilization * gpu.total)
            findings.append(engine_share(needs.generator, share, index))
        generator, beside = (0, " beside vLLM's share") if with_vllm else (needs.generator, "")
        certain = needs.certain + generator
        findings.append(fits(certain, needs.activations, gpu.free - share, f"memory of GPU {index}{beside}"))
    return findings


def engine_share(needed: int, share: int, index: int) -> Finding:
    """Whether vLLM's share of a GPU holds its weights and the keys and values of one request."""
    found = f"vLLM's share of GPU {index} is {gib(share)}; weights and one request need {gib(needed)}"
    if needed <= share:
        return Finding(section=MEMORY, subject="generator", mark="ok", found=found)
    remedy = "raise worker.rollout.gpu_memory_utilization, or lower worker.rollout.max_model_len"
    return Finding(section=MEMORY, subject="generator", mark="fail", found=found, remedy=remedy)


def fits(certain: int, activations: int, available: int, where: str) -> Finding:
    """Fails where the part that no length can change exceeds what is free; warns where only the upper bound does."""
    found = (
        f"{gib(certain)} needed, at most {gib(certain + activations)} with activations; {where}: {gib(available)} free"
    )
    if certain > available:
        return Finding(section=MEMORY, subject="fits", mark="fail", found=found, remedy=_LESS_CERTAIN)
    if certain + activations > available:
        return Finding(section=MEMORY, subject="fits", mark="warn", found=found, remedy=_LESS_ACTIVATIONS)
    return Finding(section=MEMORY, subject="fits", mark="ok", found=found)


def data_findings(config: RunConfig) -> list[Finding]:
    """The first rows of the training and validation sets through the processor, where they are files."""
    from cepo.models.processing import Processing

    model = config.worker.actor.model
    template = config.data.override_chat_template
    try:
        processing = Processing(
            model.tokenizer_path or model.model_path,
            trust_remote_code=model.trust_remote_code,
            chat_template=None if template is None else Path(template).read_text(encoding="utf-8"),
        )
    except CepoError as error:
        remedy = "name a folder that holds tokenizer and processor too, or set worker.actor.model.tokenizer_path"
        return [Finding(section=DATA, subject="processor", mark="fail", found=str(error), remedy=remedy)]
    names = [("data.train_files", source) for source in config.data.train_sources]
    if config.data.val_files is not None:
        names.append(("data.val_files", config.data.val_files))
    return [_source_finding(key, name, config, processing) for key, name in names]


def _source_finding(key: str, source: str, config: RunConfig, processing: Any) -> Finding:
    """Checks the first rows exactly as a run checks all of them."""
    from cepo.data.dataset import ProblemSet
    from cepo.data.sources import first_rows

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
            return Finding(section=DATA, subject=subject, mark="fail", found=found, remedy=remedy)
    size = config.data.rollout_batch_size
    if subject == "data.train_files" and total is not None and total < size:
        found = f"{total} rows, but data.rollout_batch_size is {size}"
        remedy = (
            f"set data.rollout_batch_size to at most {total}, and worker.actor.global_batch_size to a divisor of it"
        )
        return Finding(section=DATA, subject=subject, mark="fail", found=found, remedy=remedy)
    counted = "a hub name" if total is None else f"{total} rows"
    found = f"{counted}; the first {len(lengths)} have prompts of {min(lengths)} to {max(lengths)} tokens"
    found += f" and pictures of {', '.join(sizes[:4])}" if sizes else " and no pictures"
    if problems.skipped:
        found += f"; left out: {dict(problems.skipped)}"
    return Finding(section=DATA, subject=subject, mark="ok", found=found)


def _measured(problems: Any, processing: Any) -> tuple[list[int], list[str]]:
    """Prompt lengths of the problems, and the distinct sizes of their pictures with their tokens."""
    lengths, sizes = [], {}
    for problem in problems:
        prompt = processing.encode(problem.text, processing.load_visuals(problem.images, problem.videos))
        lengths.append(len(prompt.token_ids))
        for image in problem.images:
            sizes[f"{image.width} x {image.height} ({processing.num_image_tokens(image.size)} tokens)"] = None
        for video in problem.videos:
            shown = f"{len(video.frames)} frames of {video.size[0]} x {video.size[1]}"
            sizes[f"{shown} ({processing.num_video_tokens(video)} tokens)"] = None
    return lengths, list(sizes)


def disk_findings(needs: Needs, config: RunConfig) -> list[Finding]:
    """Whether the disk of the run folder holds the checkpoints the run will keep, and one more while it is written."""
    folder = run_folder(config).absolute()
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    free = shutil.disk_usage(existing).free
    trainer = config.trainer
    kept = checkpoints_kept(trainer.save_freq, trainer.save_limit, trainer.max_steps)
    found = f"{gib(free)} free for {run_folder(config)}; a checkpoint has {gib(needs.checkpoint)}, {kept} at a time"
    remedy = "set trainer.save_checkpoint_path to a larger disk, or lower trainer.save_limit"
    if needs.checkpoint > free:
        return [Finding(section=DISK, subject="checkpoints", mark="fail", found=found, remedy=remedy)]
    if kept * needs.checkpoint > free:
        return [Finding(section=DISK, subject="checkpoints", mark="warn", found=found, remedy=remedy)]
    return [Finding(section=DISK, subject="checkpoints", mark="ok", found=found)]


def checkpoints_kept(save_freq: int, save_limit: int, max_steps: int | None) -> int:
    """Checkpoints on the disk at the worst moment: those written, or the limit and the one being written.

    A run always writes one at its end. Without `max_steps` and a limit the number is not known, and one is counted.
    """
    if save_freq < 1:
        return 1
    written = None if max_steps is None else max(1, -(-max_steps // save_freq))
    if save_limit < 1:
        return written or 1
    return save_limit + 1 if written is None else min(written, save_limit + 1)
