"""Both generators with an adapter that changes, against PEFT's own forward pass."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from generator_cases import (
    LORA_RANK,
    mean_gap,
    open_generator,
    picture,
    random_adapter,
    reference_log_probs,
    reference_model,
    request,
    tokens,
)
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
    settings = SamplingSettings(num_samples=2, max_response_length=32)
    before = adapter_generator.generate(requests, settings)
    assert mean_gap(reference_model(tiny_model_folder), tiny_model_folder, requests, before) < LOG_PROBS
    for seed in (1, 2, 3):
        model, weights = random_adapter(tiny_model_folder, seed=seed)
        adapter_generator.sync_weights(weights)
        groups = adapter_generator.generate(requests, settings)
        assert tokens(groups) != tokens(before)
        assert mean_gap(model, tiny_model_folder, requests, groups) < LOG_PROBS
        before = groups


def resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="resident memory is read from /proc")
@pytest.mark.nightly("a search for a leak")
@pytest.mark.parametrize("adapter_generator", ["vllm"], indirect=True)
def test_vllm_keeps_nothing_of_12_rounds_of_adapters(
    adapter_generator: Generator, tiny_model_folder: Path, tiny_processing: Processing
) -> None:
    settings = SamplingSettings(num_samples=2, max_response_length=4, ignore_eos=True)
    sizes = []
    for number in range(16):
        adapter_generator.sync_weights(random_adapter(tiny_model_folder, seed=number)[1])
        adapter_generator.generate(
            [
                request(tiny_processing, "Find x.", [picture(100 * number + index, (384, 384))], seed=index)
                for index in range(4)
            ],
            settings,
        )
        sizes.append(resident_mib())
    # A round's pixels take 13 MiB once processed. Sizes go up and down with the allocator; their floor must not rise.
    assert min(sizes[-4:]) - min(sizes[4:8]) < 8


def test_adapters_that_do_not_fit_are_refused(adapter_generator: Generator, tiny_model_folder: Path) -> None:
    _, weights = random_adapter(tiny_model_folder, seed=1)
    name = next(iter(weights.tensors))
    tower = {name.replace("language_model", "visual"): tensor for name, tensor in weights.tensors.items()}
    adapter_generator.sync_weights(weights)
    for tensors in (tower, {name: weights.tensors[name][:1]}):
        with pytest.raises(EngineError):
            adapter_generator.sync_weights(AdapterWeights(tensors=tensors, adapter_config=weights.adapter_config))


def test_a_changed_adapter_changes_a_repeated_prompts_scores(
    adapter_generator: Generator, group_of_8: list[GenerationRequest], tiny_model_folder: Path
) -> None:
    greedy = SamplingSettings(num_samples=1, max_response_length=1, temperature=0)
    log_probs = []
    for seed in (1, 2, 1):
        model, weights = random_adapter(tiny_model_folder, seed=seed)
        copies = {name: tensor.clone() for name, tensor in weights.tensors.items()}
        adapter_generator.sync_weights(weights)
        assert all(torch.equal(copies[name], tensor) for name, tensor in weights.tensors.items())
        [[sample]] = adapter_generator.generate(group_of_8, greedy)
        expected = reference_log_probs(model, tiny_model_folder, group_of_8[0], sample.response_ids)
        assert sample.log_probs == pytest.approx(expected.tolist(), abs=LOG_PROBS)
        log_probs.append(sample.log_probs[0])
    assert abs(log_probs[0] - log_probs[1]) > 1e-3
    assert log_probs[2] == pytest.approx(log_probs[0], abs=LOG_PROBS)
