"""Builds the trained model: weights, adapter, gradient checkpointing, sharding."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from cepo.config.schema import ActorConfig, LoraConfig
from cepo.errors import ConfigError
from cepo.models import family
from cepo.workers.scoring_model import ScoringModel


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
    blocks = family.sharded_blocks(model)
    if config.model.freeze_vision_tower:
        family.freeze_vision_tower(model)
    if with_adapter:
        model = add_adapter(model, config.model.lora, dtype=trained_dtype, seed=seed)
    if config.model.enable_gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
    scoring_model = ScoringModel(model.to(device), temperature=temperature)
    _shard(scoring_model, blocks, config, mesh)
    return scoring_model


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
    settings = PeftLoraConfig(
        task_type="CAUSAL_LM",
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=0.0,
        target_modules=targets,
        exclude_modules=lora.exclude_modules,
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


def _shard(root: ScoringModel, blocks: list[nn.Module], config: ActorConfig, mesh: DeviceMesh) -> None:
    """FSDP2: one group per repeated block, and the rest (embeddings, merger, head) in the root's."""
    policy = MixedPrecisionPolicy(
        param_dtype=family.torch_dtype(config.fsdp.mp_param_dtype),
        reduce_dtype=family.torch_dtype(config.fsdp.mp_reduce_dtype),
    )
    for block in blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=config.fsdp.enable_full_shard)
    fully_shard(root, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
