"""Both generators in bf16, whose logits are float32 of the weights that were last given, and with changing adapters."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from actors import differing
from generator_cases import (
    LORA_RANK,
    TARGETS,
    Redraw,
    mean_gap,
    open_generator,
    picture,
    random_adapter,
    reference_model,
    request,
    tokens,
)
from rounding import LOG_PROBS
from tiny_checkpoints import write_checkpoint
from torch import Tensor

from cepo.errors import EngineError
from cepo.models.processing import Processing
from cepo.rollout.generator import AdapterWeights, FullWeights, GenerationRequest, Generator, SamplingSettings
from cepo.rollout.vllm_process import require_float32_head

pytestmark = pytest.mark.heavy


def head_of(generator: Any) -> tuple[torch.nn.Module, torch.nn.Module]:
    """The module that makes the logits of its last argument, the hidden states, and the one with the head's weight."""
    if generator.name == "transformers":
        model = generator._model
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        return base.lm_head, base.lm_head
    models: list[Any] = []
    generator._llm.apply_model(models.append)
    language_model = models[0].language_model
    return language_model.logits_processor, language_model.lm_head


def head_errors(generator: Generator, requests: list[GenerationRequest]) -> tuple[set[torch.dtype], float, float]:
    """Types of the logits made in a call, the largest logit's mean, and the error's root mean square against float64."""
    maker, owner = head_of(generator)
    errors = list[Tensor]()
    largest = list[Tensor]()
    types = set[torch.dtype]()

    def look(_module: Any, arguments: tuple[Any, ...], logits: Tensor) -> None:
        weight: Any = getattr(owner, "base_layer", owner).weight
        hidden = arguments[-1]
        exact = (hidden.double() @ weight.double().t())[..., : logits.shape[-1]]
        errors.append((logits.double() - exact).flatten())
        largest.append(exact.amax(dim=-1).flatten())
        types.add(logits.dtype)
        assert hidden.dtype is torch.bfloat16

    with maker.register_forward_hook(look):
        generator.generate(requests, SamplingSettings(num_samples=2, max_response_length=8))
    return types, float(torch.cat(largest).mean()), float(torch.cat(errors).square().mean().sqrt())


@pytest.mark.parametrize("name", ["vllm", "transformers"])
@pytest.mark.parametrize("rank", [0, LORA_RANK])
def test_logits_in_bf16_runs_are_float32(
    name: str,
    rank: int,
    realistic_folder: Path,
    tiny_processing: Processing,
    requests: list[GenerationRequest],
    redrawn_weights: Redraw,
) -> None:
    """Also of new weights, and beside an adapter."""
    with contextlib.closing(open_generator(name, realistic_folder, tiny_processing, rank, dtype="bf16")) as generator:
        if rank:
            generator.sync_weights(random_adapter(realistic_folder, seed=1)[1])
        types, largest, error = head_errors(generator, requests)
        assert types == {torch.float32}
        assert error < LOG_PROBS
        if rank:
            return
        assert 16 < largest < 32
        weights = redrawn_weights(2)
        weights["lm_head.weight"] = weights["lm_head.weight"] * 2
        generator.sync_weights(FullWeights(tensors=weights))
        types, _, error = head_errors(generator, requests)
        assert types == {torch.float32}
        assert error < LOG_PROBS
        head_weight = weights["lm_head.weight"][:300].bfloat16().float()
        assert torch.equal(head_of(generator)[1].weight[:300].float(), head_weight)


def test_the_head_of_a_language_model_within_is_float32(tmp_path: Path) -> None:
    """vLLM builds InternVL's language model, head included, from its own part of the configuration."""
    folder = write_checkpoint("internvl", tmp_path)
    processing = Processing(str(folder))
    prompt = request(processing, "Which?", [picture(0)], seed=1)
    with contextlib.closing(open_generator("vllm", folder, processing, dtype="bf16")) as generator:
        types, _, error = head_errors(generator, [prompt])
    assert types == {torch.float32}
    assert error < LOG_PROBS


@pytest.mark.parametrize(
    "name", ["transformers", pytest.param("vllm", marks=pytest.mark.nightly("one more start of vLLM"))]
)
def test_without_fp32_logits_they_are_rounded_to_bf16(
    name: str, realistic_folder: Path, tiny_processing: Processing, requests: list[GenerationRequest]
) -> None:
    """A run that wants float32 is told."""
    generator = open_generator(name, realistic_folder, tiny_processing, dtype="bf16", fp32_logits=False)
    with contextlib.closing(generator):
        types, _, error = head_errors(generator, requests)
        assert types == {torch.bfloat16}
        assert error > 5e-3
        if name == "vllm":
            with pytest.raises(EngineError, match=r"computes this model's logits in torch\.bfloat16"):
                require_float32_head(generator._llm)  # type: ignore[attr-defined]


@pytest.fixture(scope="module", params=["vllm", "transformers"])
def adapter_generator(
    request: pytest.FixtureRequest, tiny_model_folder: Path, tiny_processing: Processing
) -> Iterator[Generator]:
    generator = open_generator(
        request.param, tiny_model_folder, tiny_processing, lora_rank=LORA_RANK, adapted_layers=tuple(TARGETS)
    )
    with contextlib.closing(generator):
        yield generator


@pytest.mark.parametrize("adapter_generator", ["vllm"], indirect=True)
def test_vllm_wraps_only_the_layers_with_an_adapter(adapter_generator: Any) -> None:
    """Each of the model's 4 layers has 4: q, k and v are one, and so are gate and up.

    Without their names it also wraps the embeddings and the head, which every token then passes with an empty adapter.
    """

    def wrapped(worker: Any) -> list[str]:
        return sorted(worker.model_runner.lora_manager._adapter_manager.modules)

    (paths,) = adapter_generator._llm.collective_rpc(wrapped)
    assert len(paths) == 16
    assert {path.rpartition(".")[2] for path in paths} == {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"}


def test_new_adapters_are_followed_to_1e_5_one_after_the_other(
    adapter_generator: Generator, requests: list[GenerationRequest], tiny_model_folder: Path
) -> None:
    """The first one again too, whatever is cached of it. The trainer's tensors stay as they are."""
    settings = SamplingSettings(num_samples=2, max_response_length=32)
    previous_groups = adapter_generator.generate(requests, settings)
    assert mean_gap(reference_model(tiny_model_folder), tiny_model_folder, requests, previous_groups) < LOG_PROBS
    for seed in (1, 2, 1):
        model, weights = random_adapter(tiny_model_folder, seed=seed)
        copies = {name: tensor.clone() for name, tensor in weights.tensors.items()}
        adapter_generator.sync_weights(weights)
        assert differing(copies, weights.tensors) == []
        groups = adapter_generator.generate(requests, settings)
        assert tokens(groups) != tokens(previous_groups)
        assert mean_gap(model, tiny_model_folder, requests, groups) < LOG_PROBS
        previous_groups = groups


def test_adapters_that_do_not_fit_are_refused(adapter_generator: Generator, tiny_model_folder: Path) -> None:
    _, weights = random_adapter(tiny_model_folder, seed=1)
    name = next(iter(weights.tensors))
    tower = {name.replace("language_model", "visual"): tensor for name, tensor in weights.tensors.items()}
    adapter_generator.sync_weights(weights)
    for tensors in (tower, {name: weights.tensors[name][:1]}):
        with pytest.raises(EngineError):
            adapter_generator.sync_weights(AdapterWeights(tensors=tensors, adapter_config=weights.adapter_config))
