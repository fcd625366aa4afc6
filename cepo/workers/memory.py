"""Estimates the memory of a run from the model's shape, and decides whether it fits. Nothing was measured on a GPU."""

from __future__ import annotations

import dataclasses
import logging
import math
import re
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
from cepo.workers.teacher_model import frozen_settings

logger = logging.getLogger(__name__)
_Trained = ActorConfig | CriticConfig

VALUE_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
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
        in_value_type = 6 * self.hidden + 4 * self.queries + 5 * self.keys + 4 * self.intermediate
        in_float32 = 4 * self.hidden + 2 * (self.queries + self.keys)
        return value_bytes * in_value_type + 4 * in_float32


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
    actor = config.worker.actor
    algorithm = config.algorithm
    lora = actor.model.lora
    estimator = config.estimator
    has_full_kl = algorithm.kl_penalty == "full" and not algorithm.disable_kl
    shape = shape_of_model(actor.model, lora)
    policy = _model_memory(
        config,
        actor,
        shape,
        lora,
        copies=_weight_copies(estimator, algorithm, lora),
        compares=estimator.distilled_view is not None or has_full_kl,
    )
    models = [policy, *_frozen_teacher(config, shape_of_model)]
    if "values" in estimator.reads:
        critic = config.worker.resolved_critic
        no_adapter = LoraConfig()
        critic_shape = shape_of_model(critic.model, no_adapter)
        models.append(_model_memory(config, critic, critic_shape, no_adapter, copies=0, compares=False))
    return Memory(
        weights=sum(model.weights for model in models),
        optimizer=sum(model.optimizer for model in models),
        away=sum(model.away for model in models),
        engine=_engine_bytes(config, shape),
        least_pass=max(model.least_pass for model in models),
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


def _frozen_teacher(
    config: RunConfig, shape_of_model: Callable[[ModelConfig | CriticModelConfig, LoraConfig], ModelShape]
) -> list[Memory]:
    """Returns the memory of a teacher with weights of its own: those of a base under an adapter, without the adapter."""
    path = config.estimator.teacher.model_path
    if path is None:
        return []
    settings = frozen_settings(config.worker.actor, path)
    shape = shape_of_model(settings.model, LoraConfig())  # its adapter has no weights
    return [_model_memory(config, settings, shape, LoraConfig(rank=1), copies=0, compares=False)]


def _engine_bytes(config: RunConfig, shape: ModelShape) -> int:
    """Returns the bytes that the rollout engine needs on one device: weights, and the KV cache of the longest request."""
    rollout = config.worker.rollout
    longest_request = rollout.max_model_len or config.data.max_prompt_length + config.data.max_response_length
    cached = 2 * shape.text_stack.depth * shape.text_stack.keys * longest_request
    return VALUE_BYTES[rollout.dtype] * (shape.parameters + cached) // rollout.tensor_parallel_size


class _Placement(NamedTuple):
    """The weights of one trained model, as numbers, and where and in which types they are."""

    whole: int  # of a vision tower without gradient, on every device in the compute type
    packed: int  # in 4 bits, on every device
    base: int  # of the model without the two above
    trained: int
    shards: int  # devices that share the weights of one copy
    trained_per_device: int
    trained_bytes: int  # of one trained weight
    compute_bytes: int  # of one weight in the compute type
    on_device: int  # 1, or 0 if shards, gradients and the optimizer's state are in host memory


def _placement(config: RunConfig, settings: _Trained, shape: ModelShape, lora: LoraConfig) -> _Placement:
    frozen = settings.model.freeze_vision_tower
    tower_is_whole = frozen or (lora.rank > 0 and not shape.adapts_vision)
    whole = shape.vision if tower_is_whole else 0
    packed = shape.text_linear if lora.quantization else 0
    if lora.rank > 0:
        trained = shape.adapter
    elif frozen:
        trained = shape.parameters - shape.vision
    else:
        trained = shape.parameters
    num_shards = config.trainer.num_devices
    if settings.fsdp.fsdp_size > 0:  # further devices hold copies
        num_shards = min(settings.fsdp.fsdp_size, num_shards)
    return _Placement(
        whole=whole,
        packed=packed,
        base=shape.parameters - whole - packed,
        trained=trained,
        shards=num_shards,
        trained_per_device=math.ceil(trained / num_shards),
        trained_bytes=VALUE_BYTES[settings.fsdp.torch_dtype or "fp32"],
        compute_bytes=VALUE_BYTES[settings.fsdp.mp_param_dtype],
        on_device=0 if settings.fsdp.enable_cpu_offload else 1,
    )


def _model_memory(
    config: RunConfig, settings: _Trained, shape: ModelShape, lora: LoraConfig, *, copies: int, compares: bool
) -> Memory:
    """Returns the memory of one trained model. FSDP shards all but a vision tower without gradient and 4-bit weights.

    - weights: trained ones in their own type, a frozen base in the compute type; each copy in float32.
    - optimizer: Adam's two moments in the trained type, or 2 + 4 + 2 bytes per weight for `adamw_bf16`.
    """
    placed = _placement(config, settings, shape, lora)
    sharded_bytes = placed.base * placed.trained_bytes
    if lora.rank > 0:
        sharded_bytes = placed.base * placed.compute_bytes + placed.trained * placed.trained_bytes
    sharded_per_device = math.ceil(sharded_bytes / placed.shards)
    copied_per_device = 4 * copies * placed.trained_per_device
    packed_bytes = int(placed.packed * bytes_in_4_bits(double_quantization=lora.double_quantization))
    state_bytes = 8 if settings.optim.strategy == "adamw_bf16" else 2 * placed.trained_bytes
    optimizer = placed.on_device * placed.trained_per_device * state_bytes

    away = 0
    if settings.offload.offload_optimizer:
        away += optimizer
    if settings.offload.offload_params:
        away += sharded_per_device * placed.on_device + packed_bytes
    saved_bytes = placed.trained_bytes
    if not config.trainer.save_model_only:
        saved_bytes += state_bytes + 4 * copies
    least_pass, largest_pass = _passes(config, settings, shape, placed, lora, copies=copies, compares=compares)
    return Memory(
        weights=placed.on_device * (sharded_per_device + copied_per_device)
        + placed.whole * placed.compute_bytes
        + packed_bytes,
        optimizer=optimizer,
        away=away,
        engine=0,
        least_pass=least_pass,
        largest_pass=largest_pass,
        checkpoint=placed.trained * saved_bytes,
        parameters=shape.parameters,
    )


def _passes(
    config: RunConfig,
    settings: _Trained,
    shape: ModelShape,
    placed: _Placement,
    lora: LoraConfig,
    *,
    copies: int,
    compares: bool,
) -> tuple[int, int]:
    """Returns the bytes of the largest pass of one trained model, with its gradients: without and with activations.

    - gathered: the weights outside the blocks and two blocks, in the compute type, for the time of a pass.
    - reduced: without LoRA, the gradients outside the blocks and of one block, also in float32; and of a trained head its
      gradient's sum and a chunk's part in float32, and its gradient beside that of tied embeddings in the compute type.
    - features: of the images of a step under a tower without gradient, the language model's input and three layers.
    - stepping: torch's AdamW holds the roots of all second moments at once; `adamw_bf16` six float32 numbers per weight of
      one tensor.
    """
    devices = config.trainer.num_devices
    gradients = placed.on_device * placed.trained_per_device * placed.trained_bytes
    stepping = gradients
    if settings.optim.strategy == "adamw_bf16":
        largest_tensor = min(placed.trained_per_device, shape.vocabulary * shape.text_stack.hidden // placed.shards)
        stepping = placed.on_device * 24 * largest_tensor
    gathered_weights = placed.base
    if settings.fsdp.enable_full_shard:
        gathered_weights = min(shape.outside + 2 * shape.block, placed.base)
    gathered = gathered_weights * placed.compute_bytes
    reduced = 0
    if lora.rank == 0:
        reduced = (shape.outside + shape.block) * (placed.compute_bytes + 4)
    if lora.rank == 0 and isinstance(settings, ActorConfig):
        head = shape.vocabulary * shape.text_stack.hidden
        reduced += head * (2 * 4 + 2 * placed.compute_bytes)
    features = 0
    if placed.whole:
        prompt_tokens = math.ceil(config.data.rollout_batch_size / devices) * config.data.max_prompt_length
        features = prompt_tokens * 4 * shape.text_stack.hidden * placed.compute_bytes
    updating, scoring = _activations(config, settings, shape, trains_tower=not placed.whole, compares=compares)
    if placed.trained == 0:  # a frozen teacher is scored alone
        return gathered, gathered + scoring + features
    # While a copy replaces the trained weights, these are set aside.
    set_aside = gathered + gradients if copies else gathered
    least = max(gradients + max(gathered + reduced, stepping), set_aside)
    largest = max(gradients + max(gathered + reduced + updating, stepping), set_aside + scoring)
    return least, largest + features


def _activations(
    config: RunConfig, settings: _Trained, shape: ModelShape, *, trains_tower: bool, compares: bool
) -> tuple[int, int]:
    """Returns the activations of an update and of a scoring pass whose rows have the maximum length.

    Every prompt token belongs to an image. With checkpointing, an update keeps the blocks' inputs and one block's activations.
    """
    data = config.data
    value_bytes = VALUE_BYTES[settings.fsdp.mp_param_dtype]
    row_length = data.max_prompt_length + data.max_response_length
    updated_rows = settings.micro_batch_size_per_device_for_update
    scored_rows = settings.micro_batch_size_per_device_for_experience
    updating = _kept_for_backward(shape.text_stack, settings, updated_rows * row_length)
    updating += _head_bytes(shape, updated_rows * data.max_response_length, compares=compares)
    scoring = max(
        scored_rows * row_length * shape.text_stack.kept_per_token(value_bytes) // 2,
        _head_bytes(shape, scored_rows * data.max_response_length, compares=compares),
    )
    if shape.vision_stack is None:
        return updating, scoring
    patches_per_row = data.max_prompt_length * shape.patches_per_token
    if trains_tower:
        updating += _kept_for_backward(shape.vision_stack, settings, updated_rows * patches_per_row)
    tower_scoring = scored_rows * patches_per_row * shape.vision_stack.kept_per_token(value_bytes) // 2
    return updating, max(scoring, tower_scoring)


def _kept_for_backward(stack: Stack, settings: _Trained, tokens: int) -> int:
    """Returns the bytes that the blocks of a stack keep for the backward pass of so many tokens."""
    value_bytes = VALUE_BYTES[settings.fsdp.mp_param_dtype]
    block_bytes = stack.kept_per_token(value_bytes)
    if not settings.model.enable_gradient_checkpointing:
        return tokens * stack.depth * block_bytes
    input_bytes = stack.hidden * value_bytes
    return tokens * (stack.depth * input_bytes + block_bytes)


def _head_bytes(shape: ModelShape, response_tokens: int, *, compares: bool) -> int:
    """Returns the bytes of the head's largest chunk, which for a divergence (`compares`) has more tensors."""
    logits = response_tokens * shape.vocabulary
    chunk = _BYTES_PER_LOGIT * min(HEAD_CHUNK_ELEMENTS_ON_GPU, logits)
    if not compares:
        return chunk
    return max(chunk, _BYTES_PER_COMPARED_LOGIT * min(DIVERGENCE_CHUNK_ELEMENTS_ON_GPU, logits))


def bytes_in_4_bits(*, double_quantization: bool) -> float:
    """Returns the bytes of a 4-bit weight: half a byte, and its share of a scale for every 64 weights.

    A scale is a float32 number; with double quantization one byte, and a float32 number for every 256 scales.
    """
    scale_bytes = 1 + 4 / 256 if double_quantization else 4
    return 0.5 + scale_bytes / 64


def engine_sleeps(memory: Memory, rollout: RolloutConfig, *, free: int, total: int) -> bool:
    """Returns whether vLLM frees its memory during scoring and updates on a device with `free` of `total` bytes.

    With `rollout.sleep=auto` it does unless its share fits beside the upper bound of the trainer's largest pass.
    """
    if not memory.with_vllm:
        return False
    if rollout.sleep != "auto":
        return rollout.sleep
    share = int(rollout.gpu_memory_utilization * total)
    return share + bound_in_passes(memory) > free


def bound_in_passes(memory: Memory) -> int:
    """Returns the most bytes that the trainer's allocator takes from the device in scoring and updates."""
    return memory.weights + memory.optimizer + int(RESERVED_PER_ALLOCATED * memory.largest_pass)


def fit(memory: Memory, rollout: RolloutConfig, *, free: int, total: int) -> tuple[str | None, int]:
    """Returns why a run cannot start on a device (None if it can), and the bytes that its upper bound lacks.

    Of the device's `total` bytes, `free` are free before anything loads. Weights and optimizer are beside vLLM's share; in
    a pass only if vLLM does not sleep (`engine_sleeps`). Another generator's weights always stay.
    """
    trained = memory.weights + memory.optimizer
    share = memory.engine
    if memory.with_vllm:
        share = int(rollout.gpu_memory_utilization * total)
    share_in_passes = share
    asleep = 0
    if engine_sleeps(memory, rollout, free=free, total=total):
        share_in_passes = 0
        asleep = ASLEEP_BYTES
    sampling = trained - memory.away + share
    passing = trained + memory.least_pass + share_in_passes
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
    upper_bound = bound_in_passes(memory) + share_in_passes + asleep
    return refused, max(0, upper_bound - free)


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
    share = gib(rollout.gpu_memory_utilization * total)
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


def shape_of(config: Any, *, lora: LoraConfig, trust_remote_code: bool = False) -> ModelShape:
    """Returns the shape of the model that a transformers configuration describes, built on the meta device."""
    model = _on_meta(config, trust_remote_code=trust_remote_code)
    head = model.get_output_embeddings()
    adapted = _adapted(model, lora)
    blocks = [_size(block) for block in pretrained.sharded_blocks(model)]
    tower = family_of(config, trust_remote_code=trust_remote_code).vision_parts(model)
    in_tower: set[torch.nn.Module] = set()
    for part in tower:
        in_tower.update(part.modules())
    text_linear = 0
    for module in model.modules():
        if type(module) is torch.nn.Linear and module not in in_tower and module is not head:
            text_linear += module.weight.numel()
    adapter = lora.rank * sum(layer.in_features + layer.out_features for layer in adapted)
    if lora.use_dora:
        adapter += sum(layer.out_features for layer in adapted)  # a magnitude for each output
    vision = getattr(config, "vision_config", None)  # text models' configurations lack the entry
    return ModelShape(
        parameters=_size(model),
        vision=sum(map(_size, tower)),
        block=max(blocks, default=0),
        outside=_size(model) - sum(blocks),
        adapter=adapter,
        adapts_vision=not in_tower.isdisjoint(adapted),
        text_linear=text_linear,
        vocabulary=head.weight.shape[0],
        text_stack=_stack(config.get_text_config()),
        vision_stack=_stack(vision) if hasattr(vision, "intermediate_size") else None,
        patches_per_token=_patches_per_token(config, vision),
    )


def _patches_per_token(config: Any, vision: Any) -> int:
    """Returns how many image patches are merged into one token; families name this differently.

    A tower without merging, or with another name for it, counts as merging 2 x 2 patches.
    """
    tokens_per_image = getattr(config, "mm_tokens_per_image", None)  # Gemma 3
    if tokens_per_image is not None:
        return (vision.image_size // vision.patch_size) ** 2 // tokens_per_image
    downsample_ratio = getattr(config, "downsample_ratio", None)  # InternVL
    if downsample_ratio is not None:
        return round(1 / downsample_ratio**2)
    for part, name in (
        (vision, "spatial_merge_size"),  # Qwen-VL, GLM-V
        (vision, "pooling_kernel_size"),  # Gemma 4
        (config, "scale_factor"),  # SmolVLM, Idefics3
        (config, "downsample_factor"),  # LFM2-VL
    ):
        side = getattr(part, name, None)
        if side is not None:
            return side**2
    return 4


def _on_meta(config: Any, *, trust_remote_code: bool) -> Any:
    """Builds the model of a configuration without memory for its weights."""
    import transformers

    family = family_of(config, trust_remote_code=trust_remote_code)
    class_name = "AutoModelForImageTextToText" if family.reads_images else "AutoModelForCausalLM"
    model_class = getattr(transformers, class_name)
    try:
        with torch.device("meta"):
            return model_class.from_config(config, trust_remote_code=trust_remote_code)
    except (ValueError, TypeError, AttributeError, RuntimeError) as error:
        raise ConfigError(f"no model can be built from this configuration: {error}") from error


def _adapted(model: Any, lora: LoraConfig) -> list[torch.nn.Linear]:
    """Returns the linear layers that PEFT would adapt, without PEFT, which would open a context on each GPU."""
    if lora.rank == 0:
        return []
    targets = lora.target_modules.split(",")
    endings = tuple(f".{target.strip()}" for target in targets)
    excluded = pretrained.excluded_from_adapter(lora, model.config)
    adapted: list[torch.nn.Linear] = []
    for name, module in model.named_modules():
        if not isinstance(module, torch.nn.Linear):
            continue
        if excluded is not None and re.fullmatch(excluded, name):
            continue
        in_all_linear = targets == ["all-linear"] and module is not model.get_output_embeddings()
        if in_all_linear or f".{name}".endswith(endings):
            adapted.append(module)
    return adapted


def _size(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _stack(config: Any) -> Stack:
    """Reads a stack's sizes; families name the depth differently, and omit the head's size or the number of key heads.

    If layers have heads of different sizes, as in Gemma 4, the widest layer counts for all.
    """
    depth = getattr(config, "num_hidden_layers", None) or config.depth
    # transformers refuses to read what differs between layers from the whole configuration.
    has_different_layers = getattr(config, "is_heterogeneous", False)
    layers: list[Any] = [config.per_layer_config[index] for index in range(depth)] if has_different_layers else [config]
    queries: list[int] = []
    keys: list[int] = []
    for layer in layers:
        heads = getattr(layer, "num_attention_heads", None) or layer.num_heads
        key_heads = getattr(layer, "num_key_value_heads", None) or heads
        head_size = getattr(layer, "head_dim", None) or layer.hidden_size // heads
        queries.append(heads * head_size)
        keys.append(key_heads * head_size)
    return Stack(
        depth=depth,
        hidden=config.hidden_size,
        queries=max(queries),
        keys=max(keys),
        intermediate=config.intermediate_size,
    )
