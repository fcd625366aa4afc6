"""The arithmetic of a step's operations and bytes between ranks, against torch's counter and figures worked out by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from cepo.models.processing import Processing
from lab.support.collectives import (
    SCORING,
    SYNCHRONISATION,
    UPDATE,
    Calls,
    Sharding,
    WeightBytes,
    expected_bytes,
    padded_size,
)
from lab.support.model_flops import ModelFlops, causal_pairs
from lab.support.shapes import MICRO, QWEN3_VL_2B, prompt_text, random_image, response_lengths, write_checkpoint


def test_a_rank_of_4_sends_three_quarters() -> None:
    """They are three quarters of what its passes gather and reduce."""
    sharding = Sharding(
        blocks=WeightBytes(gathered=400, reduced=40), outside=WeightBytes(gathered=80, reduced=0), synchronised=48
    )
    calls = Calls(scoring_calls=1, scoring_passes=3, update_passes=2, synchronisations=1)
    sent = expected_bytes(sharding, calls, 4)
    assert sent == {SCORING: 3 * 1280 // 4, UPDATE: 3 * 2 * (800 + 80 + 40) // 4, SYNCHRONISATION: 36}
    assert set(expected_bytes(sharding, calls, 1).values()) == {0}


def test_a_weight_of_5_rows_is_padded_to_8_for_4_ranks() -> None:
    assert [padded_size(torch.zeros(5, 3), ranks) for ranks in (1, 2, 4)] == [15, 18, 24]


RESPONSE = 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(MICRO, tmp_path_factory.mktemp("micro"))


def measured(folder: Path, *, lora_rank: int = 0, backward: bool = False) -> int:
    """Of one prompt with its image and a response, logits of all tokens, by torch's counter."""
    import peft
    from transformers import Qwen3VLForConditionalGeneration

    processing = Processing(str(folder))
    model: Any = Qwen3VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    if lora_rank:
        settings = peft.LoraConfig(r=lora_rank, target_modules="all-linear", exclude_modules=".*visual.*")
        model = peft.get_peft_model(model, settings)
    images = processing.load_images([random_image(MICRO, 0)])
    assert images is not None
    prompt = processing.encode(prompt_text(MICRO, processing, 0), images)
    assert len(prompt.token_ids) == MICRO.prompt_tokens
    ids = torch.tensor([[*prompt.token_ids, *processing.encode_text("7" * RESPONSE)]])
    kinds = (ids == processing.image_token_id).int()
    # torch does not count its fused attention on a CPU.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        logits = model(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            mm_token_type_ids=kinds,
            **images.tensors,
        ).logits
        if backward:
            logits.sum().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("lora_rank", [0, 3])
def test_a_forward_pass_costs_what_torch_counts(folder: Path, lora_rank: int) -> None:
    costs, length = ModelFlops(MICRO, lora_rank), MICRO.prompt_tokens + RESPONSE
    # torch counts every query-key pair of causal attention, also those that are masked.
    expected = costs.image + length * (costs.token + costs.adapter_token + costs.head) + costs.pair * length**2
    assert measured(folder, lora_rank=lora_rank) == expected


@pytest.mark.parametrize("lora_rank", [0, 3])
def test_an_update_costs_what_torch_counts_to_4_percent(folder: Path, lora_rank: int) -> None:
    costs, length = ModelFlops(MICRO, lora_rank), MICRO.prompt_tokens + RESPONSE
    expected = costs.update(MICRO.prompt_tokens, [RESPONSE], checkpointing=False)
    # Here the head runs on all tokens, and only once; masked pairs are counted, and scores are not computed again.
    expected += costs.head * (length * (2 if lora_rank else 3) - RESPONSE * (2 if lora_rank else 4))
    expected += round(costs.pair * (3 * length**2 - 3.5 * causal_pairs(length)))
    assert measured(folder, lora_rank=lora_rank, backward=True) == pytest.approx(expected, rel=0.04)


def test_qwen3_vl_2b_costs_what_its_published_sizes_say() -> None:
    costs = ModelFlops(QWEN3_VL_2B, 16)
    # 28 layers of 4 x 2048 x 2048 with halved keys and values (3 x 2048^2) and 3 x 2048 x 6144.
    assert costs.token == 2 * 28 * (3 * 2048**2 + 3 * 2048 * 6144) == 2_818_572_288
    assert costs.head == 2 * 2048 * 151_936
    assert costs.pair == 229_376
    assert costs.image == pytest.approx(0.931e12, rel=1e-3)
    assert costs.adapter_token == pytest.approx(0.0349e9, rel=2e-3)
    # Reading 400 tokens and an image once, and decoding 8 x 400: 0.437 of PFLOP over 32 prompts.
    assert 32 * costs.generate(400, [400] * 8) == pytest.approx(0.437e15, rel=1e-2)


def test_pairs_of_a_continued_text_are_the_whole_less_the_start() -> None:
    assert causal_pairs(4) == 1 + 2 + 3 + 4
    assert causal_pairs(4, 2) == 3 + 4


def test_lengths_of_a_step_are_the_same_wherever_asked() -> None:
    """They are a third of the way up on average."""
    lengths = response_lengths(QWEN3_VL_2B, 10_000, seed=3)
    assert lengths == response_lengths(QWEN3_VL_2B, 10_000, seed=3)
    assert 50 <= min(lengths) < max(lengths) <= 800
    assert sum(lengths) / 10_000 == pytest.approx(300, rel=0.02)
