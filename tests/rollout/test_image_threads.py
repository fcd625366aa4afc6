"""vLLM's images are prepared on several threads where its cache of prepared images is off, as on a GPU."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from generator_cases import open_generator, picture, request, tokens

from cepo.errors import EngineError
from cepo.models.processing import Processing
from cepo.rollout import vllm_engine, vllm_process
from cepo.rollout.generator import GenerationRequest, SamplingSettings

pytestmark = pytest.mark.heavy
SETTINGS = SamplingSettings(num_samples=2, max_response_length=8)


@contextlib.contextmanager
def generator(folder: Path, processing: Processing) -> Iterator[Any]:
    """vLLM's CPU build without its cache of prepared images, as on a GPU."""
    pytest.importorskip("vllm", reason="vLLM is not installed")
    options = vllm_process.engine_options
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm_process, "engine_options", lambda *given: options(*given) | {"mm_processor_cache_gb": 0})
        with contextlib.closing(open_generator("vllm", folder, processing)) as found:
            yield found


@pytest.fixture(scope="module")
def prompts(tiny_processing: Processing) -> list[GenerationRequest]:
    return [
        request(tiny_processing, "Find x.", [picture(index, (64, 64 + 32 * (index % 3)))], seed=index)
        for index in range(12)
    ]


def test_images_on_several_threads_give_one_threads_samples(
    tiny_model_folder: Path,
    tiny_processing: Processing,
    prompts: list[GenerationRequest],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The case has 12 images. A bad one leaves the engine usable."""
    with generator(tiny_model_folder, tiny_processing) as threaded:
        monkeypatch.setattr(vllm_engine, "num_processors", lambda: 1)
        expected = tokens(threaded.generate(prompts, SETTINGS))
        renderer, names = threaded._llm.renderer, list[str]()
        process, together = renderer._process_multimodal, threading.Barrier(2)

        def process_and_note(*given: Any, **named: Any) -> Any:
            name = threading.current_thread().name
            if name.startswith(vllm_engine.PREPARING) and name not in names:
                together.wait(timeout=60)  # the first of each thread: two at a time, or this breaks
            names.append(name)
            return process(*given, **named)

        monkeypatch.setattr(vllm_engine, "num_processors", lambda: 2)
        monkeypatch.setattr(renderer, "_process_multimodal", process_and_note)
        assert tokens(threaded.generate(prompts, SETTINGS)) == expected
        assert len({name for name in names if name.startswith(vllm_engine.PREPARING)}) == 2
        assert not names[0].startswith(vllm_engine.PREPARING), "the first prompt goes alone"

        def fails(*given: Any, **named: Any) -> Any:
            raise ValueError("no image")

        monkeypatch.setattr(renderer, "_process_multimodal", fails)
        with pytest.raises(EngineError, match="no image"):
            threaded.generate(prompts, SETTINGS)
        monkeypatch.setattr(renderer, "_process_multimodal", process)
        assert tokens(threaded.generate(prompts, SETTINGS)) == expected
