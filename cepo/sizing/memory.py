"""Estimates the memory of a trained model from its shape, without loading weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

VALUE_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}


@dataclass(frozen=True, kw_only=True)
class Layers:
    """A stack of equal transformer blocks.

    Attributes:
        depth: number of blocks.
        hidden, intermediate: widths of the hidden state and of the MLP.
        queries, keys: number of heads x head size.
    """

    depth: int
    hidden: int
    queries: int
    keys: int
    intermediate: int


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The sizes of a model that the estimate needs.

    Attributes:
        parameters: all parameters; tied weights count once.
        vision_parameters: those of the vision tower, including the merger.
        largest_block: parameters of the largest block that FSDP gathers separately.
        outside_blocks: parameters outside such blocks (embeddings, merger, head), which remain gathered.
        adapted: (inputs, outputs) of each linear layer that gets an adapter.
        text, vision: the two stacks; vision is None for a text model.
        vocabulary: rows of the output head.
        patches_per_token: image patches that are merged into one token.
        vision_outside_blocks: those of `outside_blocks` in the vision tower.
        adapts_vision: whether a layer of the vision tower is among `adapted`.
        text_linear: parameters of the language model's linear layers without the head, which QLoRA keeps in 4 bits.
    """

    parameters: int
    vision_parameters: int
    largest_block: int
    outside_blocks: int
    adapted: tuple[tuple[int, int], ...]
    text: Layers
    vision: Layers | None
    vocabulary: int
    patches_per_token: int = 4
    vision_outside_blocks: int = 0
    adapts_vision: bool = False
    text_linear: int = 0


@dataclass(frozen=True, kw_only=True)
class TrainingShape:
    """The training settings that the estimate needs.

    Attributes:
        lora_rank: 0 for full fine-tuning.
        use_dora: the adapter also has a magnitude for each output of an adapted layer.
        bytes_in_4_bits: per weight of the language model's linear layers under QLoRA, with its scale; 0: not in 4 bits.
        trained_type, compute_type: `fp32`, `bf16` or `fp16`: of the trained weights, and of forward and backward.
        optimizer: `adamw`, or `adamw_bf16` with momentum and compensation in bf16 and a float32 second moment.
        freeze_vision_tower: the vision tower's weights get no gradient.
        full_shard: gathered blocks are freed after their forward pass.
        gradient_checkpointing: only the blocks' inputs are kept after the forward pass.
        rows, prompt_tokens, response_tokens: of an update's micro-batch, in which every row has the maximum length.
        head_chunk_elements: number of logits in memory at once.
        divergence_chunk_elements: the same when whole distributions are compared; 0 if they never are.
        weight_copies: number of copies of the trained weights (teacher, reference).
        devices: FSDP shards weights, gradients, optimizer and copies over them, but no vision tower without gradient.
        scoring_rows: of a micro-batch that is scored without gradient, in which every row has the maximum length.
        prompts: of a step on one device; their image features are kept if the vision tower has no gradient.
        offload_params: weights leave the device while responses are sampled.
        offload_optimizer: the optimizer's state is on the device during updates only.
        cpu_offload: weights, gradients, optimizer and copies are in host memory.
    """

    lora_rank: int
    trained_type: str
    compute_type: str
    freeze_vision_tower: bool
    full_shard: bool
    gradient_checkpointing: bool
    rows: int
    prompt_tokens: int
    response_tokens: int
    head_chunk_elements: int
    divergence_chunk_elements: int = 0
    use_dora: bool = False
    bytes_in_4_bits: float = 0.0
    weight_copies: int = 0
    devices: int = 1
    optimizer: str = "adamw"
    scoring_rows: int = 0
    prompts: int = 0
    offload_params: bool = False
    offload_optimizer: bool = False
    cpu_offload: bool = False


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """The bytes that a trained model needs on its device.

    `activations`, `scoring` and `features` are rough upper bounds; the rest follows from the shape.

    Attributes:
        weights, copies: on the device from the start; copies are the teacher's and the reference's.
        gathered: weights that FSDP holds in the compute type during a pass.
        gradients, optimizer: on the device from the first update on; gradients are freed after each update.
        reducing: gradients before they are sharded, in addition to the gathered weights, during a backward pass.
        stepping: temporary tensors of the optimizer's step.
        swapped: live weights that are set aside while a teacher's copy replaces them.
        activations: of an update's forward and backward pass.
        scoring: of a pass without gradient.
        features: of the images of a step, if they are kept.
        leaves_while_sampling: the part of `weights` and `optimizer` that is in host memory while responses are sampled.
        leaves_while_scoring: the part of `optimizer` that is in host memory while rows are scored.
    """

    weights: int
    gathered: int
    gradients: int
    optimizer: int
    copies: int
    activations: int
    reducing: int = 0
    stepping: int = 0
    swapped: int = 0
    scoring: int = 0
    features: int = 0
    leaves_while_sampling: int = 0
    leaves_while_scoring: int = 0

    @property
    def loaded(self) -> int:
        """The bytes on the device when the rollout engine starts."""
        return self.weights + self.copies

    @property
    def kept(self) -> int:
        """The bytes beyond `loaded` during sampling, from step 2 on; negative if weights leave the device."""
        return self.optimizer - self.leaves_while_sampling

    @property
    def certain(self) -> int:
        """The bytes that an update or a scoring pass needs regardless of the lengths of prompts and responses."""
        update = self.gradients + self.optimizer + max(self.gathered + self.reducing, self.stepping)
        scoring = self.optimizer - self.leaves_while_scoring + self.gathered + self.swapped
        return self.loaded + max(update, scoring)

    @property
    def total(self) -> int:
        """The upper bound of the bytes of an update or a scoring pass, whichever is larger."""
        backward = self.gathered + self.reducing + self.activations + self.features
        update = self.gradients + self.optimizer + max(backward, self.stepping)
        passing = self.gathered + self.swapped + self.scoring + self.features
        return self.loaded + max(update, self.optimizer - self.leaves_while_scoring + passing)


def adapter_parameters(adapted: Sequence[tuple[int, int]], rank: int) -> int:
    """Returns `sum of rank (inputs + outputs)`, the size of the two factors of each adapted layer."""
    return rank * sum(inputs + outputs for inputs, outputs in adapted)


def trained_parameters(model: ModelShape, training: TrainingShape) -> int:
    """Counts the trained parameters: the adapter's under LoRA, else all, without a frozen vision tower."""
    if training.lora_rank > 0:
        magnitudes = sum(outputs for _, outputs in model.adapted) if training.use_dora else 0
        return adapter_parameters(model.adapted, training.lora_rank) + magnitudes
    return model.parameters - (model.vision_parameters if training.freeze_vision_tower else 0)


def whole_parameters(model: ModelShape, training: TrainingShape) -> int:
    """Counts the parameters of a vision tower without gradient, which is not sharded."""
    adapted = training.lora_rank > 0 and not model.adapts_vision
    return model.vision_parameters if training.freeze_vision_tower or adapted else 0


def bytes_in_4_bits(*, double_quantization: bool) -> float:
    """Returns the bytes of a 4-bit weight: half a byte, and its share of a scale for every 64 weights.

    A scale is a float32 number; with double quantization it is one byte and its share of a float32 number for every 256
    scales.
    """
    scale = 1 + 4 / 256 if double_quantization else 4
    return 0.5 + scale / 64


def training_memory(model: ModelShape, training: TrainingShape) -> Estimate:
    """Returns the bytes for one trained model on one device.

    - weights: the device's shard, in the trained type; under LoRA the base in the compute type and the adapter in the
      trained type. A vision tower without gradient (in the compute type) and 4-bit weights are not sharded.
    - gathered: in the compute type, the weights outside the blocks and two blocks (the current one and the next), or
      all blocks without full sharding. Under QLoRA also the largest 4-bit weight, dequantised for its product.
    - gradients: one per trained weight, in the trained type; optimizer: see `optimizer_bytes_per_weight`.
    - reducing: see `reducing_bytes`; stepping: see `stepping_bytes`.
    - copies: the trained weights in float32; swapped: the live weights, in the trained type.
    - activations: see `activation_bytes`; scoring: see `scoring_bytes`; features: see `feature_bytes`.
    """
    trained_bytes, compute_bytes = VALUE_BYTES[training.trained_type], VALUE_BYTES[training.compute_type]
    trained = trained_parameters(model, training)
    whole = whole_parameters(model, training)
    in_4_bits = model.text_linear if training.bytes_in_4_bits else 0
    packed = int(in_4_bits * training.bytes_in_4_bits)
    sharded = model.parameters - whole - in_4_bits
    with_adapter = training.lora_rank > 0
    weights = sharded * (compute_bytes if with_adapter else trained_bytes) + with_adapter * trained * trained_bytes
    blocks = 2 * model.largest_block if training.full_shard else sharded
    outside = model.outside_blocks - (model.vision_outside_blocks if whole else 0)
    gathered = min(outside + blocks, sharded) * compute_bytes
    if in_4_bits:
        gathered += model.text.hidden * max(model.text.intermediate, model.text.queries) * compute_bytes
    shares, shards = -(-trained // training.devices), -(-weights // training.devices)
    optimizer = shares * optimizer_bytes_per_weight(training.trained_type, training.optimizer)
    on_device = 0 if training.cpu_offload else 1
    copies = training.weight_copies * shares * 4 * on_device
    away = optimizer * on_device if training.offload_optimizer else 0
    return Estimate(
        weights=shards * on_device + whole * compute_bytes + packed,
        gathered=gathered,
        gradients=shares * trained_bytes * on_device,
        optimizer=optimizer * on_device,
        copies=copies,
        activations=activation_bytes(model, training),
        reducing=reducing_bytes(model, training),
        stepping=stepping_bytes(model, training) * on_device,
        swapped=shares * trained_bytes if copies else 0,
        scoring=scoring_bytes(model, training),
        features=feature_bytes(model, training),
        leaves_while_sampling=away + ((shards + packed) * on_device if training.offload_params else 0),
        leaves_while_scoring=away,
    )


def reducing_bytes(model: ModelShape, training: TrainingShape) -> int:
    """Returns the bytes of gradients that a backward pass through all weights holds before they are sharded.

    These are the gradients outside the blocks (embeddings, head) and of one block, in the compute type and in float32
    for their reduction. The head's gradient is summed in float32 before that. An adapter's gradients are not counted.
    """
    if training.lora_rank > 0:
        return 0
    outside = model.outside_blocks - (model.vision_outside_blocks if whole_parameters(model, training) else 0)
    reduced = (outside + model.largest_block) * (VALUE_BYTES[training.compute_type] + 4)
    return max(reduced, 4 * model.vocabulary * model.text.hidden)


def stepping_bytes(model: ModelShape, training: TrainingShape) -> int:
    """Returns the bytes of the temporary tensors in an optimizer step.

    torch's AdamW holds the square roots of all second moments at once on a GPU. `adamw_bf16` processes one tensor at a
    time, of which the embeddings are the largest, and holds six float32 numbers per weight.
    """
    shares = -(-trained_parameters(model, training) // training.devices)
    if training.optimizer == "adamw_bf16":
        return 6 * 4 * min(shares, -(-model.vocabulary * model.text.hidden // training.devices))
    return shares * VALUE_BYTES[training.trained_type]


def optimizer_bytes_per_weight(trained_type: str, optimizer: str) -> int:
    """Returns the bytes of Adam's two moments in the trained type, or 2 + 4 + 2 bytes for `adamw_bf16`."""
    return 8 if optimizer == "adamw_bf16" else 2 * VALUE_BYTES[trained_type]


def activation_bytes(model: ModelShape, training: TrainingShape) -> int:
    """Returns an upper bound: every row has the maximum length, and every prompt token belongs to an image.

    Attention scores are not kept (SDPA). The vision tower counts only if it is trained.
    """
    tokens = training.rows * (training.prompt_tokens + training.response_tokens)
    total = stack_bytes(model.text, tokens, training)
    if model.vision is not None and training.lora_rank == 0 and not training.freeze_vision_tower:
        total += stack_bytes(model.vision, training.rows * training.prompt_tokens * model.patches_per_token, training)
    return total + head_bytes(model, training, training.rows)


def head_bytes(model: ModelShape, training: TrainingShape, rows: int) -> int:
    """Returns the peak bytes of the head for `rows` responses of maximum length.

    A chunk holds logits in float32 and their gradient in 16 bits. A divergence holds 14 float32 tensors, counted on a
    CPU: logits and distributions of both models, their mixture, their gradients.
    """
    logits = rows * training.response_tokens * model.vocabulary
    return max(
        (4 + 2) * min(training.head_chunk_elements, logits), 14 * 4 * min(training.divergence_chunk_elements, logits)
    )


def scoring_bytes(model: ModelShape, training: TrainingShape) -> int:
    """Returns an upper bound for a pass without gradient, with rows as in `activation_bytes`.

    It is the larger of one block and the head's chunk. The vision tower runs before the language model, once per image.
    """
    if training.scoring_rows == 0:
        return 0
    compute_bytes = VALUE_BYTES[training.compute_type]
    prompts = training.scoring_rows * training.prompt_tokens
    tokens = prompts + training.scoring_rows * training.response_tokens
    inside = tokens * passing_bytes_per_token(model.text, compute_bytes)
    states = training.scoring_rows * training.response_tokens * model.text.hidden * compute_bytes
    needed = max(
        inside, tokens * model.text.hidden * compute_bytes + states + head_bytes(model, training, training.scoring_rows)
    )
    if model.vision is None:
        return needed
    patches = prompts * model.patches_per_token
    return max(needed, patches * passing_bytes_per_token(model.vision, compute_bytes))


def feature_bytes(model: ModelShape, training: TrainingShape) -> int:
    """Returns the bytes of image features kept for a step under a vision tower without gradient.

    These are the inputs for the language model and three of its layers; every prompt token counts as an image token.
    """
    if model.vision is None or not whole_parameters(model, training):
        return 0
    return training.prompts * training.prompt_tokens * 4 * model.text.hidden * VALUE_BYTES[training.compute_type]


def passing_bytes_per_token(layers: Layers, compute_bytes: int) -> int:
    """Returns the peak bytes of one block per token in a pass without gradient.

    It always holds the model's and the block's input, the residual, its normalised state and the rotations (5 hidden
    states), and one after the other: the norm's float32 copies (3); attention's queries before and after norm and
    rotation with its output (4), keys and values likewise (5), and the float32 copies of the queries' norm (3); the
    MLP's activation, its other branch and their product (3).
    """
    normed = 4 * 3 * layers.hidden
    attention = compute_bytes * (4 * layers.queries + 5 * layers.keys) + 4 * 3 * layers.queries
    mlp = compute_bytes * 3 * layers.intermediate
    return compute_bytes * 5 * layers.hidden + max(normed, attention, mlp)


def stack_bytes(layers: Layers, tokens: int, training: TrainingShape) -> int:
    """Returns the bytes that a stack keeps for backward; with checkpointing, all inputs and one block's activations."""
    compute_bytes = VALUE_BYTES[training.compute_type]
    inside = tokens * block_bytes_per_token(layers, compute_bytes)
    if not training.gradient_checkpointing:
        return layers.depth * inside
    return layers.depth * tokens * layers.hidden * compute_bytes + inside


def block_bytes_per_token(layers: Layers, compute_bytes: int) -> int:
    """Returns the bytes that one block keeps per token, counted by the widths of the tensors in the forward pass.

    - hidden: block input, two normalised states, attention's input to the residual, sum, and the MLP's output (6).
    - queries: before and after norm and rotation, attention's output (4); keys and values likewise (3 + 1, as 5).
    - intermediate: gate, its activation, up, product (4).
    - norms run in float32: two of the hidden state with two tensors each, and two each of queries and keys.
    """
    computed = 6 * layers.hidden + 4 * layers.queries + 5 * layers.keys + 4 * layers.intermediate
    normalised = 4 * layers.hidden + 2 * (layers.queries + layers.keys)
    return compute_bytes * computed + 4 * normalised


def generator_memory(model: ModelShape, dtype: str, cache_tokens: int) -> int:
    """Returns the bytes of a generator's own weights in `dtype` and of the KV cache for `cache_tokens` tokens."""
    size = VALUE_BYTES[dtype]
    return size * (model.parameters + 2 * model.text.depth * model.text.keys * cache_tokens)


def checkpoint_bytes(
    trained: int, trained_type: str, weight_copies: int, optimizer: str = "adamw", *, weights_only: bool = False
) -> int:
    """Returns the bytes of a checkpoint: trained weights and, unless `weights_only`, optimizer and float32 copies."""
    if weights_only:
        return trained * VALUE_BYTES[trained_type]
    state = optimizer_bytes_per_weight(trained_type, optimizer)
    return trained * (VALUE_BYTES[trained_type] + state + 4 * weight_copies)
