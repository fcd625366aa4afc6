"""Both generators with an adapter that changes, against PEFT's own forward pass."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from generator_cases import LORA_RANK, mean_gap, open_generator, random_adapter, reference_model, tokens
from rounding import LOG_PROBS

from cepo.errors import EngineError
from cepo.models.processing import Processing
from cepo.rollout.generator import AdapterWeights, GenerationRequest, Generator, SamplingSettings

pytestmark = pytest.mark.heavy


@pytest.fixture(scope="module", params=["vllm", "transformers"])
def adapter_generator(
    request: pytest.FixtureRequest, tiny_model_folder: Path, tiny_processing: Processing
) -> Iterator[Generator]:
    generator = open_generator(request.param, tiny_model_folder, tiny_processing, lora_rank=LORA_RANK)
    with contextlib.closing(generator):
        yield generator


def test_new_adapters_are_followed_to_1e_5_one_after_the_other(
    adapter_generator: Generator, requests: list[GenerationRequest], tiny_model_folder: Path
) -> None:
    """The first one again too, whatever is cached of it. The trainer's tensors stay as they are."""
    settings = SamplingSettings(num_samples=2, max_response_length=32)
    before = adapter_generator.generate(requests, settings)
    assert mean_gap(reference_model(tiny_model_folder), tiny_model_folder, requests, before) < LOG_PROBS
    for seed in (1, 2, 1):
        model, weights = random_adapter(tiny_model_folder, seed=seed)
        copies = {name: tensor.clone() for name, tensor in weights.tensors.items()}
        adapter_generator.sync_weights(weights)
        assert all(torch.equal(copies[name], tensor) for name, tensor in weights.tensors.items())
        groups = adapter_generator.generate(requests, settings)
        assert tokens(groups) != tokens(before)
        assert mean_gap(model, tiny_model_folder, requests, groups) < LOG_PROBS
        before = groups


def test_adapters_that_do_not_fit_are_refused(adapter_generator: Generator, tiny_model_folder: Path) -> None:
    _, weights = random_adapter(tiny_model_folder, seed=1)
    name = next(iter(weights.tensors))
    tower = {name.replace("language_model", "visual"): tensor for name, tensor in weights.tensors.items()}
    adapter_generator.sync_weights(weights)
    for tensors in (tower, {name: weights.tensors[name][:1]}):
        with pytest.raises(EngineError):
            adapter_generator.sync_weights(AdapterWeights(tensors=tensors, adapter_config=weights.adapter_config))
