"""Chooses the generator of a run and builds it."""

from __future__ import annotations

import importlib.util
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cepo.config.derived import served_adapter_rank
from cepo.errors import ConfigError
from cepo.models.families import EngineUse
from cepo.rollout.base import Generator
from cepo.rollout.engine_options import EngineSettings

if TYPE_CHECKING:
    from cepo.config import RunConfig
    from cepo.models.processing import Processing

logger = logging.getLogger(__name__)

GENERATORS = ("auto", "vllm", "transformers")


def choose_generator(name: str, *, device: str, unserved: str | None = None) -> str:
    """Returns "vllm" or "transformers". "auto" takes vLLM if it is installed for this kind of `device`, and logs it.

    Args:
        unserved: why vLLM cannot serve the model; None if it can.

    Raises:
        ConfigError: an unknown name, or vLLM asked for where it is not installed or cannot serve the model.
    """
    if name not in GENERATORS:
        raise ConfigError(f"worker.rollout.name '{name}' is unknown; it takes {', '.join(GENERATORS)}")
    if name == "transformers":
        return name
    why_not = _why_not_vllm(device)
    if name == "vllm":
        if why_not:
            raise ConfigError(f"worker.rollout.name=vllm, but {why_not}; install it, or take auto or transformers")
        if unserved:
            raise ConfigError(f"worker.rollout.name=vllm, but {unserved}; take auto or transformers")
        return name
    why_not = why_not or unserved
    if why_not:
        logger.warning("%s: the transformers generator stands in; sampling is slower", why_not)
        return "transformers"
    logger.info("vLLM is installed and samples the responses")
    return "vllm"


def vllm_samples(config: RunConfig, processing: Processing, most_visuals: tuple[int, int]) -> bool:
    """Returns whether `generator_of_run` takes vLLM on a GPU. It logs nothing and does not check the configuration."""
    rollout = config.worker.rollout
    if rollout.name != "auto":
        return rollout.name == "vllm"
    use = EngineUse(
        on_gpu=True,
        dtype=rollout.dtype,
        with_adapter=served_adapter_rank(config.worker.actor.model.lora) > 0,
        most_images=rollout.limit_images or most_visuals[0],
    )
    return _why_not_vllm("cuda") is None and processing.family.why_not_vllm(use) is None


def build_generator(
    name: str,
    *,
    model_path: str | Path,
    dtype: str,
    device: str,
    seed: int,
    max_model_len: int,
    banned_token_ids: Sequence[int],
    eos_token_ids: Sequence[int],
    lora_rank: int = 0,
    limit_images: int = 1,
    limit_videos: int = 0,
    gpu_memory_utilization: float = 0.6,
    enforce_eager: bool = False,
    max_num_batched_tokens: int | None = None,
    batch_size: int = 64,
    trust_remote_code: bool = False,
    fp32_logits: bool = True,
    show_progress: bool = False,
    sleeps: bool = False,
    tensor_parallel_size: int = 1,
    processing: Processing | None = None,
) -> Generator:
    """Builds the generator `name` ("auto", "vllm" or "transformers") with the settings that concern it.

    `batch_size` and `processing` concern transformers; `seed`, those from `lora_rank` to `max_num_batched_tokens`, the
    limits, `sleeps` and `tensor_parallel_size` concern vLLM.

    Raises:
        ConfigError, EngineError: see `choose_generator`; the engine could not start.
    """
    common: dict[str, Any] = {
        "dtype": dtype,
        "max_model_len": max_model_len,
        "banned_token_ids": banned_token_ids,
        "eos_token_ids": eos_token_ids,
        "trust_remote_code": trust_remote_code,
        "fp32_logits": fp32_logits,
        "show_progress": show_progress,
    }
    if _chosen(name, processing, device, dtype, lora_rank, limit_images) == "vllm":
        from cepo.rollout.vllm_engine import VllmGenerator

        return VllmGenerator(
            model_path,
            seed=seed,
            gpu_memory_utilization=gpu_memory_utilization,
            enforce_eager=enforce_eager,
            max_num_batched_tokens=max_num_batched_tokens,
            limit_images=limit_images,
            limit_videos=limit_videos,
            lora_rank=lora_rank,
            sleeps=sleeps,
            tensor_parallel_size=tensor_parallel_size,
            **common,
        )
    from cepo.rollout.transformers_generator import TransformersGenerator

    return TransformersGenerator(model_path, device=device, batch_size=batch_size, processing=processing, **common)


def generator_of_run(
    config: RunConfig,
    processing: Processing,
    *,
    device: str,
    most_visuals: tuple[int, int],
    model_path: str,
    lora_rank: int,
    max_num_batched_tokens: int,
    **settings: Any,
) -> Generator:
    """Builds the generator that `worker.rollout` describes, for contexts of the run's longest prompt and response.

    Args:
        most_visuals: the most images and the most videos that a prompt has.
        settings: further ones of `build_generator`.

    Raises:
        ConfigError, EngineError: see `build_generator`.
    """
    rollout = config.worker.rollout
    settings.setdefault("show_progress", not rollout.disable_tqdm and sys.stderr.isatty())
    return build_generator(
        rollout.name,
        model_path=model_path,
        dtype=rollout.dtype,
        device=device,
        max_model_len=longest_context(config),
        seed=rollout.seed,
        gpu_memory_utilization=rollout.gpu_memory_utilization,
        enforce_eager=rollout.enforce_eager,
        max_num_batched_tokens=max_num_batched_tokens,
        limit_images=rollout.limit_images or most_visuals[0],
        limit_videos=most_visuals[1],
        lora_rank=lora_rank,
        banned_token_ids=processing.banned_token_ids,
        eos_token_ids=processing.eos_token_ids,
        trust_remote_code=config.worker.actor.model.trust_remote_code,
        fp32_logits=config.worker.actor.model.fp32_logits,
        processing=processing,
        **settings,
    )


def engine_settings_of_run(config: RunConfig, *, most_visuals: tuple[int, int], sleeps: bool) -> EngineSettings:
    """Returns vLLM's settings in training, as `generator_of_run` passes them."""
    rollout, model = config.worker.rollout, config.worker.actor.model
    return EngineSettings(
        model_path=model.model_path,
        dtype=rollout.dtype,
        max_model_len=longest_context(config),
        seed=rollout.seed,
        gpu_memory_utilization=rollout.gpu_memory_utilization,
        enforce_eager=rollout.enforce_eager,
        max_num_batched_tokens=rollout.max_num_batched_tokens,
        limit_images=rollout.limit_images or most_visuals[0],
        limit_videos=most_visuals[1],
        lora_rank=served_adapter_rank(model.lora),
        trust_remote_code=model.trust_remote_code,
        fp32_logits=model.fp32_logits,
        show_progress=not rollout.disable_tqdm and sys.stderr.isatty(),
        tensor_parallel_size=rollout.tensor_parallel_size,
        sleeps=sleeps,
    )


def longest_context(config: RunConfig) -> int:
    """Returns the most tokens of one sample: `worker.rollout.max_model_len`, else longest prompt plus response."""
    return config.worker.rollout.max_model_len or config.data.max_prompt_length + config.data.max_response_length


def _chosen(
    name: str, processing: Processing | None, device: str, dtype: str, lora_rank: int, limit_images: int
) -> str:
    """Calls `choose_generator`; without `processing` the model counts as served."""
    on_gpu = device.startswith("cuda")
    use = EngineUse(on_gpu=on_gpu, dtype=dtype, with_adapter=lora_rank > 0, most_images=limit_images)
    unserved = None if processing is None else processing.family.why_not_vllm(use)
    return choose_generator(name, device=device, unserved=unserved)


def _why_not_vllm(device: str) -> str | None:
    if importlib.util.find_spec("vllm") is None:
        return "vLLM is not installed"
    import torch

    built_for_gpu = torch.version.cuda is not None
    if built_for_gpu != device.startswith("cuda"):
        return f"vLLM is installed for {'GPUs' if built_for_gpu else 'CPUs'} and the device is '{device}'"
    return None
