"""Both generators on the tiny checkpoint, against a plain transformers forward pass."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import math
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from PIL import Image

from cepo.errors import ConfigError, EngineError
from cepo.models.processing import Processing
from cepo.rollout.base import (
    AdapterWeights,
    FullWeights,
    Generation,
    GenerationRequest,
    Generator,
    SamplingSettings,
)
from cepo.rollout.factory import build_generator, choose_generator
from cepo.rollout.token_sampling import draw_tokens, row_uniforms

pytestmark = pytest.mark.heavy

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MAX_MODEL_LEN = 512
LORA_RANK = 4
Redraw = Callable[[int], dict[str, torch.Tensor]]
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def picture(seed: int, size: tuple[int, int] = (64, 64)) -> Image.Image:
    pixels = numpy.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=numpy.uint8)
    return Image.fromarray(pixels)


def request(processing: Processing, text: str, images: Sequence[Image.Image] = (), *, seed: int) -> GenerationRequest:
    prompt = processing.encode("<image>" * len(images) + text, processing.load_images(images))
    return GenerationRequest(
        prompt_ids=prompt.engine_ids, num_prompt_tokens=len(prompt.token_ids), images=tuple(images), seed=seed
    )


@pytest.fixture
def requests(tiny_processing: Processing) -> list[GenerationRequest]:
    """One picture, no picture, two pictures of other sizes, and a long text with one."""
    return [
        request(tiny_processing, "Find x.", [picture(1)], seed=11),
        request(tiny_processing, "What is 2 + 3?", seed=12),
        request(tiny_processing, "Which is larger?", [picture(2, (96, 64)), picture(3, (128, 96))], seed=13),
        request(tiny_processing, "Find the area of the triangle. " * 4, [picture(4)], seed=14),
    ]


def open_generator(name: str, folder: Path, processing: Processing, lora_rank: int = 0) -> Generator:
    if name == "vllm":
        pytest.importorskip("vllm", reason="vLLM is not installed")
    return build_generator(
        name,
        model_path=folder,
        dtype="fp32",
        device=DEVICE,
        seed=0,
        max_model_len=MAX_MODEL_LEN,
        banned_token_ids=processing.banned_token_ids,
        eos_token_ids=processing.eos_token_ids,
        lora_rank=lora_rank,
        limit_images=2,
        max_num_batched_tokens=2048,
        batch_size=16,
    )


@pytest.fixture(scope="module", params=["vllm", "transformers"])
def shared_generator(
    request: pytest.FixtureRequest, tiny_model_folder: Path, tiny_processing: Processing
) -> Iterator[Generator]:
    with contextlib.closing(open_generator(request.param, tiny_model_folder, tiny_processing)) as generator:
        yield generator


@pytest.fixture
def generator(shared_generator: Generator, redrawn_weights: Redraw) -> Generator:
    """With the checkpoint's own weights, whatever an earlier test gave it."""
    shared_generator.sync_weights(FullWeights(tensors=redrawn_weights(1)))
    return shared_generator


@pytest.fixture(scope="module", params=["vllm", "transformers"])
def adapter_generator(
    request: pytest.FixtureRequest, tiny_model_folder: Path, tiny_processing: Processing
) -> Iterator[Generator]:
    generator = open_generator(request.param, tiny_model_folder, tiny_processing, lora_rank=LORA_RANK)
    with contextlib.closing(generator):
        yield generator


def reference_model(folder: Path, tensors: Mapping[str, torch.Tensor] | None = None) -> Any:
    from transformers import Qwen3VLForConditionalGeneration

    model = Qwen3VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
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
    length = inputs["input_ids"].shape[1]
    answer = torch.tensor([list(response)])
    inputs["input_ids"] = torch.cat([inputs["input_ids"], answer], dim=1)
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    inputs["mm_token_type_ids"] = torch.cat([inputs["mm_token_type_ids"], torch.zeros_like(answer)], dim=1)
    return model(**inputs).logits[0, length - 1 : -1].float()


def reference_log_probs(model: Any, folder: Path, prompt: GenerationRequest, response: Sequence[int]) -> torch.Tensor:
    logits = reference_logits(model, folder, prompt, response)
    return logits.log_softmax(dim=1).gather(1, torch.tensor(list(response))[:, None])[:, 0]


def mean_gap(
    model: Any, folder: Path, requests: Sequence[GenerationRequest], groups: Sequence[Sequence[Generation]]
) -> float:
    gaps = [
        (reference_log_probs(model, folder, prompt, sample.response_ids) - torch.tensor(sample.log_probs)).abs()
        for prompt, group in zip(requests, groups, strict=True)
        for sample in group
    ]
    return float(torch.cat(gaps).mean())


def tokens(groups: Sequence[Sequence[Generation]]) -> list[list[tuple[int, ...]]]:
    return [[sample.response_ids for sample in group] for group in groups]


def test_same_seed_gives_the_same_tokens_and_another_seed_gives_others(
    generator: Generator, tiny_processing: Processing
) -> None:
    settings = SamplingSettings(num_samples=4, max_response_length=24)
    prompts = [request(tiny_processing, "Find x.", [picture(1)], seed=seed) for seed in (0, 1, 2)]
    first, again = generator.generate(prompts, settings), generator.generate(prompts, settings)
    assert tokens(first) == tokens(again)
    # 12 streams of one prompt: seeds 0, 1, 2 share no sample, not even shifted by one.
    assert len({sample for group in tokens(first) for sample in group}) == 12


def test_sample_i_is_the_same_among_2_and_among_5_samples(
    generator: Generator, requests: list[GenerationRequest]
) -> None:
    few = generator.generate(requests, SamplingSettings(num_samples=2, max_response_length=16))
    many = generator.generate(requests, SamplingSettings(num_samples=5, max_response_length=16))
    assert [len(group) for group in many] == [5, 5, 5, 5]
    assert tokens(few) == [group[:2] for group in tokens(many)]


def test_other_prompts_in_the_batch_do_not_change_a_prompts_tokens(
    generator: Generator, requests: list[GenerationRequest]
) -> None:
    settings = SamplingSettings(num_samples=3, max_response_length=32)
    together = tokens(generator.generate(requests, settings))
    for index, prompt in enumerate(requests):
        assert tokens(generator.generate([prompt], settings)) == [together[index]]


@pytest.mark.skipif(torch.version.cuda is not None, reason="on a GPU vLLM draws with its own random streams")
@pytest.mark.parametrize("shared_generator", ["vllm"], indirect=True)
def test_both_generators_draw_the_same_tokens_on_a_cpu_though_vllm_reads_the_prompts_in_pieces(
    generator: Generator, requests: list[GenerationRequest], tiny_model_folder: Path, tiny_processing: Processing
) -> None:
    settings = SamplingSettings(num_samples=24, max_response_length=24, temperature=0.8, top_p=0.95, top_k=100)
    # The samples' prompts together are longer than the 2048 tokens of one pass.
    assert 24 * sum(prompt.num_prompt_tokens for prompt in requests) > 2048
    ours = generator.generate(requests, settings)
    with contextlib.closing(open_generator("transformers", tiny_model_folder, tiny_processing)) as other:
        assert tokens(ours) == tokens(other.generate(requests, settings))


def test_banned_tokens_never_come_in_3000_tokens_though_the_model_wants_them_above_all(
    generator: Generator, requests: list[GenerationRequest], redrawn_weights: Redraw, tiny_processing: Processing
) -> None:
    banned = list(tiny_processing.banned_token_ids)
    weights = redrawn_weights(1)
    weights["lm_head.weight"][banned] *= 500  # logits of hundreds: a bias of -100 would not hold them
    generator.sync_weights(FullWeights(tensors=weights))
    settings = SamplingSettings(num_samples=12, max_response_length=64, ignore_eos=True)
    groups = generator.generate(requests, settings)
    sampled = [token for group in tokens(groups) for response in group for token in response]
    assert len(sampled) == 4 * 12 * 64
    assert not set(sampled) & set(banned)
    wanted = [log_prob for group in groups for sample in group for log_prob in sample.log_probs]
    assert numpy.median(wanted) < -100  # so the bans are not in the log-probs, and were needed
    for settings in (
        SamplingSettings(num_samples=1, max_response_length=64, temperature=0, ignore_eos=True),
        SamplingSettings(num_samples=4, max_response_length=64, top_p=0.5, top_k=3, ignore_eos=True),
    ):
        groups = generator.generate(requests, settings)
        assert not {token for group in tokens(groups) for response in group for token in response} & set(banned)


def test_a_response_ends_with_its_first_end_token_or_at_the_limit(
    generator: Generator, requests: list[GenerationRequest], tiny_processing: Processing
) -> None:
    ends = set(tiny_processing.eos_token_ids)
    settings = SamplingSettings(num_samples=32, max_response_length=60)
    samples = [sample for group in generator.generate(requests, settings) for sample in group]
    assert 0 < sum(sample.finished for sample in samples) < len(samples) == 128
    for sample in samples:
        assert len(sample.response_ids) == len(sample.log_probs)
        assert not ends & set(sample.response_ids[:-1])
        assert (sample.response_ids[-1] in ends) == sample.finished
        assert sample.finished or len(sample.response_ids) == 60


def test_ignoring_end_tokens_fills_every_response_to_the_limit(
    generator: Generator, requests: list[GenerationRequest]
) -> None:
    settings = SamplingSettings(num_samples=32, max_response_length=60, ignore_eos=True)
    samples = [sample for group in generator.generate(requests, settings) for sample in group]
    assert {(len(sample.response_ids), sample.finished) for sample in samples} == {(60, False)}


@pytest.mark.parametrize(
    "settings",
    [
        SamplingSettings(num_samples=3, max_response_length=32),
        SamplingSettings(num_samples=3, max_response_length=32, temperature=0.6, top_p=0.9, top_k=20),
    ],
    ids=["plain", "filtered"],
)
def test_log_probs_are_those_of_a_plain_forward_pass_at_temperature_1_to_1e_5(
    generator: Generator, requests: list[GenerationRequest], tiny_model_folder: Path, settings: SamplingSettings
) -> None:
    groups = generator.generate(requests, settings)
    assert mean_gap(reference_model(tiny_model_folder), tiny_model_folder, requests, groups) < 1e-5


def test_temperature_0_takes_the_likeliest_token_that_is_not_banned(
    generator: Generator, requests: list[GenerationRequest], tiny_model_folder: Path, tiny_processing: Processing
) -> None:
    settings = SamplingSettings(num_samples=2, max_response_length=16, temperature=0)
    model = reference_model(tiny_model_folder)
    for prompt, group in zip(requests, generator.generate(requests, settings), strict=True):
        assert group[0] == group[1]
        logits = reference_logits(model, tiny_model_folder, prompt, group[0].response_ids)
        logits[:, list(tiny_processing.banned_token_ids)] = float("-inf")
        assert tuple(logits.argmax(dim=1).tolist()) == group[0].response_ids


def test_another_picture_gives_other_log_probs(generator: Generator, tiny_processing: Processing) -> None:
    settings = SamplingSettings(num_samples=1, max_response_length=1, temperature=0)
    prompts = [request(tiny_processing, "Find x.", [picture(seed)], seed=0) for seed in (1, 2)]
    one, other = (group[0].log_probs[0] for group in generator.generate(prompts, settings))
    assert abs(one - other) > 1e-3


def test_new_full_weights_are_followed_to_1e_5_tied_head_and_vision_tower_included(
    generator: Generator, requests: list[GenerationRequest], tiny_model_folder: Path, redrawn_weights: Redraw
) -> None:
    settings = SamplingSettings(num_samples=2, max_response_length=32)
    before = generator.generate(requests, settings)  # fills every cache under the old weights
    for seed in (2, 3):
        weights = redrawn_weights(seed)
        generator.sync_weights(FullWeights(tensors=weights))
        groups = generator.generate(requests, settings)
        assert tokens(groups) != tokens(before)
        model = reference_model(tiny_model_folder, weights)
        assert mean_gap(model, tiny_model_folder, requests, groups) < 1e-5


def test_full_weights_without_the_tied_head_are_refused(generator: Generator, redrawn_weights: Redraw) -> None:
    weights = redrawn_weights(2)
    del weights["lm_head.weight"]
    with pytest.raises(EngineError, match=r"lm_head\.weight"):
        generator.sync_weights(FullWeights(tensors=weights))


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


def test_new_adapters_are_followed_to_1e_5_one_after_the_other(
    adapter_generator: Generator, requests: list[GenerationRequest], tiny_model_folder: Path
) -> None:
    settings = SamplingSettings(num_samples=2, max_response_length=32)
    before = adapter_generator.generate(requests, settings)
    assert mean_gap(reference_model(tiny_model_folder), tiny_model_folder, requests, before) < 1e-5
    for seed in (1, 2, 3):
        model, weights = random_adapter(tiny_model_folder, seed=seed)
        adapter_generator.sync_weights(weights)
        groups = adapter_generator.generate(requests, settings)
        assert tokens(groups) != tokens(before)
        assert mean_gap(model, tiny_model_folder, requests, groups) < 1e-5
        before = groups


def resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="resident memory is read from /proc")
@pytest.mark.parametrize("adapter_generator", ["vllm"], indirect=True)
def test_vllm_keeps_nothing_of_12_rounds_of_adapters_and_pictures(
    adapter_generator: Generator, tiny_model_folder: Path, tiny_processing: Processing
) -> None:
    settings = SamplingSettings(num_samples=2, max_response_length=4, ignore_eos=True)
    sizes = []
    for number in range(16):
        adapter_generator.sync_weights(random_adapter(tiny_model_folder, seed=number)[1])
        adapter_generator.generate(
            [
                request(tiny_processing, "Find x.", [picture(100 * number + index, (384, 384))], seed=index)
                for index in range(8)
            ],
            settings,
        )
        sizes.append(resident_mib())
    # A round's pixels take 27 MiB once processed. Sizes go up and down with the allocator; their floor must not rise.
    assert min(sizes[-4:]) - min(sizes[4:8]) < 8


def test_adapters_that_do_not_fit_are_refused(adapter_generator: Generator, tiny_model_folder: Path) -> None:
    _, weights = random_adapter(tiny_model_folder, seed=1)
    name = next(iter(weights.tensors))
    tower = {name.replace("language_model", "visual"): tensor for name, tensor in weights.tensors.items()}
    adapter_generator.sync_weights(weights)
    for tensors in (tower, {name: weights.tensors[name][:1]}):
        with pytest.raises(EngineError):
            adapter_generator.sync_weights(AdapterWeights(tensors=tensors, adapter_config=weights.adapter_config))


def test_each_request_is_announced_once_with_its_own_responses(
    generator: Generator, requests: list[GenerationRequest]
) -> None:
    announced: dict[int, list[Generation]] = {}

    def note(index: int, group: list[Generation]) -> None:
        assert index not in announced
        announced[index] = group

    for settings in (
        SamplingSettings(num_samples=6, max_response_length=40),
        SamplingSettings(num_samples=6, max_response_length=8, temperature=0),
    ):
        announced.clear()
        groups = generator.generate(requests, settings, note)
        assert [announced[index] for index in range(4)] == groups == generator.generate(requests, settings)


def test_what_a_listener_raises_ends_the_call_and_the_engine_goes_on_serving(
    generator: Generator, requests: list[GenerationRequest]
) -> None:
    settings = SamplingSettings(num_samples=6, max_response_length=24)
    expected = tokens(generator.generate(requests, settings))
    heard: list[int] = []

    def fail(index: int, group: list[Generation]) -> None:
        heard.append(index)
        raise KeyError("no such thing")

    with pytest.raises(KeyError, match="no such thing"):
        generator.generate(requests, settings, fail)
    assert len(heard) == 1  # of 4: the others were under way
    assert tokens(generator.generate(requests, settings)) == expected


def prefix_hits(generator: Generator) -> tuple[float, float]:
    """(prompt tokens taken from the cache, prompt tokens of all samples) since the last call."""
    metric = generator.drain_metrics()["work/rollout_prefix_hits"]
    return metric.value, metric.weight


@pytest.fixture
def group_of_8(tiny_processing: Processing) -> list[GenerationRequest]:
    """One prompt with a picture, longer than 4 of vLLM's blocks."""
    return [request(tiny_processing, "Find the area. " * 8, [picture(5, (256, 256))], seed=3)]


def whole_blocks(prompt: GenerationRequest) -> int:
    """Tokens of vLLM's whole blocks; the last token of a prompt is always computed."""
    return (prompt.num_prompt_tokens - 1) // 32 * 32


def vision_tower(generator: Any) -> torch.nn.Module:
    if generator.name == "transformers":
        return generator._model.model.visual
    models: list[Any] = []
    generator._llm.apply_model(models.append)
    return models[0].visual


def tower_passes(generator: Generator, call: Callable[[], object]) -> int:
    """Pictures that went through the engine's vision tower during `call`."""
    seen: list[int] = []

    def count(_module: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        grids = keywords["grid_thw"] if "grid_thw" in keywords else args[1]
        seen.append(len(grids))

    handle = vision_tower(generator).register_forward_pre_hook(count, with_kwargs=True)
    try:
        call()
    finally:
        handle.remove()
    return sum(seen)


def test_a_group_of_8_computes_its_prompt_and_its_picture_once(
    generator: Generator, group_of_8: list[GenerationRequest]
) -> None:
    [prompt] = group_of_8
    settings = SamplingSettings(num_samples=8, max_response_length=8)
    generator.drain_metrics()
    assert tower_passes(generator, lambda: generator.generate(group_of_8, settings)) == 1
    hits, asked = prefix_hits(generator)
    assert asked == 8 * prompt.num_prompt_tokens
    shared = prompt.num_prompt_tokens if generator.name == "transformers" else whole_blocks(prompt)
    assert hits == 7 * shared
    assert 7 / 8 * (1 - 32 / prompt.num_prompt_tokens) < hits / asked <= 7 / 8
    assert generator.drain_metrics() == {}


@pytest.mark.parametrize("shared_generator", ["vllm"], indirect=True)
def test_new_weights_empty_vllms_caches(
    generator: Generator, group_of_8: list[GenerationRequest], redrawn_weights: Redraw
) -> None:
    shared = whole_blocks(group_of_8[0])
    settings = SamplingSettings(num_samples=8, max_response_length=8)
    before = generator.generate(group_of_8, settings)
    generator.drain_metrics()
    assert tower_passes(generator, lambda: generator.generate(group_of_8, settings)) == 0
    assert prefix_hits(generator)[0] == 8 * shared
    generator.sync_weights(FullWeights(tensors=redrawn_weights(2)))
    assert tower_passes(generator, lambda: generator.generate(group_of_8, settings)) == 1
    assert prefix_hits(generator)[0] == 7 * shared
    generator.sync_weights(FullWeights(tensors=redrawn_weights(1)))
    assert generator.generate(group_of_8, settings) == before


def test_a_changed_adapter_changes_a_repeated_prompts_log_probs_and_the_trainers_tensors_stay(
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
        assert sample.log_probs == pytest.approx(expected.tolist(), abs=1e-5)
        log_probs.append(sample.log_probs[0])
    assert abs(log_probs[0] - log_probs[1]) > 1e-3
    assert log_probs[2] == pytest.approx(log_probs[0], abs=1e-6)


def test_requests_that_cannot_be_served_end_with_one_message(
    generator: Generator, tiny_processing: Processing, requests: list[GenerationRequest]
) -> None:
    settings = SamplingSettings(num_samples=1, max_response_length=8)
    text = request(tiny_processing, "Find x.", seed=0)
    unmatched = GenerationRequest(
        prompt_ids=text.prompt_ids, num_prompt_tokens=text.num_prompt_tokens, images=(picture(1),), seed=0
    )
    with pytest.raises(EngineError, match=r"prompt 1 of the batch has 0 image placeholders .* and 1 images"):
        generator.generate([text, unmatched], settings)
    too_long = SamplingSettings(num_samples=1, max_response_length=MAX_MODEL_LEN)
    with pytest.raises(EngineError, match=r"max_model_len"):
        generator.generate([text], too_long)
    assert len(generator.generate(requests, settings)) == 4  # and the engine still serves


def test_generating_leaves_the_callers_randomness_and_threads_alone(
    generator: Generator, requests: list[GenerationRequest]
) -> None:
    set_num_threads, num_threads = torch.set_num_threads, torch.get_num_threads()

    def next_numbers() -> tuple[float, float, float]:
        torch_state, python_state, numpy_state = torch.get_rng_state(), random.getstate(), numpy.random.get_state()
        drawn = float(torch.rand(1)), random.random(), float(numpy.random.rand())
        torch.set_rng_state(torch_state)
        random.setstate(python_state)
        numpy.random.set_state(numpy_state)
        return drawn

    before = next_numbers()
    generator.generate(requests, SamplingSettings(num_samples=2, max_response_length=8))
    assert next_numbers() == before
    assert (torch.set_num_threads, torch.get_num_threads()) == (set_num_threads, num_threads)


@pytest.mark.parametrize("name", ["vllm", "transformers"])
def test_a_closed_generator_leaves_the_callers_process_group_and_refuses_work(
    name: str, tmp_path: Path, tiny_model_folder: Path, tiny_processing: Processing, requests: list[GenerationRequest]
) -> None:
    started_here = not torch.distributed.is_initialized()  # a training run in this process leaves its group behind
    if started_here:
        torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        generator = open_generator(name, tiny_model_folder, tiny_processing)
        settings = SamplingSettings(num_samples=2, max_response_length=4)
        assert [len(group) for group in generator.generate(requests, settings)] == [2, 2, 2, 2]
        generator.close()
        generator.close()
        with contextlib.closing(open_generator(name, tiny_model_folder, tiny_processing)) as another:
            assert len(another.generate(requests, settings)) == 4
        ones = torch.ones(1)
        torch.distributed.all_reduce(ones)
        assert ones.item() == 1
        with pytest.raises(EngineError, match="closed"):
            generator.generate(requests, settings)
    finally:
        if started_here:
            torch.distributed.destroy_process_group()


@pytest.mark.parametrize("name", ["vllm", "transformers"])
def test_a_checkpoint_that_is_not_there_is_named(name: str, tmp_path: Path, tiny_processing: Processing) -> None:
    missing = tmp_path / "no-model"
    with pytest.raises((EngineError, ConfigError), match="no-model"):
        open_generator(name, missing, tiny_processing)


def test_auto_says_that_transformers_stands_in_where_vllm_is_not_installed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "vllm" else find_spec(name))
    with caplog.at_level(logging.WARNING):
        assert choose_generator("auto", device="cpu") == "transformers"
    assert "vLLM is not installed: the transformers generator stands in; sampling is slower" in caplog.text
    with pytest.raises(ConfigError, match="vLLM is not installed"):
        choose_generator("vllm", device="cpu")
    with pytest.raises(ConfigError, match="auto, vllm, transformers"):
        choose_generator("sglang", device="cpu")


def counts(logits: list[float], **settings: Any) -> list[int]:
    """How often each token is drawn over 1000 evenly spread uniform numbers."""
    row = torch.tensor(logits).expand(1000, -1)
    points = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    chosen: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, "top_k": -1} | settings
    drawn = draw_tokens(row, points, torch.tensor([3]), **chosen)
    return torch.bincount(drawn, minlength=row.shape[1]).tolist()


def test_draws_follow_the_distribution_without_banned_and_filtered_tokens() -> None:
    logits = [math.log(weight) for weight in (0.1, 0.5, 0.4, 1000.0)]  # the last token is banned
    assert counts(logits) == [100, 500, 400, 0]
    assert counts(logits, top_k=2) == [0, 556, 444, 0]  # 5/9 and 4/9
    assert counts(logits, top_p=0.5) == [0, 1000, 0, 0]
    assert counts(logits, top_p=0.51) == [0, 556, 444, 0]
    assert counts(logits, temperature=0.5) == [24, 595, 381, 0]  # squares: 1, 25, 16 of 42
    assert counts(logits, temperature=0.0) == [0, 1000, 0, 0]


def test_a_rows_uniform_numbers_depend_on_seed_and_sample_and_not_on_how_many_are_drawn() -> None:
    assert torch.equal(row_uniforms(7, 2, 10), row_uniforms(7, 2, 50)[:10])
    assert len({float(row_uniforms(seed, sample, 1)) for seed in range(30) for sample in range(30)}) == 900


def test_logits_that_are_not_numbers_end_the_draw() -> None:
    with pytest.raises(EngineError, match="NaN"):
        counts([0.0, float("nan"), 0.0, 0.0])
