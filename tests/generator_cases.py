"""What tests of generators share: requests, engines on the tiny checkpoint, and a plain forward pass to hold them against."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from PIL import Image
from reference_trainer.model import response_logits, sampled_log_probs

from cepo.models.processing import Processing
from cepo.rollout.factory import build_generator
from cepo.rollout.generator import AdapterWeights, Generation, GenerationRequest, Generator, GeneratorSettings

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MAX_MODEL_LEN = 512
LORA_RANK = 4
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
Redraw = Callable[[int], dict[str, torch.Tensor]]


def picture(seed: int, size: tuple[int, int] = (64, 64)) -> Image.Image:
    """Coloured noise of (width, height)."""
    pixels = numpy.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=numpy.uint8)
    return Image.fromarray(pixels)


def request(processing: Processing, text: str, images: Sequence[Image.Image] = (), *, seed: int) -> GenerationRequest:
    prompt = processing.encode("<image>" * len(images) + text, processing.load_images(images))
    return GenerationRequest(
        prompt_ids=prompt.engine_ids, num_prompt_tokens=len(prompt.token_ids), images=tuple(images), seed=seed
    )


def open_generator(
    name: str,
    folder: Path,
    processing: Processing,
    lora_rank: int = 0,
    *,
    dtype: str = "fp32",
    fp32_logits: bool = True,
    **engine_settings: Any,
) -> Generator:
    if name == "vllm":
        pytest.importorskip("vllm", reason="vLLM is not installed")
        if dtype != "fp32" and "ONEDNN_MAX_CPU_ISA" in os.environ and torch.cpu._is_amx_tile_supported():
            pytest.skip("vLLM's 16-bit kernels use AMX whenever the processor has it, and abort if oneDNN may not")
    settings = GeneratorSettings(
        name=name,
        model_path=str(folder),
        dtype=dtype,
        fp32_logits=fp32_logits,
        max_model_len=MAX_MODEL_LEN,
        lora_rank=lora_rank,
        limit_images=2,
        max_num_batched_tokens=2048,
        batch_size=16,
        **engine_settings,
    )
    return build_generator(settings, processing, device=DEVICE)


def reference_model(folder: Path, tensors: Mapping[str, torch.Tensor] | None = None) -> Any:
    from transformers import Qwen3VLForConditionalGeneration

    model = Qwen3VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval().requires_grad_(False)
    if tensors is not None:
        model.load_state_dict(dict(tensors))
    return model


@torch.no_grad()
def reference_logits(model: Any, folder: Path, prompt: GenerationRequest, response: Sequence[int]) -> torch.Tensor:
    """The logits that precede each response token, from one uncached pass with the processor's and the model's own handling."""
    from transformers import AutoProcessor

    processor = AutoProcessor.from_pretrained(folder)
    text = processor.tokenizer.decode(prompt.prompt_ids)
    inputs = processor(
        text=[text], images=list(prompt.images) or None, return_tensors="pt", return_mm_token_type_ids=True
    )
    return response_logits(model, inputs, response, temperature=1.0)


def mean_gap(
    model: Any, folder: Path, requests: Sequence[GenerationRequest], groups: Sequence[Sequence[Generation]]
) -> float:
    gaps: list[torch.Tensor] = []
    for prompt, group in zip(requests, groups, strict=True):
        for sample in group:
            logits = reference_logits(model, folder, prompt, sample.response_ids)
            expected = sampled_log_probs(logits, sample.response_ids)
            gaps.append((expected - torch.tensor(sample.log_probs)).abs())
    return float(torch.cat(gaps).mean())


def tokens(groups: Sequence[Sequence[Generation]]) -> list[list[tuple[int, ...]]]:
    token_ids: list[list[tuple[int, ...]]] = []
    for group in groups:
        token_ids.append([tuple(sample.response_ids.tolist()) for sample in group])
    return token_ids


def random_adapter(folder: Path, *, seed: int) -> tuple[Any, AdapterWeights]:
    """A PEFT model with an adapter that matters (both factors drawn), and that adapter."""
    import peft

    config = peft.LoraConfig(r=LORA_RANK, lora_alpha=8, target_modules=TARGETS, exclude_modules=".*visual.*")
    model = peft.get_peft_model(reference_model(folder), config).eval()
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: 0.2 * torch.randn(tensor.shape, generator=generator)
        for name, tensor in peft.get_peft_model_state_dict(model).items()
    }
    peft.set_peft_model_state_dict(model, tensors)
    return model, AdapterWeights(tensors=tensors, adapter_config=config.to_dict())
