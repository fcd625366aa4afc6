"""How a generator is chosen, opened and closed, and how many threads vLLM prepares images on."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import logging
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from generator_cases import LORA_RANK, open_generator, picture, random_adapter, request, tokens

from cepo.errors import ConfigError, EngineError
from cepo.models.cpu.fused_decoding import FusedDecoder, fused_decoder
from cepo.models.families import FAMILIES
from cepo.models.processing import Processing
from cepo.rollout import transformers_generator, vllm_engine, vllm_process
from cepo.rollout.factory import MOST_BANNED_ON_GPU, choose_generator
from cepo.rollout.generator import GenerationRequest, GeneratorSettings, SamplingSettings

pytestmark = pytest.mark.heavy


@pytest.fixture
def _process_group(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone; a training run before may have left one behind."""
    if torch.distributed.is_initialized():
        yield
        return
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("_process_group")
def test_a_closed_generator_leaves_the_process_group(
    tiny_model_folder: Path,
    tiny_processing: Processing,
    requests: list[GenerationRequest],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A GPU's allocator aborts when a pool is released that holds living tensors; vLLM's worker releases them last."""
    pytest.importorskip("vllm", reason="vLLM is not installed")
    from vllm.v1.worker.gpu_worker import Worker

    generator: Any = open_generator("vllm", tiny_model_folder, tiny_processing, lora_rank=LORA_RANK)
    generator.sync_weights(random_adapter(tiny_model_folder, seed=1)[1])
    settings = SamplingSettings(num_samples=2, max_response_length=4)
    assert [len(group) for group in generator.generate(requests, settings)] == [2, 2, 2, 2]
    (model,) = generator._llm.collective_rpc(lambda worker: weakref.ref(worker.model_runner.get_model()))
    assert model() is not None
    lived: list[bool] = []
    plain = Worker.shutdown

    def shutdown(worker: Any) -> None:
        lived.append(model() is not None)
        plain(worker)

    monkeypatch.setattr(Worker, "shutdown", shutdown)
    generator.close()
    generator.close()
    assert lived == [False]
    with contextlib.closing(open_generator("vllm", tiny_model_folder, tiny_processing)) as another:
        assert len(another.generate(requests, settings)) == 4
    of_one_rank = torch.ones(1)
    torch.distributed.all_reduce(of_one_rank)
    assert of_one_rank.item() == 1
    with pytest.raises(EngineError, match="closed"):
        generator.generate(requests, settings)


def test_a_resting_generator_keeps_no_copy_of_the_weights(
    tiny_model_folder: Path,
    tiny_processing: Processing,
    requests: list[GenerationRequest],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The trainer's passes need that memory; the next responses are those of the same weights."""
    decoders: list[weakref.ref[FusedDecoder]] = []

    def recorded(model: Any) -> FusedDecoder | None:
        decoder = fused_decoder(model)
        assert decoder is not None
        decoders.append(weakref.ref(decoder))
        return decoder

    monkeypatch.setattr(transformers_generator, "fused_decoder", recorded)
    settings = SamplingSettings(num_samples=2, max_response_length=4)
    with contextlib.closing(
        open_generator("transformers", tiny_model_folder, tiny_processing, lora_rank=LORA_RANK)
    ) as generator:
        generator.sync_weights(random_adapter(tiny_model_folder, seed=1)[1])
        first = tokens(generator.generate(requests, settings))
        assert tokens(generator.generate(requests, settings)) == first
        assert [decoder() is None for decoder in decoders] == [False], "calls of one phase share the decoder"
        generator.rest()
        assert decoders[0]() is None
        assert tokens(generator.generate(requests, settings)) == first
        assert len(decoders) == 2


@pytest.mark.parametrize("name", ["vllm", "transformers"])
def test_a_checkpoint_that_is_not_there_is_named(name: str, tmp_path: Path, tiny_processing: Processing) -> None:
    missing = tmp_path / "no-model"
    with pytest.raises((EngineError, ConfigError), match="no-model"):
        open_generator(name, missing, tiny_processing)


def test_auto_says_that_transformers_replaces_vllm(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "vllm" else find_spec(name))
    settings = GeneratorSettings(model_path="org/model", dtype="bf16", max_model_len=8)
    with caplog.at_level(logging.WARNING):
        assert choose_generator(settings, FAMILIES[0], "cpu") == "transformers"
    assert "vLLM is not installed: the transformers generator is used instead, which samples more slowly" in caplog.text
    with pytest.raises(ConfigError, match="vLLM is not installed"):
        choose_generator(dataclasses.replace(settings, name="vllm"), FAMILIES[0], "cpu")


def test_more_bans_than_vllms_gpu_sampler_takes_are_refused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a GPU, where tokens are drawn by the trainer's own code, their number has no limit."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(torch.version, "cuda", None)
    settings = GeneratorSettings(model_path="org/model", dtype="bf16", max_model_len=8)
    assert choose_generator(settings, FAMILIES[0], "cpu", num_banned=151_449) == "vllm"
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert choose_generator(settings, FAMILIES[0], "cuda", num_banned=1024) == "vllm"
    with caplog.at_level(logging.WARNING):
        assert choose_generator(settings, FAMILIES[0], "cuda", num_banned=1025) == "transformers"
    assert "1,025 of the model's token ids must never be sampled" in caplog.text
    with pytest.raises(ConfigError, match=r"bans at most 1,024 \(MAX_NUM_LOGIT_BIAS_TOKENS\); give the model's full"):
        choose_generator(dataclasses.replace(settings, name="vllm"), FAMILIES[0], "cuda", num_banned=1025)


@pytest.mark.heavy
def test_the_limit_of_bans_is_the_installed_vllms() -> None:
    limits = pytest.importorskip("vllm.v1.worker.gpu.sample.logit_bias", reason="vLLM is not installed")
    assert limits.MAX_NUM_LOGIT_BIAS_TOKENS == MOST_BANNED_ON_GPU


def test_images_on_several_threads_give_one_threads_samples(
    tiny_model_folder: Path, tiny_processing: Processing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The case is vLLM's CPU build without its cache of prepared images, as on a GPU."""
    pytest.importorskip("vllm", reason="vLLM is not installed")
    options = vllm_process.engine_options
    settings = SamplingSettings(num_samples=2, max_response_length=8)
    prompts = [
        request(tiny_processing, "Find x.", [picture(index, (64, 64 + 32 * (index % 3)))], seed=index)
        for index in range(12)
    ]
    monkeypatch.setattr(
        vllm_process, "engine_options", lambda *given, **named: options(*given, **named) | {"mm_processor_cache_gb": 0}
    )
    generator: Any = open_generator("vllm", tiny_model_folder, tiny_processing)
    with contextlib.closing(generator):
        monkeypatch.setattr(vllm_engine, "num_processors", lambda: 1)
        expected = tokens(generator.generate(prompts, settings))
        renderer = generator._llm.renderer
        names = list[str]()
        process = renderer._process_multimodal
        together = threading.Barrier(2)

        def process_and_note(*given: Any, **named: Any) -> Any:
            name = threading.current_thread().name
            if name.startswith(vllm_engine.PREPARING) and name not in names:
                together.wait(timeout=60)  # the first of each thread: two at a time, or this breaks
            names.append(name)
            return process(*given, **named)

        monkeypatch.setattr(vllm_engine, "num_processors", lambda: 2)
        monkeypatch.setattr(renderer, "_process_multimodal", process_and_note)
        assert tokens(generator.generate(prompts, settings)) == expected
        assert len({name for name in names if name.startswith(vllm_engine.PREPARING)}) == 2
        assert not names[0].startswith(vllm_engine.PREPARING), "the first prompt goes alone"

        def fails(*given: Any, **named: Any) -> Any:
            raise ValueError("no image")

        monkeypatch.setattr(renderer, "_process_multimodal", fails)
        with pytest.raises(EngineError, match="no image"):
            generator.generate(prompts, settings)


def test_the_start_names_what_it_is_busy_with_and_draws_no_bars(
    tiny_model_folder: Path, tiny_processing: Processing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's log is silent below warnings, and its bars of graphs have no switch."""
    phases: list[str] = []

    @contextlib.contextmanager
    def noting(what: str, *, is_brief: bool = False) -> Iterator[None]:
        phases.append(what)
        yield

    monkeypatch.setattr(vllm_process, "phase", noting)
    with contextlib.closing(open_generator("vllm", tiny_model_folder, tiny_processing)):
        pass
    compiling, graphs = vllm_process._STAGES_OF_START.values()
    assert [phases[0], *dict.fromkeys(phases[1:])] == ["starting vLLM: this takes seconds", compiling, graphs]


def test_layers_without_an_adapter_are_not_reported_one_by_one(caplog: pytest.LogCaptureFixture) -> None:
    vllm_process.prepare_environment(on_gpu=False)
    logger = logging.getLogger("vllm.lora.model_manager")
    with caplog.at_level(logging.WARNING, logger.name):
        logger.addHandler(caplog.handler)
        logger.warning(
            "Regarding %s, no matching PunicaWrapper is found; %s will be ignored.", "Qwen3VL", "visual.blocks.0"
        )
        logger.warning("another %s", "message")
    logger.removeHandler(caplog.handler)
    assert set(caplog.messages) == {"another message"}
