"""The memory of a run on one device: an upper bound as a sum of few terms, and whether a GPU has room for it."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch

from cepo.algorithms import Estimator
from cepo.config import RunConfig
from cepo.config.schema import AlgorithmConfig
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

MEASURED = "on an H200, a 2B model with LoRA reserved 7.9 GiB where this estimate says 10.0"
"""The one run that was compared with a card: `configs/geo3k/cepo.yaml` with responses of 512 tokens (docs/gpus.md)."""
VALUE_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
BYTES_IN_4_BITS = 0.5 + 4 / 64
"""A 4-bit weight's bytes, with its share of a float32 scale for every 64 weights."""
ASLEEP_BYTES = 2 * 2**30
"""The device memory that a sleeping engine keeps: CUDA graphs and working buffers. An estimate, not yet measured."""
RESERVED_PER_ALLOCATED = 1.3
"""What torch's allocator takes from the device for each byte of a pass, at most: tensors of changing sizes leave gaps, and 1.25
was counted (lab/notes/gpu-dry.md). Weights and optimizer are allocated once and leave none."""
WHAT_HELPS = (
    "what helps: LoRA (worker.actor.model.lora.rank=16), weights in host memory (worker.actor.fsdp.enable_cpu_offload=true) "
    "or another share for vLLM (worker.rollout.gpu_memory_utilization)"
)
LESS_ACTIVATIONS = (
    "if it runs out: lower worker.actor.micro_batch_size_per_device_for_update and _for_experience, or "
    "data.max_response_length"
)
_BYTES_PER_LOGIT = 4 + 2
"""A chunk's logits in float32 and their gradient."""
_BYTES_PER_COMPARED_LOGIT = 14 * 4
"""A divergence holds 14 float32 tensors of a chunk, counted on a CPU."""


class ModelShape(NamedTuple):
    """The sizes of a model that the estimate needs, as numbers of parameters unless noted."""

    parameters: int
    vision: int  # of the vision tower, with the merger
    gathered: int  # that FSDP holds whole at a time: all outside the blocks, and the two largest blocks
    linear: int  # of the language model's linear layers without the head
    linear_sides: int  # the sum of these layers' inputs and outputs: an adapter's parameters for each rank
    depth: int  # of the language model, whose next three entries are widths
    hidden: int
    intermediate: int
    vocabulary: int
    compilable: bool  # see `compile_decoder`


class TokenBytes(NamedTuple):
    """The bytes of activations that a pass holds for each of its tokens, without the head."""

    kept: int  # an update that keeps all activations
    recomputed: int  # an update that keeps the inputs of blocks
    scored: int  # a pass without gradient


class Memory(NamedTuple):
    """The bytes that a run needs on one device."""

    weights: int  # with the copies of the teacher and the reference
    optimizer: int
    away: int  # the part of both that is in host memory while responses are sampled
    gradients: int
    largest_pass: int  # gradients, gathered weights and activations of rows of the maximum length
    checkpoint: int  # on disk
    parameters: int  # of the model, as a number
    engine: int = 0  # the generator's own weights
    with_vllm: bool = True  # the weights of another generator stay on the device


def read_shape(model: ModelConfig | CriticModelConfig) -> ModelShape:
    assert model.model_path is not None
    config = pretrained.read_config(model.model_path, trust_remote_code=model.trust_remote_code)
    for key, value in model.override_config.items():
        setattr(config, key, value)
    return shape_of(config, trust_remote_code=model.trust_remote_code)


def estimate_memory(
    config: RunConfig,
    *,
    with_vllm: bool,
    shape_of_model: Callable[[ModelConfig | CriticModelConfig], ModelShape] = read_shape,
) -> Memory:
    """Returns the memory of a run: of the policy and, if the method has one, of the critic."""
    actor = config.worker.actor
    algorithm = config.algorithm
    lora = actor.model.lora
    estimator = config.estimator
    shape = shape_of_model(actor.model)
    policy = _model_memory(
        config,
        actor,
        shape,
        lora,
        copies=_weight_copies(estimator, algorithm, lora),
        compares=estimator.distilled_view is not None,
    )
    models = [policy]
    if estimator.teacher.model_path is not None:
        teacher_shape = shape_of_model(ModelConfig(model_path=estimator.teacher.model_path))
        models.append(_model_memory(config, actor, teacher_shape, LoraConfig(), is_frozen=True))
    if config.needs_critic:
        critic = config.worker.resolved_critic
        critic_shape = shape_of_model(critic.model)
        models.append(_model_memory(config, critic, critic_shape, LoraConfig()))
    rollout = config.worker.rollout
    return Memory(
        weights=sum(model.weights for model in models),
        optimizer=sum(model.optimizer for model in models),
        away=sum(model.away for model in models),
        engine=VALUE_BYTES[rollout.dtype] * shape.parameters // rollout.tensor_parallel_size,
        gradients=max(model.gradients for model in models),
        largest_pass=max(model.largest_pass for model in models),
        checkpoint=sum(model.checkpoint for model in models),
        parameters=shape.parameters,
        with_vllm=with_vllm,
    )


def _weight_copies(estimator: Estimator, algorithm: AlgorithmConfig, lora: LoraConfig) -> int:
    """Returns how many copies of the trained weights the teacher and the KL penalty's reference need together."""
    sources: list[str] = []
    if estimator.views:
        sources.append(estimator.teacher.source)
    if not algorithm.disable_kl:
        sources.append("reference")
    without_copy = {"actor"}
    if lora.rank > 0:
        without_copy.add("reference")  # it is the model without its adapter
    return sum(source not in without_copy for source in sources)


def _model_memory(
    config: RunConfig,
    settings: ActorConfig | CriticConfig,
    shape: ModelShape,
    lora: LoraConfig,
    *,
    copies: int = 0,
    compares: bool = False,
    is_frozen: bool = False,
) -> Memory:
    """Returns the memory of one model, all of it sharded but 4-bit weights; a frozen one has scoring passes alone.

    - weights: trained ones in their own type, frozen ones in the compute type; each copy in float32.
    - optimizer: Adam's two moments in the trained type, or 2 + 4 + 2 bytes per weight for `adamw_bf16`.
    - largest pass: the gradients, and the larger of a pass (the gathered weights, without LoRA their gradients in float32
      and in the compute type, and the activations) and of AdamW's step (the roots of the second moments).
    """
    compute_bytes = VALUE_BYTES[settings.fsdp.mp_param_dtype]
    trained_bytes = VALUE_BYTES[settings.fsdp.torch_dtype or "fp32"]
    state_bytes = 8 if settings.optim.strategy == "adamw_bf16" else 2 * trained_bytes
    num_shards = _num_shards(config, settings)
    packed = shape.linear if lora.quantization else 0
    gathered = shape.parameters - packed
    if settings.fsdp.enable_full_shard:
        gathered = min(shape.gathered, gathered)
    gathered_bytes = gathered * compute_bytes
    if is_frozen:
        trained = 0
        stored_bytes = shape.parameters * compute_bytes
    elif lora.rank > 0:
        trained = lora.rank * shape.linear_sides
        stored_bytes = (shape.parameters - packed) * compute_bytes + trained * trained_bytes
    else:
        trained = shape.parameters
        if settings.model.freeze_vision_tower:
            trained -= shape.vision
        stored_bytes = shape.parameters * trained_bytes
        gathered_bytes += 2 * gathered * (4 + compute_bytes)

    on_device = 0 if settings.fsdp.enable_cpu_offload else 1
    trained_per_device = on_device * math.ceil(trained / num_shards)
    packed_bytes = int(packed * BYTES_IN_4_BITS)
    stored_per_device = on_device * math.ceil(stored_bytes / num_shards) + packed_bytes
    gradients = trained_per_device * trained_bytes
    optimizer = trained_per_device * state_bytes
    activations = _activations(config, settings, shape, compares=compares, is_frozen=is_frozen)
    away = optimizer if settings.offload.offload_optimizer else 0
    if settings.offload.offload_params:
        away += stored_per_device
    saved_state_bytes = 0 if config.trainer.save_model_only else state_bytes + 4 * copies
    return Memory(
        weights=stored_per_device + 4 * copies * trained_per_device,
        optimizer=optimizer,
        away=away,
        gradients=gradients,
        largest_pass=gradients + max(gathered_bytes + activations, gradients),
        checkpoint=trained * (trained_bytes + saved_state_bytes),
        parameters=shape.parameters,
    )


def _num_shards(config: RunConfig, settings: ActorConfig | CriticConfig) -> int:
    """Returns how many devices share one copy of the weights."""
    if settings.fsdp.fsdp_size > 0:  # further devices hold copies
        return min(settings.fsdp.fsdp_size, config.trainer.num_devices)
    return config.trainer.num_devices


def token_bytes(settings: ActorConfig | CriticConfig, shape: ModelShape) -> TokenBytes:
    """Returns the bytes of a pass's token, an upper bound for a language model of equal layers.

    With b bytes a value, H hidden and I inner values and L layers, a layer keeps

        k = b (10 H + 3 I)            compiled: counted 7 H + 3 I of a Qwen3 layer, where keys are half as wide
        k = b (14 H + 4 I) + 32 H     as it is: in bf16 a Qwen3 layer saves 24 to 36 H bytes and 4 b I, and backward adds some

    and a pass keeps `L k`, or with recomputation `L b H`, beside one layer as it is, of which a pass without gradient holds
    half. A trained vision tower counts as much as the language model.
    """
    value_bytes = VALUE_BYTES[settings.fsdp.mp_param_dtype]
    as_it_is = value_bytes * (14 * shape.hidden + 4 * shape.intermediate) + 32 * shape.hidden
    of_layer = as_it_is
    if shape.compilable and settings.model.compile_layers is not False:
        of_layer = value_bytes * (10 * shape.hidden + 3 * shape.intermediate)
    models = 2 if shape.vision > 0 and _trains_tower(settings) else 1
    return TokenBytes(
        kept=models * (shape.depth * of_layer + as_it_is),
        recomputed=models * (shape.depth * value_bytes * shape.hidden + as_it_is),
        scored=as_it_is // 2,
    )


def _trains_tower(settings: ActorConfig | CriticConfig) -> bool:
    if settings.model.freeze_vision_tower:
        return False
    if isinstance(settings, CriticConfig):
        return True
    lora = settings.model.lora
    return lora.rank == 0 or lora.exclude_modules is None


def _activations(
    config: RunConfig,
    settings: ActorConfig | CriticConfig,
    shape: ModelShape,
    *,
    compares: bool,
    is_frozen: bool,
) -> int:
    """Returns the bytes of an update's or a scoring pass's activations, whichever are more, and of the head's largest chunk.

    A chunk has more tensors for a divergence (`compares`).
    """
    of_token = token_bytes(settings, shape)
    tokens_of_row = config.data.longest_row
    updated_rows = settings.micro_batch_size_per_device_for_update
    scored_rows = settings.micro_batch_size_per_device_for_experience
    layers = scored_rows * tokens_of_row * of_token.scored
    if not is_frozen:
        bytes_of_token = of_token.recomputed if settings.model.enable_gradient_checkpointing else of_token.kept
        layers = max(layers, updated_rows * tokens_of_row * bytes_of_token)
    logits = max(updated_rows, scored_rows) * config.data.max_response_length * shape.vocabulary
    chunk = _BYTES_PER_LOGIT * min(HEAD_CHUNK_ELEMENTS_ON_GPU, logits)
    if compares:
        chunk = max(chunk, _BYTES_PER_COMPARED_LOGIT * min(DIVERGENCE_CHUNK_ELEMENTS_ON_GPU, logits))
    return layers + chunk


def engine_sleeps(memory: Memory, rollout: RolloutConfig, *, free: int, total: int) -> bool:
    """Returns whether vLLM frees its memory during scoring and updates on a device with `free` of `total` bytes.

    With `rollout.sleep=auto` it does unless its share fits beside the upper bound of the trainer's largest pass.
    """
    if not memory.with_vllm:
        return False
    if rollout.sleep != "auto":
        return rollout.sleep
    return _vllm_share(rollout, total) + bound_in_passes(memory) > free


def _vllm_share(rollout: RolloutConfig, total: int) -> int:
    return int(rollout.gpu_memory_utilization * total)


def engine_in_passes(memory: Memory, rollout: RolloutConfig, *, free: int, total: int) -> int:
    """Returns what the generator keeps of a device's memory during scoring and updates."""
    if not memory.with_vllm:
        return memory.engine
    return ASLEEP_BYTES if engine_sleeps(memory, rollout, free=free, total=total) else _vllm_share(rollout, total)


def bound_in_passes(memory: Memory) -> int:
    """Returns the most bytes that the trainer's allocator takes from the device in scoring and updates."""
    return memory.weights + memory.optimizer + int(RESERVED_PER_ALLOCATED * memory.largest_pass)


def fit(memory: Memory, rollout: RolloutConfig, *, free: int, total: int) -> tuple[str | None, int]:
    """Returns why a run cannot start on a device (None if it can), and the bytes that its upper bound lacks.

    Of the device's `total` bytes, `free` are free before anything loads. Weights and optimizer are beside vLLM's share; in
    a pass only if vLLM does not sleep (`engine_sleeps`). Another generator's weights always stay.
    """
    trained = memory.weights + memory.optimizer
    share = _vllm_share(rollout, total) if memory.with_vllm else memory.engine
    in_passes = engine_in_passes(memory, rollout, free=free, total=total)
    share_in_passes = 0 if engine_sleeps(memory, rollout, free=free, total=total) else share
    sampling = trained - memory.away + share
    passing = trained + memory.gradients + share_in_passes
    if sampling >= passing:
        phase = f"sampling beside the generator's {gib(share)}"
        required = sampling
    else:
        phase = f"scoring and update beside the generator's {gib(share_in_passes)}"
        required = passing

    refused = None
    if share < memory.engine:
        refused = f"vLLM's share is {gib(share)}, but its weights and one request need {gib(memory.engine)}"
    elif required > free:
        refused = f"{phase} takes {gib(required)} before any activation: {gib(required - free)} too much"
    return refused, max(0, bound_in_passes(memory) + in_passes - free)


_Rollout = TypeVar("_Rollout", bound=RolloutConfig)


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


def with_sleep_decided(memory: Memory | None, rollout: _Rollout, device: torch.device) -> _Rollout:
    """Returns the settings with `sleep` decided for this GPU, and logs the decision; elsewhere they stay as they are."""
    if memory is None or device.type != "cuda" or rollout.sleep != "auto" or not memory.with_vllm:
        return rollout
    free, total = torch.cuda.mem_get_info(device)
    decision = engine_sleeps(memory, rollout, free=free, total=total)
    share = gib(_vllm_share(rollout, total))
    verb = "does not fit" if decision else "fits"
    bound = gib(bound_in_passes(memory))
    logger.info(
        "worker.rollout.sleep=%s: vLLM's %s %s beside the trainer's %s on %s", decision, share, verb, bound, gib(free)
    )
    return dataclasses.replace(rollout, sleep=decision)


def gib(num_bytes: float) -> str:
    """Formats bytes in GiB, or in MiB below one GiB."""
    if num_bytes < 2**30:
        return f"{num_bytes / 2**20:.0f} MiB"
    return f"{num_bytes / 2**30:.1f} GiB"


def shape_of(config: Any, *, trust_remote_code: bool = False) -> ModelShape:
    """Returns the shape of the model that a transformers configuration describes, built on the meta device."""
    family = family_of(config)
    try:
        with torch.device("meta"):
            model = pretrained.model_class(family).from_config(config, trust_remote_code=trust_remote_code)
    except (ValueError, TypeError, AttributeError, RuntimeError) as error:
        raise ConfigError(f"no model can be built from this configuration: {error}") from error
    tower = family.vision_parts(model)
    apart = {model.get_output_embeddings()}
    for part in tower:
        apart.update(part.modules())
    linear = [module for module in model.modules() if type(module) is torch.nn.Linear and module not in apart]
    blocks = [_size(block) for block in pretrained.sharded_blocks(model)]
    text = config.get_text_config()
    inner = text.intermediate_size
    return ModelShape(
        parameters=_size(model),
        vision=sum(map(_size, tower)),
        gathered=_size(model) - sum(blocks) + 2 * max(blocks, default=0),
        linear=sum(layer.weight.numel() for layer in linear),
        linear_sides=sum(layer.in_features + layer.out_features for layer in linear),
        depth=text.num_hidden_layers,
        hidden=text.hidden_size,
        intermediate=inner if isinstance(inner, int) else max(inner),  # Gemma 3n lists that of each layer
        vocabulary=text.vocab_size,
        compilable="linear_attention" not in (getattr(text, "layer_types", None) or ()),
    )


def _size(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
