"""Sampling with transformers on a device: bf16 through the model's own pass, float32 through fused decoding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from generator_cases import tokens
from gpu_places import LOG_PROB_LIMITS, Place, build_actor, draw_adapter, gaps, within

from cepo.data.batch import ScoringRow
from cepo.models.interface import EncodedPrompt
from cepo.models.processing import Processing
from cepo.rollout.generator import GeneratorSettings, SamplingSettings
from cepo.rollout.transformers_generator import TransformersGenerator
from testing.rows import generation_requests


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_sampled_log_probs_under_an_adapter_are_the_trainers(place: Place, dtype: str, figure: Any) -> None:
    folder = place.checkpoint(place.part, dtype)
    processing = Processing(str(folder))
    actor = build_actor(folder, dtype=dtype)
    draw_adapter(actor)
    chosen = GeneratorSettings(model_path=str(folder), dtype=dtype, max_model_len=16_384)
    generator = TransformersGenerator(chosen, processing, device=place.device)
    generator.sync_weights(actor.rollout_weights())
    requests = generation_requests(place.part, processing, count=3)
    settings = SamplingSettings(num_samples=place.samples, max_response_length=place.response)
    first = generator.generate(requests, settings)
    again = generator.generate(requests, settings)
    assert (generator._decoder is not None) == (dtype == "fp32"), "fused decoding is for float32"
    if place.device == "cpu":
        assert tokens(first) == tokens(again)
    rows = []
    sampled = []
    for request, group in zip(requests, first, strict=True):
        images = processing.load_images(list(request.images))
        expanded = tuple(processing.expand(request.prompt_ids, images))
        prompt = EncodedPrompt(token_ids=expanded, engine_ids=request.prompt_ids, images=images)
        assert len(prompt.token_ids) == request.num_prompt_tokens
        for generation in group:
            rows.append(ScoringRow(context=prompt, response_ids=generation.response_ids))
            sampled.append(torch.tensor(generation.log_probs))
    differences = figure(
        f"{dtype} sampled against scored in nats: mean, 99th, largest", gaps(sampled, actor.score(rows))
    )
    assert within(differences, LOG_PROB_LIMITS["bf16"] if dtype == "bf16" else (1e-4,) * 3)
    generator.close()
