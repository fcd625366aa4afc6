"""Both generators with the weights of a whole checkpoint: what they draw, say of it and keep, against a plain forward pass."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import random
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from generator_cases import (
    MAX_MODEL_LEN,
    Redraw,
    mean_gap,
    open_generator,
    picture,
    reference_logits,
    reference_model,
    request,
    tokens,
)
from rounding import LOG_PROBS

from cepo.errors import EngineError
from cepo.models.processing import Processing
from cepo.rollout.generator import FullWeights, Generation, GenerationRequest, Generator, SamplingSettings
from cepo.rollout.transformers_generator import draw_tokens, row_uniforms
from cepo.terminal.progress import Progress

pytestmark = pytest.mark.heavy


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


def test_a_sample_depends_on_its_prompt_seed_and_number_alone(
    generator: Generator, requests: list[GenerationRequest], tiny_processing: Processing
) -> None:
    settings = SamplingSettings(num_samples=2, max_response_length=16)
    together = tokens(generator.generate(requests, settings))
    assert tokens(generator.generate(requests, settings)) == together
    many = tokens(generator.generate(requests, dataclasses.replace(settings, num_samples=5)))
    assert [len(group) for group in many] == [5, 5, 5, 5]
    assert [group[:2] for group in many] == together
    for index, prompt in enumerate(requests):
        assert tokens(generator.generate([prompt], settings)) == [together[index]]
    # 12 streams of one prompt: seeds 0, 1, 2 share no sample, not even shifted by one.
    prompts = [request(tiny_processing, "Find x.", [picture(1)], seed=seed) for seed in (0, 1, 2)]
    groups = generator.generate(prompts, SamplingSettings(num_samples=4, max_response_length=24))
    assert len({sample for group in tokens(groups) for sample in group}) == 12


@pytest.mark.skipif(torch.version.cuda is not None, reason="on a GPU vLLM draws with its own random streams")
@pytest.mark.parametrize("shared_generator", ["vllm"], indirect=True)
@pytest.mark.parametrize(("presence_penalty", "num_samples"), [(0.0, 24), (2.0, 16)])
def test_both_generators_draw_the_same_tokens_on_a_cpu(
    generator: Generator,
    requests: list[GenerationRequest],
    tiny_model_folder: Path,
    tiny_processing: Processing,
    presence_penalty: float,
    num_samples: int,
) -> None:
    """vLLM reads the prompts in pieces. Two samples may part only at a draw that rounding decides."""
    settings = SamplingSettings(
        num_samples=num_samples,
        max_response_length=24,
        temperature=0.8,
        top_p=0.95,
        top_k=100,
        presence_penalty=presence_penalty,
    )
    # The samples' prompts together are longer than the 2048 tokens of one pass.
    assert presence_penalty or num_samples * sum(prompt.num_prompt_tokens for prompt in requests) > 2048
    ours = generator.generate(requests, settings)
    with contextlib.closing(open_generator("transformers", tiny_model_folder, tiny_processing)) as our_generator:
        theirs = our_generator.generate(requests, settings)
    model = reference_model(tiny_model_folder)
    banned = torch.tensor(tiny_processing.banned_token_ids)
    for prompt, first, second in zip(requests, tokens(ours), tokens(theirs), strict=True):
        for sample, pair in enumerate(zip(first, second, strict=True)):
            our_tokens, their_tokens = pair
            if our_tokens == their_tokens:
                continue
            is_same = [ours_at == theirs_at for ours_at, theirs_at in zip(*pair, strict=False)]
            place = is_same.index(False)
            logits = reference_logits(model, tiny_model_folder, prompt, our_tokens[: place + 1])[place:]
            uniform = row_uniforms(prompt.seed, sample, 24)[place]
            drawn = draws_within_rounding(logits, our_tokens[:place], uniform, banned, settings)
            assert {our_tokens[place], their_tokens[place]} <= drawn


@pytest.mark.skipif(torch.version.cuda is not None, reason="the limits of lengths are those of the CPU's draws")
@pytest.mark.parametrize("shared_generator", ["vllm"], indirect=True)
def test_responses_are_counted_as_they_end(
    generator: Generator, requests: list[GenerationRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: one request asks for all its samples, and ends with the last of them. They ended with it in the display."""
    monkeypatch.setattr(generator, "_draws_itself", False)
    often_ended = {"ignore_eos": True, "detokenize": False, "stop_token_ids": list(range(60))}
    monkeypatch.setattr("cepo.rollout.vllm_engine.stopping", lambda end, ignore_eos: often_ended)
    reached: list[tuple[int, str]] = []
    monkeypatch.setattr(Progress, "reach", lambda self, done, detail="": reached.append((done, detail)))
    settings = SamplingSettings(num_samples=12, max_response_length=48)
    (group,) = generator.generate(requests[:1], settings)
    ends = sorted(len(generation.response_ids) for generation in group)
    assert len({end for end in ends if end < 48}) > 1, "responses end at different tokens"
    num_done = [done for done, _ in reached]
    assert num_done == sorted(num_done)
    assert num_done[-1] == 12
    assert len(set(num_done)) >= len(set(ends))
    assert reached[-1][1] == f"{len(reached)} steps of vLLM"


def draws_within_rounding(
    logits: torch.Tensor,
    output: tuple[int, ...],
    uniform: torch.Tensor,
    banned: torch.Tensor,
    settings: SamplingSettings,
) -> set[int]:
    """The tokens drawn when all log-probs are LOG_PROBS off, which moves a cumulative probability by no more than that."""
    points = (uniform + torch.tensor([-LOG_PROBS, 0.0, LOG_PROBS])).clamp(0, 1)
    drawn: set[int] = set()
    for edge in (-LOG_PROBS, 0.0, LOG_PROBS):
        moved = dataclasses.replace(settings, top_p=settings.top_p + edge)
        drawn.update(draw_tokens(logits.expand(3, -1), [output] * 3, points, banned, moved).tolist())
    return drawn


def responses_of(groups: Iterable[Sequence[Generation]]) -> list[Generation]:
    return list(itertools.chain.from_iterable(groups))


def test_a_presence_penalty_keeps_tokens_from_coming_again(
    generator: Generator, requests: list[GenerationRequest]
) -> None:
    """A penalty beyond all logits: the 24 tokens of a response are 24 different ones, whatever was likeliest."""
    settings = SamplingSettings(num_samples=3, max_response_length=24, top_k=40, ignore_eos=True)
    groups = generator.generate(requests, dataclasses.replace(settings, presence_penalty=1e4))
    num_different = [len(set(sample.response_ids)) for sample in responses_of(groups)]
    assert num_different == [24] * 12
    groups_without_penalty = generator.generate(requests, settings)
    assert min(len(set(sample.response_ids)) for sample in responses_of(groups_without_penalty)) < 24


def test_banned_tokens_never_come_in_768_tokens(
    generator: Generator, requests: list[GenerationRequest], redrawn_weights: Redraw, tiny_processing: Processing
) -> None:
    banned = list(tiny_processing.banned_token_ids)
    weights = redrawn_weights(1)
    weights["lm_head.weight"][banned] *= 500  # logits of hundreds: a bias of -100 would not hold them
    generator.sync_weights(FullWeights(tensors=weights))
    settings = SamplingSettings(num_samples=12, max_response_length=16, ignore_eos=True)
    samples = responses_of(generator.generate(requests, settings))
    sampled: list[int] = []
    log_probs: list[float] = []
    for sample in samples:
        sampled += sample.response_ids.tolist()
        log_probs += sample.log_probs.tolist()
    assert len(sampled) == 4 * 12 * 16
    assert not set(sampled) & set(banned)
    assert numpy.median(log_probs) < -100  # so the bans are not in the log-probs, and were needed
    for settings in (
        SamplingSettings(num_samples=1, max_response_length=16, temperature=0, ignore_eos=True),
        SamplingSettings(num_samples=4, max_response_length=16, top_p=0.5, top_k=3, ignore_eos=True),
    ):
        for sample in responses_of(generator.generate(requests, settings)):
            assert not set(sample.response_ids.tolist()) & set(banned)


def test_a_response_ends_at_its_first_end_token_or_the_limit(
    generator: Generator, requests: list[GenerationRequest], tiny_processing: Processing
) -> None:
    ends = set(tiny_processing.eos_token_ids)
    settings = SamplingSettings(num_samples=16, max_response_length=40)
    samples = responses_of(generator.generate(requests, settings))
    assert 0 < sum(sample.finished for sample in samples) < len(samples) == 64
    for sample in samples:
        assert len(sample.response_ids) == len(sample.log_probs)
        assert not ends & set(sample.response_ids[:-1])
        assert (sample.response_ids[-1] in ends) == sample.finished
        assert sample.finished or len(sample.response_ids) == 40
    for sample in responses_of(generator.generate(requests, dataclasses.replace(settings, ignore_eos=True))):
        assert len(sample.response_ids) == 40
        assert not sample.finished


def test_log_probs_of_filtered_samples_are_a_forward_passes(
    generator: Generator, requests: list[GenerationRequest], tiny_model_folder: Path
) -> None:
    """To 1e-5, at temperature 1; for samples of the whole distribution see the test of new weights."""
    settings = SamplingSettings(num_samples=3, max_response_length=32, temperature=0.6, top_p=0.9, top_k=20)
    groups = generator.generate(requests, settings)
    assert mean_gap(reference_model(tiny_model_folder), tiny_model_folder, requests, groups) < LOG_PROBS


def test_temperature_0_takes_the_likeliest_allowed_token(
    generator: Generator, requests: list[GenerationRequest], tiny_model_folder: Path, tiny_processing: Processing
) -> None:
    settings = SamplingSettings(num_samples=2, max_response_length=16, temperature=0)
    model = reference_model(tiny_model_folder)
    for prompt, group in zip(requests, generator.generate(requests, settings), strict=True):
        assert group[0].response_ids.tolist() == group[1].response_ids.tolist()
        logits = reference_logits(model, tiny_model_folder, prompt, group[0].response_ids)
        logits[:, list(tiny_processing.banned_token_ids)] = float("-inf")
        assert logits.argmax(dim=1).tolist() == group[0].response_ids.tolist()


def test_new_full_weights_are_followed_to_1e_5(
    generator: Generator, requests: list[GenerationRequest], tiny_model_folder: Path, redrawn_weights: Redraw
) -> None:
    """Prompts and images that are cached under the old weights are computed again."""
    settings = SamplingSettings(num_samples=2, max_response_length=32)
    groups_of_first_weights = generator.generate(requests, settings)
    for seed in (2, 3):
        weights = redrawn_weights(seed)
        generator.sync_weights(FullWeights(tensors=weights))
        groups = generator.generate(requests, settings)
        assert tokens(groups) != tokens(groups_of_first_weights)
        model = reference_model(tiny_model_folder, weights)
        assert mean_gap(model, tiny_model_folder, requests, groups) < LOG_PROBS


def test_full_weights_without_the_tied_head_are_refused(generator: Generator, redrawn_weights: Redraw) -> None:
    weights = redrawn_weights(2)
    del weights["lm_head.weight"]
    with pytest.raises(EngineError, match=r"lm_head\.weight"):
        generator.sync_weights(FullWeights(tensors=weights))


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
        assert [announced[index] for index in range(4)] == groups  # the same objects
        again = generator.generate(requests, settings)
        assert tokens(groups) == tokens(again)
        for group, group_again in zip(groups, again, strict=True):
            for sample, sample_again in zip(group, group_again, strict=True):
                assert sample.log_probs.tolist() == sample_again.log_probs.tolist()


def test_what_a_listener_raises_ends_only_the_call(generator: Generator, requests: list[GenerationRequest]) -> None:
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


def test_a_group_of_8_computes_its_prompt_and_its_picture_once(generator: Any, tiny_processing: Processing) -> None:
    """vLLM shares whole blocks of 32 tokens, always computes the last token of a prompt, and draws through its layers."""
    prompt = request(tiny_processing, "Find the area. " * 8, [picture(5, (256, 256))], seed=3)
    models = list[Any]()
    pictures = list[int]()
    computed = list[int]()

    def count_pictures(_module: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        pictures.append(len(keywords["grid_thw"] if "grid_thw" in keywords else args[1]))

    def count_tokens(_module: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        hidden = next(argument for argument in (*args, *keywords.values()) if argument.is_floating_point())
        computed.append(hidden.numel() // hidden.shape[-1])

    if generator.name == "transformers":
        models.append(generator._model.model)
        layer = models[0].language_model.layers[0]
    else:
        generator._llm.apply_model(models.append)
        layer = models[0].language_model.model.layers[0]
    with (
        models[0].visual.register_forward_pre_hook(count_pictures, with_kwargs=True),
        layer.register_forward_pre_hook(count_tokens, with_kwargs=True),
    ):
        (group,) = generator.generate([prompt], SamplingSettings(num_samples=8, max_response_length=8))
    assert sum(pictures) == 1
    length = prompt.num_prompt_tokens
    again = 7 * (length - (length - 1) // 32 * 32) + sum(len(sample.response_ids) - 1 for sample in group)
    assert sum(computed) == length + (again if generator.name == "vllm" else 0)


def test_a_prompt_that_is_too_long_ends_only_the_call(generator: Generator, requests: list[GenerationRequest]) -> None:
    settings = SamplingSettings(num_samples=1, max_response_length=8)
    with pytest.raises(EngineError, match=r"max_model_len"):
        generator.generate(requests, dataclasses.replace(settings, max_response_length=MAX_MODEL_LEN))
    assert len(generator.generate(requests, settings)) == 4


def test_generating_keeps_the_callers_randomness_and_threads(
    generator: Generator, requests: list[GenerationRequest]
) -> None:
    set_num_threads = torch.set_num_threads
    num_threads = torch.get_num_threads()

    def next_numbers() -> tuple[float, float, float]:
        torch_state = torch.get_rng_state()
        python_state = random.getstate()
        numpy_state = numpy.random.get_state()
        drawn = float(torch.rand(1)), random.random(), float(numpy.random.rand())
        torch.set_rng_state(torch_state)
        random.setstate(python_state)
        numpy.random.set_state(numpy_state)
        return drawn

    numbers = next_numbers()
    generator.generate(requests, SamplingSettings(num_samples=2, max_response_length=8))
    assert next_numbers() == numbers
    assert torch.set_num_threads == set_num_threads
    assert torch.get_num_threads() == num_threads
