"""Measures sampling on this processor: cepo's generator beside transformers' `generate`, as it is and compiled.

    python -m lab.compiled_sampling --model FOLDER [--threads N]

All sides sample equally many tokens from one float32 text model: 64 responses of 40 tokens to 16 prompts of 53 random
tokens. They alternate in one process, and processor time is compared, which other work on the machine hardly changes.
The compiled side has transformers' static cache and `torch.compile`, which needs a C++ compiler; its first call compiles.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.generation import CompileConfig, GenerationConfig

from cepo.models.processing import Processing
from cepo.rollout.generator import GenerationRequest, GeneratorSettings, SamplingSettings
from cepo.rollout.transformers_generator import TransformersGenerator
from lab.support.machine import machine_record
from lab.support.paired import paired_ratio
from lab.support.tables import RESULTS, save, table

PROMPTS = 16
PROMPT_TOKENS = 53
RESPONSES = 4
"""To each prompt."""
RESPONSE_TOKENS = 40
TEMPERATURE = 0.8
CEPO = "cepo"


def random_prompts(vocabulary: int) -> Tensor:
    """Returns token ids (prompts, tokens), without special tokens, which stand at the beginning of the vocabulary."""
    numbers = torch.Generator().manual_seed(1)
    return torch.randint(vocabulary // 2, vocabulary, (PROMPTS, PROMPT_TOKENS), generator=numbers)


def cepo_side(folder: str, prompts: Tensor) -> Callable[[], None]:
    """Returns a function that samples by the generator of `worker.rollout.name=transformers`."""
    settings = GeneratorSettings(model_path=folder, dtype="fp32", max_model_len=PROMPT_TOKENS + RESPONSE_TOKENS)
    generator = TransformersGenerator(settings, Processing(folder), device="cpu")
    requests: list[GenerationRequest] = []
    for number, tokens in enumerate(prompts.tolist()):
        requests.append(
            GenerationRequest(prompt_ids=tuple(tokens), num_prompt_tokens=PROMPT_TOKENS, images=(), seed=number)
        )
    sampling = SamplingSettings(
        num_samples=RESPONSES,
        max_response_length=RESPONSE_TOKENS,
        temperature=TEMPERATURE,
        ignore_eos=True,
    )

    def sample() -> None:
        groups = generator.generate(requests, sampling)
        lengths = {len(generation.response_ids) for group in groups for generation in group}
        assert lengths == {RESPONSE_TOKENS}, lengths

    return sample


def generate_side(model: Any, prompts: Tensor, **settings: Any) -> Callable[[], None]:
    """Returns a function that samples by transformers' `generate` with these settings."""
    config = GenerationConfig(
        do_sample=True,
        temperature=TEMPERATURE,
        top_k=0,
        num_return_sequences=RESPONSES,
        min_new_tokens=RESPONSE_TOKENS,
        max_new_tokens=RESPONSE_TOKENS,
        pad_token_id=0,
        **settings,
    )

    def sample() -> None:
        sequences = model.generate(prompts, generation_config=config)
        expected = (PROMPTS * RESPONSES, PROMPT_TOKENS + RESPONSE_TOKENS)
        assert sequences.shape == expected, sequences.shape

    return sample


def compiled_settings() -> dict[str, Any]:
    """Returns the settings under which `generate` compiles its decoding step on a CPU too."""
    compiled = CompileConfig(fullgraph=False, mode="default")
    compiled._compile_all_devices = True  # pyright: ignore[reportPrivateUsage] # else transformers compiles on GPUs alone
    return {"cache_implementation": "static", "compile_config": compiled}


def measured(sides: Mapping[str, Callable[[], None]], runs: int) -> dict[str, dict[str, Any]]:
    """Returns each side's first call's seconds on the clock, and the processor seconds of the `runs` calls after it."""
    found: dict[str, dict[str, Any]] = {}
    for name, sample in sides.items():
        start = time.perf_counter()
        sample()
        found[name] = {"first_call_seconds": time.perf_counter() - start, "processor_seconds": []}
        print(name, found[name], flush=True)
    for _ in range(runs):
        for name, sample in sides.items():
            start = time.process_time()
            sample()
            found[name]["processor_seconds"].append(time.process_time() - start)
    return found


def main(argv: list[str] | None = None) -> int:
    """Measures all sides, writes the record, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of a text model")
    parser.add_argument("--runs", type=int, default=3, help="measured calls of each side, after a first one")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS / "compiled_sampling.json")
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    model: Any = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    prompts = random_prompts(model.config.vocab_size)
    sides = {
        CEPO: cepo_side(options.model, prompts),
        "generate": generate_side(model, prompts),
        "generate, static cache, compiled": generate_side(model, prompts, **compiled_settings()),
    }
    found = measured(sides, options.runs)
    rows: list[list[str]] = []
    for name, side in found.items():
        seconds = statistics.median(side["processor_seconds"])
        ratio = paired_ratio(side["processor_seconds"], found[CEPO]["processor_seconds"]).median
        rows.append([name, f"{side['first_call_seconds']:.1f}", f"{seconds:.1f}", f"{ratio:.2f}"])
    printed = table(["side", "first call, s", "processor s", "relative to cepo"], rows)
    work = {
        "prompts": PROMPTS,
        "prompt_tokens": PROMPT_TOKENS,
        "responses": RESPONSES,
        "response_tokens": RESPONSE_TOKENS,
    }
    save({"work": work, "sides": found, "machine": machine_record(options.threads)}, [printed], options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
