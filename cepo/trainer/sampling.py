"""Requests and settings of generation, for training and for validation."""

from __future__ import annotations

from typing import Any

from cepo.config import RunConfig
from cepo.data.dataset import Problem
from cepo.models.inputs import EncodedPrompt
from cepo.rollout.base import GenerationRequest, SamplingSettings, sampling_seed


def generation_request(
    problem: Problem, prompt: EncodedPrompt, *, seed: int, step: int, attempt: int = 0, copy: int = 0
) -> GenerationRequest:
    """What the engine is asked; its noise depends on (seed, step, attempt, prompt, copy) alone.

    `copy` counts the times that the same problem stands earlier among those asked together.
    """
    return GenerationRequest(
        prompt_ids=prompt.engine_ids,
        num_prompt_tokens=len(prompt.token_ids),
        images=problem.images,
        videos=problem.videos,
        seed=sampling_seed(seed, step, f"{problem.prompt_id}#{copy}" if copy else problem.prompt_id, attempt=attempt),
        picture_source=problem.picture_source,
    )


def training_settings(config: RunConfig) -> SamplingSettings:
    """`worker.rollout` as it stands."""
    return _settings(config, {})


def validation_settings(config: RunConfig) -> SamplingSettings:
    """`worker.rollout` with `val_override_config` on top."""
    return _settings(config, dict(config.worker.rollout.val_override_config))


def _settings(config: RunConfig, override: dict[str, Any]) -> SamplingSettings:
    rollout = config.worker.rollout
    return SamplingSettings(
        num_samples=override.get("n", rollout.n),
        max_response_length=config.data.max_response_length,
        temperature=override.get("temperature", rollout.temperature),
        top_p=override.get("top_p", rollout.top_p),
        top_k=override.get("top_k", rollout.top_k),
        ignore_eos=rollout.ignore_eos,
    )
