"""How a generator is chosen, opened and closed."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
from pathlib import Path

import pytest
import torch
from generator_cases import open_generator

from cepo.errors import ConfigError, EngineError
from cepo.models.processing import Processing
from cepo.rollout.factory import choose_generator
from cepo.rollout.generator import GenerationRequest, SamplingSettings

pytestmark = pytest.mark.heavy


@pytest.mark.parametrize("name", ["vllm", "transformers"])
def test_a_closed_generator_leaves_the_process_group(
    name: str, tmp_path: Path, tiny_model_folder: Path, tiny_processing: Processing, requests: list[GenerationRequest]
) -> None:
    """It leaves the caller's group and refuses work."""
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


def test_auto_says_that_transformers_replaces_vllm(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It says so where vLLM is not installed."""
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "vllm" else find_spec(name))
    with caplog.at_level(logging.WARNING):
        assert choose_generator("auto", device="cpu") == "transformers"
    assert "vLLM is not installed: the transformers generator is used instead, which samples more slowly" in caplog.text
    with pytest.raises(ConfigError, match="vLLM is not installed"):
        choose_generator("vllm", device="cpu")
