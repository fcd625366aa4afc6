"""The model of a step's operations, time and bytes between ranks, against torch's counter and figures worked out by hand."""

from __future__ import annotations

import json
import math
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
from lab.support.step_time import (
    Batch,
    Decoding,
    Gpu,
    PromptCosts,
    Traffic,
    communication_seconds,
    costs_from_operations,
    decode_seconds,
    decoding_of,
    heaviest,
    measured_costs,
    step_seconds,
    traffic_of,
)

GPU = Gpu(name="a", operations=200e12, memory=1.79e12, link=100.0, network=10.0)
MODEL = ModelFlops(QWEN3_VL_2B, lora_rank=16)


def test_the_gpu_with_most_prompts_has_the_ceiling_of_their_mean() -> None:
    assert [heaviest(*each) for each in ((32, 1), (32, 8), (19.2, 8), (9.6, 64), (8, 8))] == [32, 4, 3, 1, 1]
    assert heaviest(0.1 * 3 * 10, 1) == 3  # 3.0000000000000004


def test_two_short_responses_decode_in_the_computed_time() -> None:
    """They have at most two tokens each, and the time is worked out by hand."""
    batch = Batch(prompt_tokens=10, mean_response=1 / math.log(2), longest_response=2)
    decoding = Decoding(weights=100.0, cache_per_token=3.0)
    # First token: both are there, 10 tokens each. Second: each with probability 1/2, so one of them with 3/4; 11 tokens.
    read = (100 + 2 * 10 * 3) + (0.75 * 100 + 2 * 0.5 * 11 * 3)
    assert decode_seconds(2, batch, decoding, memory=4.0) == pytest.approx(read / 4)


def test_a_step_on_1_2_and_16_gpus_takes_the_computed_time() -> None:
    """The step has 4 prompts, and the time is worked out by hand."""
    batch = Batch(
        prompts=4, group_size=1, live_share=0.75, prompts_per_update=2, mean_response=1e12, longest_response=1
    )
    costs = PromptCosts(prefill=1.0, score=2.0, teachers=3.0, update=5.0)
    decoding, gpu = Decoding(weights=179.0, cache_per_token=0.0), Gpu(**{**vars(GPU), "memory": 100.0})
    traffic = Traffic(scoring_pass=2000.0, update_pass=3200.0, prompts_per_scoring_pass=2, prompts_per_update_pass=1)

    def seconds(gpus: int) -> dict[str, float]:
        return dict(step_seconds(gpus, batch, costs, decoding, traffic, gpu))

    one = {"prefill": 4.0, "decode": 1.79, "score and teachers": 15.0, "update": 2 * 10.0}
    assert seconds(1) == pytest.approx(one | {"step": 40.79, "communication": 0.0})
    # Two of 3 live prompts are scored on one GPU, in 1 pass that sends 1000 bytes; each update has 1.5 of 2 live: 1 each.
    two = {"prefill": 2.0, "decode": 1.79, "score and teachers": max(10.0, 10.0), "update": 2 * max(5.0, 16.0)}
    assert seconds(2) == pytest.approx(two | {"step": 45.79, "communication": 10.0 + 2 * 16.0})
    # Over machines: 15/16 of the bytes at a tenth of the speed.
    many = {"prefill": 1.0, "decode": 1.79, "score and teachers": 187.5, "update": 2 * 300.0}
    assert seconds(16) == pytest.approx(many | {"step": 790.29, "communication": 787.5})


def test_communication_takes_the_slower_link_beyond_a_machine() -> None:
    """There is none on one GPU."""
    assert [communication_seconds(2, 800.0, gpus, GPU) for gpus in (1, 8, 16)] == [0.0, 14.0, 150.0]


def test_qwen3_vl_2b_costs_14_23_and_38_tflop_a_prompt() -> None:
    """They are the cost to score, of two teachers, and to update."""
    costs = costs_from_operations(MODEL, Batch(), GPU, teachers=2, hint=20)
    operations = {name: seconds * 200 for name, seconds in vars(costs).items()}  # in 1e12
    # Picture 0.931; 3,600 tokens of 2.8535e-3, 3,200 through the head of 0.6223e-3, 2.0e6 pairs of 229,376e-12.
    assert operations["score"] == pytest.approx(0.931 + 10.273 + 1.991 + 0.459, rel=2e-3)
    assert operations["teachers"] == pytest.approx(2 * (3220 * 2.8535e-3 + 1.991 + 1.992e6 * 229_376e-12), rel=2e-3)
    backward = 3600 * (2.8186e-3 + 2 * 0.0349e-3) + 2.5 * 0.459
    assert operations["update"] == pytest.approx(0.931 + 2 * (10.273 + 0.459) + 2 * 1.991 + backward, rel=2e-3)
    assert operations["prefill"] == pytest.approx(0.931 + 400 * 2.8535e-3 + 0.0184, rel=2e-3)


def test_qwen3_vl_2b_decodes_256_responses_in_9_seconds() -> None:
    """It decodes 32 in 3.6 seconds, at 1.79 TB/s."""
    decoding = decoding_of(MODEL)
    assert (decoding.weights, decoding.cache_per_token) == (3_440_902_144, 114_688)
    # 256: 256 (400 x 400 + 400 x 400) cached tokens without the cut, and about 2,000 readings of the weights.
    assert decode_seconds(256, Batch(), decoding, GPU.memory) == pytest.approx(9.0, abs=0.1)
    assert decode_seconds(32, Batch(), decoding, GPU.memory) == pytest.approx(3.6, abs=0.1)


def test_an_update_gathers_layers_twice_and_embeddings_once() -> None:
    """It also reduces adapters."""
    layers, adapters, embeddings = 28 * 50_331_648, 17_432_576, 2048 * 151_936
    traffic = traffic_of(MODEL)
    assert traffic.scoring_pass == 2 * (layers + adapters + embeddings)
    assert traffic.update_pass == 4 * (layers + adapters) + 2 * embeddings + 4 * adapters


def test_measured_stages_give_the_packed_seconds_of_a_prompt() -> None:
    stages = {
        name: {"packed": {"seconds": seconds}, "padded": {"seconds": 99}}
        for name, seconds in (("score student", 4.0), ("score all", 10.0), ("teachers", 7.0), ("update", 10.0))
    }
    record = json.loads(json.dumps({"sizes": {"groups": 2}, "stages": stages}))
    assert measured_costs(record, prefill=0.5) == PromptCosts(prefill=0.5, score=2.0, teachers=3.0, update=5.0)


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
