"""Builds the trained models: weights, adapter or value head, gradient checkpointing, sharding."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from cepo.config.schema import ActorConfig, CriticConfig, FsdpConfig, LoraConfig
from cepo.errors import ConfigError
from cepo.models import family
from cepo.models.processing import Processing
from cepo.workers.scoring_model import PictureEncoder, ScoringModel
from cepo.workers.value_model import ValueModel


def build_scoring_model(
    config: ActorConfig, *, mesh: DeviceMesh, device: torch.device, temperature: float, seed: int
) -> ScoringModel:
    """The sharded policy, ready to score and to train. Adapter weights are drawn from `seed`."""
    trained_dtype = family.torch_dtype(config.fsdp.torch_dtype or "fp32")
    compute_dtype = family.torch_dtype(config.fsdp.mp_param_dtype)
    with_adapter = config.model.lora.rank > 0
    model: Any = family.load_model(
        config.model.model_path,
        dtype=compute_dtype if with_adapter else trained_dtype,
        trust_remote_code=config.model.trust_remote_code,
        override_config=config.model.override_config,
    )
    takes_segments = family.share_segments(model)
    blocks = family.sharded_blocks(model)
    if config.model.freeze_vision_tower:
        family.freeze_vision_tower(model)
    base = model
    if with_adapter:
        model = add_adapter(model, config.model.lora, dtype=trained_dtype, seed=seed)
    if config.model.enable_gradient_checkpointing:
        _checkpoint_gradients(model)
    scoring_model = ScoringModel(
        model.to(device),
        temperature=temperature,
        encoder=_picture_encoder(base, mesh),
        takes_segments=takes_segments,
    )
    _shard(scoring_model, blocks, config.fsdp, mesh)
    return scoring_model


def build_value_model(
    config: CriticConfig, processing: Processing, *, mesh: DeviceMesh, device: torch.device, seed: int
) -> ValueModel:
    """The sharded critic: the checkpoint without its language head, under a value head drawn from `seed`.

    Raises:
        ConfigError: the checkpoint's vocabulary is not that of `processing`.
    """
    section, settings = "worker.critic.model", config.model
    assert settings.model_path is not None, "the critic's settings come resolved"
    model: Any = family.load_model(
        settings.model_path,
        dtype=family.torch_dtype(config.fsdp.torch_dtype or "fp32"),
        trust_remote_code=settings.trust_remote_code,
        override_config=settings.override_config,
        section=section,
    )
    _require_vocabulary(model, processing, key=f"{section}.model_path", path=settings.model_path)
    del model.lm_head
    takes_segments = family.share_segments(model)
    blocks = family.sharded_blocks(model)
    if settings.freeze_vision_tower:
        family.freeze_vision_tower(model, section=section)
    if settings.enable_gradient_checkpointing:
        _checkpoint_gradients(model)
    encoder = _picture_encoder(model, mesh)
    value_model = ValueModel(model, seed=seed, encoder=encoder, takes_segments=takes_segments).to(device)
    # A group of its own: under the root's policy the head would be cast to the type that the body computes in.
    fully_shard(value_model.head, mesh=mesh)
    _shard(value_model, blocks, config.fsdp, mesh)
    return value_model


def _picture_encoder(model: Any, mesh: DeviceMesh) -> PictureEncoder:
    """Features are kept where no weight of the tower is trained.

    With several devices every pass runs the tower: its sharded weights are gathered by all of them or by none.
    """
    return PictureEncoder(keep=mesh.size() == 1 and not family.trains_vision_tower(model))


def _require_vocabulary(model: Any, processing: Processing, *, key: str, path: str) -> None:
    """Raises where tokens of `processing` would be other tokens to the model, or none."""
    image_token_id = getattr(model.config, "image_token_id", None)
    size, needed = model.get_input_embeddings().weight.shape[0], len(processing.tokenizer)
    if image_token_id != processing.image_token_id or size < needed:
        raise ConfigError(
            f"{key}={path} reads other tokens than the actor: image token {image_token_id} of {size}, the actor's is "
            f"{processing.image_token_id} of {needed}. Name a checkpoint with the actor's tokenizer, or null for the actor's."
        )


def _checkpoint_gradients(model: Any) -> None:
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.enable_input_require_grads()


def add_adapter(model: nn.Module, lora: LoraConfig, *, dtype: torch.dtype, seed: int) -> Any:
    """The model under PEFT's wrapper with a LoRA adapter on the language model's linear layers.

    Raises:
        ConfigError: `target_modules` and `exclude_modules` leave no layer.
    """
    from peft import LoraConfig as PeftLoraConfig
    from peft import get_peft_model

    targets: Any = lora.target_modules
    if targets != "all-linear" and "," in targets:
        targets = [name.strip() for name in targets.split(",")]
    elif targets != "all-linear":
        targets = [targets]
    excluded = lora.exclude_modules
    if excluded == LoraConfig().exclude_modules and not family.is_multimodal(model.config):
        excluded = None  # the default names the vision tower, which a text model lacks
    settings = PeftLoraConfig(
        task_type="CAUSAL_LM",
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=0.0,
        target_modules=targets,
        exclude_modules=excluded,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        try:
            wrapped = get_peft_model(model, settings, autocast_adapter_dtype=False)  # pyright: ignore[reportArgumentType]
        except ValueError as error:
            raise ConfigError(
                f"worker.actor.model.lora: target_modules '{lora.target_modules}' without exclude_modules "
                f"'{lora.exclude_modules}' fits no layer of this model ({error})"
            ) from error
    for parameter in wrapped.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)
    return wrapped


def _shard(root: nn.Module, blocks: list[nn.Module], fsdp: FsdpConfig, mesh: DeviceMesh) -> None:
    """FSDP2: one group per repeated block, and the rest (embeddings, merger, head) in the root's."""
    policy = MixedPrecisionPolicy(
        param_dtype=family.torch_dtype(fsdp.mp_param_dtype),
        reduce_dtype=family.torch_dtype(fsdp.mp_reduce_dtype),
    )
    for block in blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=fsdp.enable_full_shard)
    fully_shard(root, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
