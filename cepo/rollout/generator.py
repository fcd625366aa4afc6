"""Defines the protocol of generators, which sample tokens with log-probs for prompts with images, and load weights."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, Self

import numpy
from numpy.typing import ArrayLike, NDArray
from PIL.Image import Image
from torch import Tensor

from cepo.config.worker_schema import RolloutConfig
from cepo.data.batch import TokenIds, token_array
from cepo.errors import EngineError
from cepo.files.trees import Tree
from cepo.sections.fields import Count, Natural, section

if TYPE_CHECKING:
    from cepo.models.interface import ImageSource, Video


@section
class GeneratorSettings(RolloutConfig):
    """The settings of a generator: the section `worker.rollout`, and what an engine needs to know of the model and the data."""

    model_path: str
    max_model_len: Count  # pyright: ignore[reportGeneralTypeIssues]  # required, unlike in the section
    """Maximum length of a prompt, with image tokens, and its response together."""
    trust_remote_code: bool = False
    fp32_logits: bool = True
    """Compute logits in float32 even if `dtype` is a 16-bit type."""
    limit_images: Natural = 1
    limit_videos: Natural = 0
    """Maximum number of videos in a prompt."""
    lora_rank: Natural = 0
    """0 if the weights come as `FullWeights`, else the rank of the adapters."""
    adapted_layers: tuple[str, ...] = ()
    """The last parts of the names of the layers that adapters change; empty: any layer that the engine can adapt."""
    batch_size: Count = 64
    """Number of responses that transformers decodes together."""


@dataclass(frozen=True, kw_only=True)
class SamplingSettings:
    """Settings for sampling responses.

    `temperature` 0 is greedy, and `top_k` -1 keeps all tokens. `presence_penalty` is subtracted from the logit of every
    token that the response already contains.
    """

    num_samples: int
    max_response_length: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    presence_penalty: float = 0.0
    ignore_eos: bool = False


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """One prompt for which to sample responses. Sample i depends only on (`seed`, i) and the weights."""

    prompt_ids: tuple[int, ...]  # with ONE placeholder token per image and per video, which the engine expands
    num_prompt_tokens: int  # with expanded placeholders
    # as `cepo.data.images` returns them: upright, in RGB, within the limits, without metadata
    images: tuple[Image, ...]
    seed: int  # non-negative
    videos: tuple[Video, ...] = ()  # their selected frames, within the same limits
    image_source: ImageSource | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Generation:
    """One sampled response."""

    response_ids: TokenIds  # including the end-of-turn token if one was sampled
    log_probs: NDArray[numpy.float32]  # of each token in nats, under the unfiltered distribution at temperature 1
    finished: bool  # False if the length limit cut the response
    text: str | None = None  # decoded by the process that sampled it; None: by whoever needs it

    @classmethod
    def of(cls, response_ids: ArrayLike, log_probs: ArrayLike, *, finished: bool) -> Self:
        return cls(
            response_ids=token_array(response_ids),
            log_probs=numpy.asarray(log_probs, dtype=numpy.float32),
            finished=finished,
        )


@dataclass(frozen=True, kw_only=True)
class AdapterWeights:
    """A LoRA adapter: PEFT's state dict (`base_model.model...lora_A.weight`) and the content of adapter_config.json."""

    tensors: Mapping[str, Tensor]
    adapter_config: Mapping[str, object]

    def plain_config(self) -> Tree:
        """Returns the adapter's configuration as read back from adapter_config.json; PEFT's target modules are a set."""
        return json.loads(json.dumps(dict(self.adapter_config), default=sorted))

    def write(self, folder: Path) -> None:
        """Writes `adapter_model.safetensors` and `adapter_config.json`, which vLLM, PEFT and merging tools read."""
        from safetensors.torch import save_file

        folder.mkdir(parents=True, exist_ok=True)
        tensors: dict[str, Tensor] = {}
        for name, tensor in self.tensors.items():
            # A clone, because the format has no tensors that share memory.
            tensors[name] = tensor.detach().cpu().contiguous().clone()
        weights = folder / "adapter_model.safetensors"
        config = folder / "adapter_config.json"
        save_file(tensors, weights)
        config.write_text(json.dumps(self.plain_config(), indent=2) + "\n", encoding="utf-8")
        shutil.copymode(config, weights)  # safetensors makes files that only their owner can read


@dataclass(frozen=True, kw_only=True)
class FullWeights:
    """All weights under their Hugging Face names, including a tied `lm_head.weight`.

    The mapping may create each tensor when it is read, and reading may be collective. An engine must therefore read
    each tensor once, in the mapping's order, and keep none. `len` and the names cost nothing.
    """

    tensors: Mapping[str, Tensor] = field(repr=False)


Weights = AdapterWeights | FullWeights

OnFinished = Callable[[int, "list[Generation]"], None]
"""Called with a request's index and responses, in the caller's thread, while others are still being sampled."""


class Sampler(Protocol):
    """Samples responses: an engine, or a backend with engines on many devices."""

    def generate(
        self, requests: Sequence[GenerationRequest], settings: SamplingSettings, on_finished: OnFinished | None = None
    ) -> list[list[Generation]]:
        """Samples `settings.num_samples` responses for each request, in the order of the requests.

        `on_finished` is called once per request, as soon as all its responses are complete. Every engine calls it; a
        sampler that changes the responses of another need not.
        An exception from it ends the call, but the engine remains usable. Raises `EngineError`: a prompt is too long, or the
        engine failed.
        """
        ...


class Generator(Sampler, Protocol):
    """An engine that samples and takes new weights. `name` is its name in logs and records."""

    name: str

    def sync_weights(self, weights: Weights) -> None:
        """Makes the engine sample with exactly these weights, and drops everything cached with the old ones.

        Raises `EngineError`: the weights' names or shapes do not fit the model.
        """
        ...

    def rest(self) -> None:
        """Ends a sampling phase; an engine that sleeps between phases frees its memory until its next call."""
        ...

    def close(self) -> None:
        """Frees the engine's memory. May be called twice."""
        ...


def check_lengths(requests: Sequence[GenerationRequest], sampling: SamplingSettings, max_model_len: int) -> None:
    """Raises EngineError unless each prompt fits the engine together with its response."""
    for index, request in enumerate(requests):
        length = request.num_prompt_tokens + sampling.max_response_length
        if length > max_model_len:
            raise EngineError(
                f"prompt {index} of the batch has {request.num_prompt_tokens} tokens and may get "
                f"{sampling.max_response_length} more, {length} in total, but worker.rollout.max_model_len is "
                f"{max_model_len}; raise it or lower data.max_response_length"
            )


def sampling_seed(seed: int, step: int, prompt_id: str, *, attempt: int = 0) -> int:
    """Returns a 31-bit seed that depends only on (seed, step, attempt, prompt), so that steps do not share noise.

    `attempt` counts the rounds of sampling within a step, so that a prompt sampled again gets other responses.
    """
    moment = f"{step}" if attempt == 0 else f"{step}.{attempt}"
    digest = hashlib.blake2b(f"{seed}/{moment}/{prompt_id}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") & 0x7FFFFFFF
