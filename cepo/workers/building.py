"""Builds the trained models: loads them, adds heads and adapters, and shards them over the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from cepo.config.worker_schema import ActorConfig, CriticConfig, FsdpConfig
from cepo.errors import ConfigError
from cepo.models import pretrained, segments
from cepo.models.compiled_layers import compile_decoder, keep_compiled_code
from cepo.models.families import family_of
from cepo.models.head import use_float32_logits
from cepo.models.processing import Processing
from cepo.models.without_waiting import use_masks_without_counting
from cepo.workers.distributed import data_parallel_mesh, this_device
from cepo.workers.scoring_model import ScoringModel, ValueModel


def build_scoring_model(
    config: ActorConfig, *, temperature: float, seed: int, frozen_section: str | None = None
) -> ScoringModel:
    """Builds the sharded policy for scoring and training. Adapter weights are initialised from `seed`.

    With `frozen_section`, which names its settings in errors, no weight is trained.
    """
    mesh = data_parallel_mesh(config.fsdp.fsdp_size)
    trained_dtype = pretrained.torch_dtype(config.fsdp.torch_dtype or "fp32")
    compute_dtype = pretrained.torch_dtype(config.fsdp.mp_param_dtype)
    with_adapter = config.model.lora.rank > 0
    quantization = pretrained.quantization_of(config.model.lora, dtype=compute_dtype)
    base_dtype = compute_dtype if with_adapter else trained_dtype
    base = _load_model(config, frozen_section or "worker.actor.model", base_dtype, quantization)
    if frozen_section is not None:
        base.requires_grad_(False)
    if config.model.fp32_logits and compute_dtype is not torch.float32:
        use_float32_logits(base)
    model = base
    if with_adapter:
        from cepo.workers.adapters import add_adapter  # PEFT takes a second to import

        model = add_adapter(base, config.model.lora, dtype=trained_dtype, seed=seed)
    scoring_model = ScoringModel(model, temperature=temperature)
    _distribute(scoring_model, base, config, mesh)
    return scoring_model


def build_value_model(config: CriticConfig, processing: Processing, *, seed: int) -> ValueModel:
    """Builds the sharded critic: the checkpoint with its LM head replaced by a value head initialised from `seed`."""
    mesh = data_parallel_mesh(config.fsdp.fsdp_size)
    dtype = pretrained.torch_dtype(config.fsdp.torch_dtype or "fp32")
    model = _load_model(config, "worker.critic.model", dtype)
    _require_vocabulary(model, processing, config.model.model_path)
    del model.lm_head
    value_model = ValueModel(model, seed=seed)
    _distribute(value_model, model, config, mesh, exact=[value_model.head])
    return value_model


def _load_model(config: ActorConfig | CriticConfig, section: str, dtype: torch.dtype, quantization: Any = None) -> Any:
    settings = config.model
    assert settings.model_path is not None, "the critic's settings come resolved"
    is_sent_by_first_rank = config.fsdp.enable_rank0_init and quantization is None
    reads_weights = dist.get_rank() == 0 or not is_sent_by_first_rank
    model = pretrained.load_model(
        settings.model_path,
        dtype=dtype,
        trust_remote_code=settings.trust_remote_code,
        override_config=settings.override_config,
        section=section,
        with_weights=reads_weights,
        quantization=quantization,
    )
    if settings.freeze_vision_tower:
        pretrained.freeze_vision_tower(model, section=section)
    return model


def _require_vocabulary(model: Any, processing: Processing, path: str | None) -> None:
    """Raises ConfigError unless the model's image token and vocabulary size fit the tokens of `processing`."""
    image_token_id = family_of(model.config).placeholder_id(model.config)
    actor_token_id = processing.placeholders[0]
    size = model.get_input_embeddings().weight.shape[0]
    actor_size = len(processing.tokenizer)
    if image_token_id != actor_token_id or size < actor_size:
        raise ConfigError(
            f"worker.critic.model.model_path={path} uses a different tokenizer than the actor: its image token is "
            f"{image_token_id} of {size}, the actor's is {actor_token_id} of {actor_size}. Name a checkpoint with "
            "the actor's tokenizer, or null for the actor's."
        )


def _distribute(
    root: ScoringModel | ValueModel,
    base: Any,
    config: ActorConfig | CriticConfig,
    mesh: DeviceMesh,
    *,
    exact: Sequence[nn.Module] = (),
) -> None:
    """Shards `root`, around the model `base`; if only the first rank has read the weights, it broadcasts them.

    Parts in `exact` compute in their storage type. A vision tower without gradient is replicated on every device in its
    compute type: its passes then need no other rank, and each rank caches the features of its own images. Packed 4-bit
    weights are replicated too, because their scales are separate; each rank reads them itself.
    """
    fsdp = config.fsdp
    device = this_device()
    trained: Any = root.model
    if config.model.enable_gradient_checkpointing:
        recompute_blocks(trained, recomputes=True)
        trained.enable_input_require_grads()
    whole_tower = pretrained.frozen_vision_parts(base)
    whole_weights: set[nn.Parameter] = set()
    for part in whole_tower:
        whole_weights.update(part.parameters())
    for parameter in whole_weights:
        parameter.data = parameter.data.to(pretrained.torch_dtype(fsdp.mp_param_dtype))
    packed = pretrained.quantised_weights(root).values()

    offload = OffloadPolicy()
    if fsdp.enable_cpu_offload and device.type != "cpu":
        offload = CPUOffloadPolicy()
    from_first_rank = fsdp.enable_rank0_init and not packed
    state: dict[str, Any] = {}
    if from_first_rank and dist.get_rank() == 0:
        state = root.state_dict()
    if config.model.compile_layers is True or (config.model.compile_layers == "auto" and device.type != "cpu"):
        keep_compiled_code()
        compile_decoder(base.get_decoder())
    if device.type != "cpu":
        use_masks_without_counting(base)
    blocks = pretrained.sharded_blocks(base, without=whole_tower)
    _shard(root, blocks, fsdp, mesh, offload, exact, ignored={*whole_weights, *packed})
    if from_first_rank:
        storage = torch.device("cpu") if isinstance(offload, CPUOffloadPolicy) else device
        _broadcast(root, state, whole_tower, storage)
    for part in whole_tower:
        part.to(device)
    if config.padding_free and root.why_padded is None and device.type != "cpu":
        segments.require_packed_attention(base.get_decoder(), device, pretrained.torch_dtype(fsdp.mp_param_dtype))


def recompute_blocks(model: Any, *, recomputes: bool) -> None:
    """Lets the blocks of transformers' model keep only their inputs for the backward pass, or all their activations."""
    if recomputes:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    else:
        model.gradient_checkpointing_disable()


def _broadcast(root: nn.Module, state: dict[str, Any], whole_tower: Sequence[nn.Module], storage: torch.device) -> None:
    """Sends the first rank's `state` to all ranks, whose shards are on the device `storage`."""
    if dist.get_rank() == 0:
        for part in whole_tower:  # to the device of the shards, because a broadcast needs one device type
            part.to(storage)
    else:
        # The weights are on the meta device and get memory here; only the buffers have values already.
        buffers = {name: buffer.clone() for name, buffer in root.named_buffers()}
        root.to_empty(device=storage)
        for name, buffer in root.named_buffers():
            buffer.copy_(buffers[name])
    set_model_state_dict(root, state, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))


def _shard(
    root: nn.Module,
    blocks: Sequence[nn.Module],
    fsdp: FsdpConfig,
    mesh: DeviceMesh,
    offload: OffloadPolicy,
    exact: Sequence[nn.Module],
    ignored: set[nn.Parameter],
) -> None:
    """Applies FSDP2: one group per repeated block, and the rest (embeddings, merger, head) in the root.

    Parameters in `ignored` remain whole. Each group moves to the mesh's device when it is sharded, so no device holds
    the whole model. Gradients are summed over ranks, not averaged (FSDP's default), because each rank's loss is its
    share of a sum with global denominators.
    """
    policy = MixedPrecisionPolicy(
        param_dtype=pretrained.torch_dtype(fsdp.mp_param_dtype),
        reduce_dtype=pretrained.torch_dtype(fsdp.mp_reduce_dtype),
    )
    common: Any = {"mesh": mesh, "offload_policy": offload, "ignored_params": ignored}
    for part in exact:  # separate groups, because the root's policy would cast them
        fully_shard(part, **common)
    for block in blocks:
        fully_shard(block, mp_policy=policy, reshard_after_forward=fsdp.enable_full_shard, **common)
    fully_shard(root, mp_policy=policy, reshard_after_forward=False, **common)
    for part in root.modules():
        if isinstance(part, FSDPModule):
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)  # gloo supports sums, but not scaled sums
