"""Runs vLLM's CUDA build on the hollow GPU, from its start to its close, with the trainer's own generator.

    python -m lab.gpu_dry.engine MODEL {adapter|full} [RANKS DEVICES [alone]]

MODEL is of `SHAPES` or `PUBLISHED`. An adapter runs with CUDA graphs, all weights run eagerly. Kernels compute nothing, so
tokens and log-probs mean nothing: `hollow_vllm` puts tokens in their place. Memory is accounted, and memory that sleeps may
not be touched. With several RANKS, each is a process with a card, and DEVICES neighbouring ones share an engine; the
first one may be `alone`.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from lab.gpu_dry.cards import report
from lab.gpu_dry.checkpoint import write_model
from lab.gpu_dry.hollow_vllm import stand_in
from lab.gpu_dry.partners import alone, met, this_rank
from lab.gpu_dry.published import PUBLISHED
from testing.rows import generation_requests
from testing.shapes import SHAPES

if TYPE_CHECKING:
    from cepo.models.processing import Processing
    from cepo.rollout.generator import AdapterWeights, FullWeights, GenerationRequest, GeneratorSettings
    from cepo.rollout.vllm_engine import VllmGenerator

LORA_RANK = 16
PROMPTS = 3
SAMPLES = 8
RESPONSE = 16
ROUNDS = 3
ADAPTED = ("down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj")


def gib_in_use() -> float:
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 2**30


def generator_settings(folder: Path, *, weights: str, longest: int, devices: int) -> GeneratorSettings:
    """Returns the settings of the engine: short responses, and few of them at once, for which it captures few graphs."""
    from cepo.rollout.generator import GeneratorSettings

    has_adapter = weights == "adapter"
    return GeneratorSettings(
        model_path=str(folder),
        dtype="bf16",
        max_model_len=longest,
        lora_rank=LORA_RANK if has_adapter else 0,
        adapted_layers=ADAPTED if has_adapter else (),
        sleep=True,
        enforce_eager=not has_adapter,
        limit_images=1,
        max_num_seqs=PROMPTS * SAMPLES,
        tensor_parallel_size=devices,
    )


def requests_of(model: str, processing: Processing) -> list[GenerationRequest]:
    """Returns prompts with an image each."""
    from cepo.rollout.generator import GenerationRequest

    if model not in PUBLISHED:
        return generation_requests(SHAPES[model], processing, count=PROMPTS)
    image = PUBLISHED[model].image()
    requests: list[GenerationRequest] = []
    for number in range(PROMPTS):
        prompt = processing.encode(f"<image>\n{number}", processing.load_images([image]))
        request = GenerationRequest(
            prompt_ids=prompt.engine_ids, num_prompt_tokens=len(prompt.token_ids), images=(image,), seed=number
        )
        requests.append(request)
    return requests


def start(settings: GeneratorSettings, processing: Any) -> VllmGenerator:
    """Starts the engine as a run does, but with weights that vLLM makes up, since the folder has none."""
    from cepo.rollout import vllm_process
    from cepo.rollout.vllm_engine import VllmGenerator

    plain_options = vllm_process.engine_options

    def without_weights(*arguments: Any, **keywords: Any) -> Any:
        return plain_options(*arguments, **keywords) | {"load_format": "dummy"}

    vllm_process.engine_options = without_weights
    return VllmGenerator(settings, processing)


def new_weights(folder: Path, kind: str) -> AdapterWeights | FullWeights:
    """Returns an adapter of the language model's linear layers, or all weights, of zeros."""
    import transformers

    from cepo.models.families import family_of
    from cepo.rollout.generator import AdapterWeights, FullWeights

    config = transformers.AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = transformers.AutoModelForImageTextToText.from_config(config)
    if kind == "full":
        return FullWeights(tensors=_Zeros({name: weight.shape for name, weight in model.state_dict().items()}))
    tower: set[torch.nn.Module] = set()
    for part in family_of(config).vision_parts(model):
        tower.update(part.modules())
    tensors: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name.endswith(ADAPTED) and module not in tower:
            tensors[f"base_model.model.{name}.lora_A.weight"] = torch.zeros(LORA_RANK, module.in_features)
            tensors[f"base_model.model.{name}.lora_B.weight"] = torch.zeros(module.out_features, LORA_RANK)
    adapter_config = {"r": LORA_RANK, "lora_alpha": 2 * LORA_RANK, "target_modules": list(ADAPTED), "peft_type": "LORA"}
    return AdapterWeights(tensors=tensors, adapter_config=adapter_config)


class _Zeros(Mapping[str, torch.Tensor]):
    """Tensors of zeros on the device, each made when it is read."""

    def __init__(self, shapes: Mapping[str, torch.Size]) -> None:
        self._shapes = shapes

    def __getitem__(self, name: str) -> torch.Tensor:
        return torch.empty(self._shapes[name], dtype=torch.bfloat16, device="cuda")

    def __iter__(self) -> Any:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)


class EngineFacts(NamedTuple):
    """What vLLM made of the options."""

    attention: str
    num_graphs: int
    custom_all_reduce: bool
    head_dtype: str

    @property
    def as_asked(self) -> bool:
        return not self.custom_all_reduce and self.head_dtype == "torch.float32"


def engine_facts(engine: VllmGenerator) -> EngineFacts:
    """Reads the engine's configuration, and asks vLLM for its attention backend for the model's heads."""
    from vllm.config import set_current_vllm_config
    from vllm.v1.attention.selector import get_attn_backend

    assert engine._llm is not None
    config = engine._llm.llm_engine.vllm_config
    width = config.model_config.get_head_size()
    with set_current_vllm_config(config):
        attention = get_attn_backend(width, torch.bfloat16, config.cache_config.cache_dtype).get_name()
    return EngineFacts(
        attention=attention,
        num_graphs=len(config.compilation_config.cudagraph_capture_sizes or ()),
        custom_all_reduce=not config.parallel_config.disable_custom_all_reduce,
        head_dtype=str(config.model_config.head_dtype),
    )


class Lifetime(NamedTuple):
    """What an engine did from its start to its close; memory in GiB."""

    facts: EngineFacts
    num_responses: int
    lengths: set[int]
    started: float
    asleep: float
    closed: float

    def report(self) -> None:
        num_rounds = ROUNDS + 1  # the last one without new weights
        is_complete = self.num_responses == num_rounds * PROMPTS * SAMPLES and self.lengths == {RESPONSE}
        report(
            ok=is_complete and self.asleep < 0.1 * self.started and self.facts.as_asked,
            found=f"{self.facts.attention}, {self.facts.num_graphs} graph sizes; "
            f"{self.num_responses} responses in {num_rounds} rounds; GiB in use: {self.started:.1f} started, "
            f"{self.asleep:.1f} asleep, {self.closed:.1f} closed",
        )


def lifetime(folder: Path, model: str, weights: str, devices: int) -> Lifetime:
    """Starts an engine, gives it new weights, samples and lets it sleep several times, wakes it again and closes it."""
    from cepo.models.processing import Processing
    from cepo.rollout.generator import SamplingSettings

    processing = Processing(str(folder))
    requests = requests_of(model, processing)
    longest = max(request.num_prompt_tokens for request in requests) + RESPONSE
    engine = start(generator_settings(folder, weights=weights, longest=longest, devices=devices), processing)
    facts = engine_facts(engine)
    started = gib_in_use()
    sampling = SamplingSettings(num_samples=SAMPLES, max_response_length=RESPONSE)
    asleep: list[float] = []
    lengths: set[int] = set()
    num_responses = 0
    for _ in range(ROUNDS):
        engine.sync_weights(new_weights(folder, weights))
        for group in engine.generate(requests, sampling):
            num_responses += len(group)
            lengths |= {len(sample.response_ids) for sample in group}
        engine.rest()
        asleep.append(gib_in_use())
    for group in engine.generate(requests, sampling):  # it wakes without new weights
        num_responses += len(group)
    engine.close()
    return Lifetime(facts, num_responses, lengths, started, max(asleep), gib_in_use())


def main(model: str, weights: str, ranks: str = "1", devices: str = "1", *are_alone: str) -> None:
    from cepo.hardware import reserve_memory_in_growing_segments

    os.environ["VLLM_USE_FLASHINFER_SAMPLER"] = "0"  # vLLM is imported here before the trainer sets it
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    reserve_memory_in_growing_segments()
    stand_in()
    if are_alone:
        group = alone(num_ranks=int(ranks))
    else:
        group = met("lab.gpu_dry.engine", (model, weights, ranks, devices), num_ranks=int(ranks))
    with tempfile.TemporaryDirectory() as folder, group:
        write_model(model, Path(folder))
        life = lifetime(Path(folder), model, weights, int(devices))
    if this_rank() == 0:
        life.report()


if __name__ == "__main__":
    main(*sys.argv[1:])
