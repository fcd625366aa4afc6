"""Models the time of a training step on several GPUs from the time of one GPU for one prompt.

- Prompts are not split over GPUs, so a step waits for the GPU with the most prompts, `ceil(prompts / gpus)`: in scoring
  of all live prompts, in the update of those of each optimizer step.
- Decoding is memory-bound: an iteration reads the weights and the keys and values of all tokens so far.
- A pass takes the time of its computation or of its all-gathers, whichever is longer.

Left out are sampling, host work, rewards, weight synchronisation, validation, checkpoints, and varying prompt lengths.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lab.support.model_flops import ATTENTION_BACKWARD, ModelFlops, causal_pairs

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """The speed of a GPU per second.

    Attributes:
        operations: floating-point operations, attained rather than nominal.
        memory: bytes read from its memory.
        link: bytes sent to GPUs of the same machine.
        network: bytes sent to other machines.
        per_machine: number of GPUs per machine.
    """

    name: str
    operations: float
    memory: float
    link: float
    network: float
    per_machine: int = 8


@dataclass(frozen=True, kw_only=True)
class Batch:
    """A step's rollouts. Response lengths are exponential with mean `mean_response`, cut at `longest_response`.

    Attributes:
        live_share: share of prompts whose responses differ in reward; the others are neither scored nor trained on.
        prompts_per_update: prompts per optimizer step.
    """

    prompts: int = 32
    group_size: int = 8
    live_share: float = 0.6
    prompts_per_update: int = 32
    prompt_tokens: int = 400
    mean_response: float = 400.0
    longest_response: int = 2048


@dataclass(frozen=True, kw_only=True)
class PromptCosts:
    """Seconds of one GPU for one prompt with its responses; `teachers` is in addition to `score`."""

    prefill: float
    score: float
    teachers: float
    update: float


@dataclass(frozen=True, kw_only=True)
class Decoding:
    """Bytes that an iteration reads: once, and per token of each unfinished response and its prompt."""

    weights: float
    cache_per_token: float


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Bytes of whole weights that a pass gathers and reduces, and the number of prompts per pass."""

    scoring_pass: float = 0.0
    update_pass: float = 0.0
    prompts_per_scoring_pass: int = 4
    prompts_per_update_pass: int = 3


def heaviest(prompts: float, gpus: int) -> int:
    """Returns the number of prompts of the GPU with the most."""
    return math.ceil(prompts / gpus - 1e-9)


def decode_seconds(responses: int, batch: Batch, decoding: Decoding, memory: float) -> float:
    """Returns the expected seconds to decode `responses` responses together on one GPU.

    This is the sum over t < longest of `P(any response is longer than t) weights + E[number longer than t] (prompt + t)
    cache`, divided by bytes per second, with `P(one is longer than t) = exp(-t / mean)`.
    """
    read = 0.0
    for token in range(batch.longest_response):
        longer = math.exp(-token / batch.mean_response)
        any_longer = 1.0 - (1.0 - longer) ** responses
        cached = responses * longer * (batch.prompt_tokens + token)
        read += any_longer * decoding.weights + cached * decoding.cache_per_token
    return read / memory


def communication_seconds(passes: int, bytes_per_pass: float, gpus: int, gpu: Gpu) -> float:
    """Returns the seconds in which each GPU sends `(gpus - 1) / gpus` of the passes' bytes over the slowest link."""
    speed = gpu.link if gpus <= gpu.per_machine else gpu.network
    return passes * bytes_per_pass * (gpus - 1) / gpus / speed


def step_seconds(
    gpus: int, batch: Batch, costs: PromptCosts, decoding: Decoding, traffic: Traffic, gpu: Gpu
) -> Mapping[str, float]:
    """Returns the seconds of each stage of a step with teachers; `communication` is part of the other stages."""
    updates = math.ceil(batch.prompts / batch.prompts_per_update)
    live = batch.prompts * batch.live_share
    sampled, scored = heaviest(batch.prompts, gpus), heaviest(live, gpus)
    updated = heaviest(live / updates, gpus)
    scoring = communication_seconds(
        math.ceil(scored / traffic.prompts_per_scoring_pass), traffic.scoring_pass, gpus, gpu
    )
    updating = communication_seconds(
        math.ceil(updated / traffic.prompts_per_update_pass), traffic.update_pass, gpus, gpu
    )
    student, teachers = scored * costs.score, scored * costs.teachers
    stages = {
        "prefill": sampled * costs.prefill,
        "decode": decode_seconds(sampled * batch.group_size, batch, decoding, gpu.memory),
        "score and teachers": max(student + teachers, scoring),
        "update": updates * max(updated * costs.update, updating),
    }
    return stages | {"step": sum(stages.values()), "communication": scoring + updates * updating}


def costs_from_operations(model: ModelFlops, batch: Batch, gpu: Gpu, *, teachers: int, hint: int) -> PromptCosts:
    """Computes costs from the operations of a packed prompt: prefix and image once, responses once per context.

    Responses have the mean length; layers are recomputed in the backward pass.

    Args:
        teachers: number of contexts besides the student's, each `hint` tokens longer.
    """
    prompt, response, size = batch.prompt_tokens, round(batch.mean_response), batch.group_size
    linear, answers = model.token + model.adapter_token, size * response
    prefix = prompt * linear + model.pair * causal_pairs(prompt)
    pairs = size * causal_pairs(prompt + response, prompt)
    score = model.image + prefix + answers * (linear + model.head) + model.pair * pairs
    longer = hint + prompt
    behind_hints = causal_pairs(longer, prompt) + size * causal_pairs(longer + response, longer)
    one_teacher = hint * linear + answers * (linear + model.head) + model.pair * behind_hints
    full = model.lora_rank == 0
    backward = model.token * (2 if full else 1) + 2 * model.adapter_token
    all_pairs = model.pair * (causal_pairs(prompt) + pairs)
    update = (prompt + answers) * (2 * linear + backward) + answers * model.head * (4 if full else 2)
    update += all_pairs * (2 + ATTENTION_BACKWARD) + model.image * (3 if full else 1)
    return PromptCosts(
        prefill=(model.image + prefix) / gpu.operations,
        score=score / gpu.operations,
        teachers=teachers * one_teacher / gpu.operations,
        update=update / gpu.operations,
    )


def measured_costs(record: Mapping[str, Any], prefill: float) -> PromptCosts:
    """Returns the costs of one packed prompt that `lab/stages.py` measured; it does not measure `prefill`.

    Args:
        record: the content of its JSON file.
    """
    stages, sizes = record["stages"], record["sizes"]

    def seconds(stage: str) -> float:
        return stages[stage]["packed"]["seconds"] / sizes["groups"]

    student = seconds("score student")
    return PromptCosts(
        prefill=prefill, score=student, teachers=seconds("score all") - student, update=seconds("update")
    )


def decoding_of(model: ModelFlops, *, value_bytes: int = 2) -> Decoding:
    """Returns the bytes of the language model's weights, with a tied head once, and of a token's keys and values."""
    shape = model.shape
    weights = model.token // 2 + shape.hidden * shape.vocabulary
    cache = 2 * shape.layers * shape.key_value_heads * shape.head_width
    return Decoding(weights=float(value_bytes * weights), cache_per_token=float(value_bytes * cache))


def traffic_of(model: ModelFlops, *, gathered_bytes: int = 2, reduced_bytes: int = 4) -> Traffic:
    """Returns the traffic of the language model with adapters, without a vision tower that has no gradient.

    A scoring pass gathers all layers once, an update pass twice; both gather embeddings and head once. An update
    pass also reduces the adapters' gradients.
    """
    shape = model.shape
    layers, adapters, embeddings = model.token // 2, model.adapter_token // 2, shape.hidden * shape.vocabulary
    once = gathered_bytes * (layers + adapters)
    outside = gathered_bytes * embeddings
    return Traffic(
        scoring_pass=float(once + outside),
        update_pass=float(2 * once + outside + reduced_bytes * adapters),
    )
