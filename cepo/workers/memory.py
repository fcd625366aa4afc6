"""Estimates the memory of a run from the model's shape, and decides whether it fits. Nothing was measured on a GPU."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from cepo.algorithms import build_estimator
from cepo.config import RunConfig
from cepo.config.worker_schema import (
    ActorConfig,
    CriticConfig,
    CriticModelConfig,
    LoraConfig,
    ModelConfig,
    RolloutConfig,
)
from cepo.errors import ConfigError
from cepo.models import pretrained
from cepo.models.families import family_of
from cepo.models.head import DIVERGENCE_CHUNK_ELEMENTS_ON_GPU, HEAD_CHUNK_ELEMENTS_ON_GPU

logger = logging.getLogger(__name__)
_Trained = ActorConfig | CriticConfig

VALUE_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
ASLEEP_BYTES = 2 * 2**30
"""The device memory that a sleeping engine keeps: CUDA graphs and working buffers. An estimate, not yet measured."""
WHAT_HELPS = (
    "what helps: LoRA (worker.actor.model.lora.rank=16), weights in host memory (worker.actor.fsdp.enable_cpu_offload=true) "
    "or another share for vLLM (worker.rollout.gpu_memory_utilization)"
)
LESS_ACTIVATIONS = (
    "if it runs out: lower worker.actor.micro_batch_size_per_device_for_update and _for_experience, or "
    "data.max_response_length"
)
_BYTES_PER_LOGIT, _BYTES_PER_COMPARED_LOGIT = 4 + 2, 14 * 4
"""A chunk's logits in float32 and their gradient; a divergence holds 14 float32 tensors of a chunk, counted on a CPU."""


class Stack(NamedTuple):
    """A stack of equal transformer blocks; `queries` and `keys` are numbers of heads times the head's size."""

    depth: int
    hidden: int
    queries: int
    keys: int
    intermediate: int

    def kept_per_token(self, value_bytes: int) -> int:
        """Returns the bytes that one block keeps per token for backward: of its tensors, and of norms in float32.

        A pass without gradient holds at most half of this at a time.
        """
        computed = 6 * self.hidden + 4 * self.queries + 5 * self.keys + 4 * self.intermediate
        return value_bytes * computed + 4 * (4 * self.hidden + 2 * (self.queries + self.keys))


class ModelShape(NamedTuple):
    """The sizes of a model that the estimate needs, as numbers of parameters unless noted."""

    parameters: int
    vision: int  # of the vision tower, with the merger
    block: int  # of the largest block that FSDP gathers
    outside: int  # of all that is outside such blocks
    adapter: int  # 0 without LoRA
    adapts_vision: bool
    text_linear: int  # of the language model's linear layers without the head, which QLoRA keeps in 4 bits
    vocabulary: int  # rows of the head
    text_stack: Stack
    vision_stack: Stack | None  # None for a text model, or a tower whose sizes have other names
    patches_per_token: int  # image patches that are merged into one token


class Memory(NamedTuple):
    """The bytes that a run needs on one device.

    A pass is scoring, backward or the optimizer's step, whichever is largest, with the gradients.
    """

    weights: int  # with the copies of the teacher and the reference
    optimizer: int
    away: int  # the part of both that is in host memory while responses are sampled
    engine: int  # the generator's own weights and the KV cache of the longest request
    least_pass: int  # without activations
    largest_pass: int  # with rows of the maximum length
    checkpoint: int  # on disk
    parameters: int  # of the model, as a number
    with_vllm: bool = True  # the weights of another generator stay on the device


def read_shape(model: ModelConfig | CriticModelConfig, lora: LoraConfig) -> ModelShape:
    assert model.model_path is not None
    config = pretrained.read_config(model.model_path, trust_remote_code=model.trust_remote_code)
    for key, value in model.override_config.items():
        setattr(config, key, value)
    return shape_of(config, lora=lora, trust_remote_code=model.trust_remote_code)


def estimate_memory(
    config: RunConfig,
    *,
    with_vllm: bool,
    shape_of_model: Callable[[ModelConfig | CriticModelConfig, LoraConfig], ModelShape] = read_shape,
) -> Memory:
    """Returns the memory of a run: weights, optimizer, KV cache and the largest pass of the policy and of the critic."""
    actor, algorithm, rollout, data = config.worker.actor, config.algorithm, config.worker.rollout, config.data
    estimator = build_estimator(algorithm.adv_estimator, config.methods[algorithm.adv_estimator])
    sources = [estimator.teacher.source] if estimator.views else []
    sources += [] if algorithm.disable_kl else ["reference"]
    lora = actor.model.lora
    copies = sum(source != "actor" and not (lora.rank > 0 and source == "reference") for source in sources)
    compares = estimator.distilled_view is not None or (algorithm.kl_penalty == "full" and not algorithm.disable_kl)
    shape = shape_of_model(actor.model, lora)
    trained = [_model_memory(config, actor, shape, lora, copies, compares)]
    if estimator.needs_values:
        critic, plain = config.worker.resolved_critic, LoraConfig()
        valued = shape_of_model(critic.model, plain)
        trained.append(_model_memory(config, critic, valued, plain, copies=0, compares=False))
    tokens = rollout.max_model_len or data.max_prompt_length + data.max_response_length
    cached = 2 * shape.text_stack.depth * shape.text_stack.keys * tokens
    engine = VALUE_BYTES[rollout.dtype] * (shape.parameters + cached) // rollout.tensor_parallel_size
    held = ("weights", "optimizer", "away", "checkpoint")
    totals = {name: sum(getattr(each, name) for each in trained) for name in held}
    passes = {name: max(getattr(each, name) for each in trained) for name in ("least_pass", "largest_pass")}
    return Memory(**totals, **passes, engine=engine, parameters=shape.parameters, with_vllm=with_vllm)


def _model_memory(
    config: RunConfig, settings: _Trained, shape: ModelShape, lora: LoraConfig, copies: int, compares: bool
) -> Memory:
    """Returns the memory of one trained model. FSDP shards all but a vision tower without gradient and 4-bit weights.

    - weights: trained ones in their own type, a frozen base in the compute type; each copy in float32.
    - optimizer: Adam's two moments in the trained type, or 2 + 4 + 2 bytes per weight for `adamw_bf16`.
    - gathered: the weights outside the blocks and two blocks, in the compute type, for the time of a pass.
    - reduced: without LoRA, the gradients outside the blocks and of one block, also in float32.
    - features: of the images of a step under a tower without gradient, the language model's input and three layers.
    - stepping: torch's AdamW holds the roots of all second moments at once; `adamw_bf16` six float32 numbers per weight of
      one tensor.
    """
    fsdp, frozen = settings.fsdp, settings.model.freeze_vision_tower
    devices, on_device = config.trainer.num_devices, 0 if fsdp.enable_cpu_offload else 1
    trained_bytes, compute_bytes = VALUE_BYTES[fsdp.torch_dtype or "fp32"], VALUE_BYTES[fsdp.mp_param_dtype]
    whole = shape.vision if frozen or (lora.rank > 0 and not shape.adapts_vision) else 0
    packed = shape.text_linear if lora.quantization else 0
    base = shape.parameters - whole - packed
    trained = shape.adapter if lora.rank > 0 else shape.parameters - (shape.vision if frozen else 0)
    share = math.ceil(trained / devices)
    all_bytes = base * compute_bytes + trained * trained_bytes if lora.rank > 0 else base * trained_bytes
    sharded = math.ceil(all_bytes / devices)
    packed_bytes = int(packed * bytes_in_4_bits(double_quantization=lora.double_quantization))
    compensated = settings.optim.strategy == "adamw_bf16"
    state_bytes = 8 if compensated else 2 * trained_bytes
    optimizer, gradients = on_device * share * state_bytes, on_device * share * trained_bytes
    largest_tensor = min(share, shape.vocabulary * shape.text_stack.hidden // devices)
    stepping = on_device * 24 * largest_tensor if compensated else gradients
    gathered = min(shape.outside + 2 * shape.block if fsdp.enable_full_shard else base, base) * compute_bytes
    reduced = 0 if lora.rank > 0 else (shape.outside + shape.block) * (compute_bytes + 4)
    prompt_tokens = math.ceil(config.data.rollout_batch_size / devices) * config.data.max_prompt_length
    features = prompt_tokens * 4 * shape.text_stack.hidden * compute_bytes if whole else 0
    updating, scoring = _activations(config, settings, shape, trains_tower=not whole, compares=compares)
    set_aside = gathered + (gradients if copies else 0)
    away = optimizer if settings.offload.offload_optimizer else 0
    away += sharded * on_device + packed_bytes if settings.offload.offload_params else 0
    recorded = trained_bytes + (0 if config.trainer.save_model_only else state_bytes + 4 * copies)
    return Memory(
        weights=on_device * (sharded + 4 * copies * share) + whole * compute_bytes + packed_bytes,
        optimizer=optimizer,
        away=away,
        engine=0,
        least_pass=max(gradients + max(gathered + reduced, stepping), set_aside),
        largest_pass=max(gradients + max(gathered + reduced + updating, stepping), set_aside + scoring) + features,
        checkpoint=trained * recorded,
        parameters=shape.parameters,
    )


def _activations(
    config: RunConfig, settings: _Trained, shape: ModelShape, *, trains_tower: bool, compares: bool
) -> tuple[int, int]:
    """Returns the activations of an update and of a scoring pass whose rows have the maximum length.

    Every prompt token belongs to an image. With checkpointing, an update keeps the blocks' inputs and one block's activations.
    """
    value_bytes, data = VALUE_BYTES[settings.fsdp.mp_param_dtype], config.data
    text, tower, length = shape.text_stack, shape.vision_stack, data.max_prompt_length + data.max_response_length

    def kept(stack: Stack, tokens: int) -> int:
        inside, inputs = stack.kept_per_token(value_bytes), stack.hidden * value_bytes
        checkpoints = settings.model.enable_gradient_checkpointing
        return tokens * (stack.depth * inputs + inside if checkpoints else stack.depth * inside)

    def head(rows: int) -> int:
        logits = rows * data.max_response_length * shape.vocabulary
        compared = _BYTES_PER_COMPARED_LOGIT * min(DIVERGENCE_CHUNK_ELEMENTS_ON_GPU, logits) if compares else 0
        return max(_BYTES_PER_LOGIT * min(HEAD_CHUNK_ELEMENTS_ON_GPU, logits), compared)

    rows, scored = settings.micro_batch_size_per_device_for_update, settings.micro_batch_size_per_device_for_experience
    updating = kept(text, rows * length) + head(rows)
    scoring = max(scored * length * text.kept_per_token(value_bytes) // 2, head(scored))
    if tower is not None:
        patches = data.max_prompt_length * shape.patches_per_token
        scoring = max(scoring, scored * patches * tower.kept_per_token(value_bytes) // 2)
        updating += kept(tower, rows * patches) if trains_tower else 0
    return updating, scoring


def bytes_in_4_bits(*, double_quantization: bool) -> float:
    """Returns the bytes of a 4-bit weight: half a byte, and its share of a scale for every 64 weights.

    A scale is a float32 number; with double quantization one byte, and a float32 number for every 256 scales.
    """
    return 0.5 + (1 + 4 / 256 if double_quantization else 4) / 64


def fit(memory: Memory, rollout: RolloutConfig, *, free: int, total: int) -> tuple[str | None, int]:
    """Returns why a run cannot start on a device (None if it can), and the bytes that its upper bound lacks.

    Of the device's `total` bytes, `free` are free before anything loads. Weights and optimizer are beside vLLM's share; in
    a pass only without `rollout.sleep`, because vLLM sleeps. Another generator's weights always stay.
    """
    held = memory.weights + memory.optimizer
    share = int(rollout.gpu_memory_utilization * total) if memory.with_vllm else memory.engine
    beside, asleep = (0, ASLEEP_BYTES) if memory.with_vllm and rollout.sleep else (share, 0)
    phase, needed = max(
        (f"sampling beside the generator's {gib(share)}", held - memory.away + share),
        (f"scoring and update beside the generator's {gib(beside)}", held + memory.least_pass + beside),
        key=lambda each: each[1],
    )
    refused = None
    if share < memory.engine:
        refused = f"vLLM's share is {gib(share)}, but its weights and one request need {gib(memory.engine)}"
    elif needed > free:
        refused = f"{phase} takes {gib(needed)} before any activation: {gib(needed - free)} too much"
    return refused, max(0, held + memory.largest_pass + beside + asleep - free)


def require_memory(memory: Memory | None, rollout: RolloutConfig, device: torch.device) -> None:
    """Checks a GPU before a model is loaded, and warns if activations may not fit; does nothing on another device."""
    if memory is None or device.type != "cuda":
        return
    free, total = torch.cuda.mem_get_info(device)
    refused, short = fit(memory, rollout, free=free, total=total)
    if refused is not None:
        raise ConfigError(
            f"the run does not fit on this GPU ({gib(free)} of {gib(total)} are free): {refused}; {WHAT_HELPS}"
        )
    if short > 0:
        logger.warning("GPU memory may be short by up to %s; %s", gib(short), LESS_ACTIVATIONS)


def gib(num_bytes: float) -> str:
    """Formats bytes in GiB, or in MiB below one GiB."""
    return f"{num_bytes / 2**20:.0f} MiB" if num_bytes < 2**30 else f"{num_bytes / 2**30:.1f} GiB"


def shape_of(config: Any, *, lora: LoraConfig, trust_remote_code: bool = False) -> ModelShape:
    """Returns the shape of the model that a transformers configuration describes, built on the meta device."""
    import transformers

    family = family_of(config, trust_remote_code=trust_remote_code)
    kind = "AutoModelForImageTextToText" if family.reads_images else "AutoModelForCausalLM"
    try:
        with torch.device("meta"):
            model: Any = getattr(transformers, kind).from_config(config, trust_remote_code=trust_remote_code)
    except (ValueError, TypeError, AttributeError, RuntimeError) as error:
        raise ConfigError(f"no model can be built from this configuration: {error}") from error
    tower, head, adapted = family.vision_parts(model), model.get_output_embeddings(), _adapted(model, lora)
    blocks = [_size(block) for block in pretrained.sharded_blocks(model)]
    in_tower = {inner for part in tower for inner in part.modules()}
    packed = [each for each in model.modules() if type(each) is torch.nn.Linear and each not in in_tower | {head}]
    vision = getattr(config, "vision_config", None)  # text models' configurations lack the entry
    magnitudes = sum(layer.out_features for layer in adapted) if lora.use_dora else 0
    return ModelShape(
        parameters=_size(model),
        vision=sum(map(_size, tower)),
        block=max(blocks, default=0),
        outside=_size(model) - sum(blocks),
        adapter=lora.rank * sum(layer.in_features + layer.out_features for layer in adapted) + magnitudes,
        adapts_vision=not in_tower.isdisjoint(adapted),
        text_linear=sum(layer.weight.numel() for layer in packed),
        vocabulary=head.weight.shape[0],
        text_stack=_stack(config.get_text_config()),
        vision_stack=_stack(vision) if hasattr(vision, "intermediate_size") else None,
        # Towers without merging, or with other names for it, count as 2 x 2 like those of Qwen-VL.
        patches_per_token=getattr(vision, "spatial_merge_size", 2) ** 2,
    )


def _adapted(model: Any, lora: LoraConfig) -> list[torch.nn.Linear]:
    """Returns the linear layers that PEFT would adapt, without PEFT, which would open a context on each GPU."""
    targets, excluded = lora.target_modules.split(","), pretrained.excluded_from_adapter(lora, model.config)
    endings = tuple(f".{target.strip()}" for target in targets)
    return [
        module
        for name, module in model.named_modules()
        if lora.rank > 0 and isinstance(module, torch.nn.Linear)
        if excluded is None or not re.fullmatch(excluded, name)
        if f".{name}".endswith(endings) or (targets == ["all-linear"] and module is not model.get_output_embeddings())
    ]


def _size(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _stack(config: Any) -> Stack:
    """Reads a stack's sizes; families name the depth differently, and omit the head's size or the number of key heads."""
    heads = getattr(config, "num_attention_heads", None) or config.num_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    return Stack(
        depth=getattr(config, "num_hidden_layers", None) or config.depth,
        hidden=config.hidden_size,
        queries=heads * size,
        keys=(getattr(config, "num_key_value_heads", None) or heads) * size,
        intermediate=config.intermediate_size,
    )
