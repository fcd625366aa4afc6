"""Chooses the generator of a run and builds it."""

from __future__ import annotations

import importlib.util
import logging
from typing import TYPE_CHECKING, Any

import torch

from cepo.errors import ConfigError
from cepo.models.interface import EngineUse, Family
from cepo.rollout.generator import Generator, GeneratorSettings

if TYPE_CHECKING:
    from cepo.config.schema import DataConfig
    from cepo.config.worker_schema import RolloutConfig, WorkerConfig
    from cepo.models.processing import Processing

logger = logging.getLogger(__name__)

MOST_BANNED_ON_GPU = 1024
"""The most entries that vLLM's GPU sampler accepts in a request's `logit_bias` (`MAX_NUM_LOGIT_BIAS_TOKENS`), by which
tokens are banned there. vLLM compares at a request, which would fail the first step."""


def build_generator(settings: GeneratorSettings, processing: Processing, *, device: str) -> Generator:
    num_banned = len(processing.banned_token_ids)
    if choose_generator(settings, processing.family, device, num_banned=num_banned) == "vllm":
        from cepo.rollout.vllm_engine import VllmGenerator

        return VllmGenerator(settings, processing)
    from cepo.rollout.transformers_generator import TransformersGenerator

    return TransformersGenerator(settings, processing, device=device)


def choose_generator(settings: GeneratorSettings, family: Family, device: str, *, num_banned: int = 0) -> str:
    """Returns "vllm" or "transformers". "auto" selects vLLM if it can serve the model on this `device`, and logs it.

    `num_banned` is the number of tokens that are never sampled.

    Raises `ConfigError`: vLLM is requested, but is not installed or cannot serve the model.
    """
    if settings.name == "transformers":
        return settings.name
    why_not = vllm_obstacle(settings, family, device, num_banned=num_banned)
    if why_not is None:
        logger.info("vLLM is installed and samples the responses")
        return "vllm"
    if settings.name == "vllm":
        raise ConfigError(f"worker.rollout.name=vllm, but {why_not}; set it to auto or transformers")
    logger.warning("%s: the transformers generator is used instead, which samples more slowly", why_not)
    return "transformers"


def vllm_obstacle(settings: GeneratorSettings, family: Family, device: str, *, num_banned: int) -> str | None:
    """Returns why vLLM cannot sample with the trainer's log-probs on this type of device; None if it can."""
    if importlib.util.find_spec("vllm") is None:
        return "vLLM is not installed"
    built_for_gpu = torch.version.cuda is not None
    on_gpu = device.startswith("cuda")
    if built_for_gpu != on_gpu:
        return f"vLLM is installed for {'GPUs' if built_for_gpu else 'CPUs'} and the device is '{device}'"
    if on_gpu and num_banned > MOST_BANNED_ON_GPU:
        return (
            f"{num_banned:,} of the model's token ids must never be sampled (control tokens, and ids beyond the "
            f"tokenizer's last), and vLLM on a GPU bans at most {MOST_BANNED_ON_GPU:,} (MAX_NUM_LOGIT_BIAS_TOKENS); "
            "give the model's full tokenizer if this one has fewer tokens than the model"
        )
    return family.why_not_vllm(
        EngineUse(
            on_gpu=on_gpu,
            dtype=settings.dtype,
            with_adapter=settings.lora_rank > 0,
            most_images=settings.limit_images,
        )
    )


def vllm_samples(settings: GeneratorSettings, family: Family, *, num_banned: int = 0) -> bool:
    """Returns whether `choose_generator` would select vLLM on a GPU, without logging."""
    if settings.name == "auto":
        return vllm_obstacle(settings, family, "cuda", num_banned=num_banned) is None
    return settings.name == "vllm"


def settings_of_run(
    data: DataConfig, worker: WorkerConfig, *, num_devices: int, most_visuals: tuple[int, int]
) -> GeneratorSettings:
    """Returns the settings of a run; `most_visuals` are the maximum numbers of images and videos in a prompt."""
    rollout = worker.rollout
    model = worker.actor.model
    most_images, most_videos = most_visuals
    resolved: dict[str, Any] = vars(rollout) | {
        "max_model_len": rollout.max_model_len or data.longest_row,
        "max_num_seqs": most_responses_at_once(data, rollout, num_devices=num_devices),
        "limit_images": rollout.limit_images or most_images,
    }
    return GeneratorSettings(
        model_path=model.model_path,
        limit_videos=most_videos,
        lora_rank=model.lora.served_rank(merged=rollout.merge_lora),
        trust_remote_code=model.trust_remote_code,
        fp32_logits=model.fp32_logits,
        **resolved,
    )


def most_responses_at_once(data: DataConfig, rollout: RolloutConfig, *, num_devices: int) -> int:
    """Returns `worker.rollout.max_num_seqs`; by default an engine's responses of a step, at least 128 and at most 1,024.

    vLLM captures CUDA graphs up to this number, which takes time and memory. Validation has other batches.
    """
    if rollout.max_num_seqs is not None:
        return rollout.max_num_seqs
    num_engines = max(1, num_devices // rollout.tensor_parallel_size)
    prompts_per_engine = -(-data.rollout_batch_size // num_engines)  # rounded up
    responses_per_engine = prompts_per_engine * rollout.n
    return min(max(responses_per_engine, 128), 1024, rollout.max_num_batched_tokens)
