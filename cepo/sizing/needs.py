"""Computes the memory that a configuration needs on each device, for `cepo doctor` and `cepo train`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from cepo.algorithms import build_estimator
from cepo.config import RunConfig, resolved_critic
from cepo.config.schema import FsdpConfig, LoraConfig, OffloadConfig
from cepo.models.head import DIVERGENCE_CHUNK_ELEMENTS_ON_GPU, HEAD_CHUNK_ELEMENTS_ON_GPU
from cepo.sizing.memory import (
    Estimate,
    ModelShape,
    TrainingShape,
    bytes_in_4_bits,
    checkpoint_bytes,
    generator_memory,
    trained_parameters,
    training_memory,
)
from cepo.sizing.phases import Demand
from cepo.sizing.shape import model_shape

ShapeOf = Callable[[str, bool, Mapping[str, Any], LoraConfig], ModelShape]
"""A function that returns a model's shape from its path, trust_remote_code, override_config and adapter settings."""


@dataclass(frozen=True, kw_only=True)
class Needs:
    """The bytes that a run needs on one device, and those of a checkpoint."""

    model: ModelShape
    actor: Estimate
    critic: Estimate | None
    generator: int
    checkpoint: int

    @property
    def trained(self) -> tuple[Estimate, ...]:
        """The estimates of the actor and, if there is one, of the critic."""
        return (self.actor,) if self.critic is None else (self.actor, self.critic)

    @property
    def certain(self) -> int:
        """The bytes that the trained models need regardless of lengths; one model works at a time."""
        return self._loaded + max(each.certain - each.loaded + self._beside(each) for each in self.trained)

    @property
    def total(self) -> int:
        """The bytes that the trained models need, with the upper bounds of the activations."""
        return self._loaded + max(each.total - each.loaded + self._beside(each) for each in self.trained)

    def demand(self, *, with_vllm: bool) -> Demand:
        """Returns the input of `plan_phases`. A generator other than vLLM keeps its own weights on the device."""
        other = 0 if with_vllm else self.generator
        return Demand(
            loaded=self._loaded,
            kept=sum(each.kept for each in self.trained) + other,
            certain=self.certain - self._loaded + other,
            bound=self.total - self._loaded + other,
            engine=self.generator,
            with_vllm=with_vllm,
        )

    @property
    def _loaded(self) -> int:
        return sum(each.loaded for each in self.trained)

    def _beside(self, working: Estimate) -> int:
        """Returns the bytes that the other models hold on the device beyond `loaded` while one works."""
        return sum(each.optimizer - each.leaves_while_scoring for each in self.trained if each is not working)


def estimate_needs(config: RunConfig, *, cpu_engine: bool, shape_of_path: ShapeOf | None = None) -> Needs:
    """Returns the memory that a run needs on each device.

    Args:
        cpu_engine: vLLM's KV cache is in host memory.
        shape_of_path: returns the shapes of models; by default reads their configuration files.

    Raises:
        ConfigError: the model's configuration cannot be read.
    """
    look_up = shape_of_path or _shape_from_file
    actor, rollout = config.worker.actor, config.worker.rollout
    estimator = build_estimator(config.algorithm.adv_estimator, config.methods[config.algorithm.adv_estimator])
    settings = actor.model
    model = look_up(settings.model_path, settings.trust_remote_code, settings.override_config, settings.lora)
    training = TrainingShape(
        lora_rank=settings.lora.rank,
        use_dora=settings.lora.use_dora,
        bytes_in_4_bits=_bytes_in_4_bits(settings.lora),
        freeze_vision_tower=settings.freeze_vision_tower,
        gradient_checkpointing=settings.enable_gradient_checkpointing,
        rows=actor.micro_batch_size_per_device_for_update,
        scoring_rows=actor.micro_batch_size_per_device_for_experience,
        weight_copies=_weight_copies(config, estimator),
        divergence_chunk_elements=_divergence_chunk(config, estimator),
        optimizer=actor.optim.strategy,
        **_types(actor.fsdp, actor.offload),
        **_lengths(config),
    )
    critic = _critic_estimate(config, look_up) if estimator.needs_values else None
    trained, trained_type = trained_parameters(model, training), actor.fsdp.torch_dtype or "fp32"
    weights_only = config.trainer.save_model_only
    checkpoint = checkpoint_bytes(
        trained, trained_type, training.weight_copies, training.optimizer, weights_only=weights_only
    )
    if critic is not None:
        checkpoint += training.devices * (critic.weights + (0 if weights_only else critic.optimizer))
    own_cache = _cpu_cache_bytes() if cpu_engine else 0
    return Needs(
        model=model,
        actor=training_memory(model, training),
        critic=critic,
        generator=-(-generator_memory(model, rollout.dtype, _cache_tokens(config)) // rollout.tensor_parallel_size)
        + own_cache,
        checkpoint=checkpoint,
    )


def _bytes_in_4_bits(lora: LoraConfig) -> float:
    return 0.0 if lora.quantization is None else bytes_in_4_bits(double_quantization=lora.double_quantization)


def _shape_from_file(path: str, trust: bool, override: Mapping[str, Any], lora: LoraConfig) -> ModelShape:
    return model_shape(path, trust_remote_code=trust, override_config=override, lora=lora)


def _critic_estimate(config: RunConfig, look_up: ShapeOf) -> Estimate:
    settings = resolved_critic(config.worker)
    assert settings.model.model_path is not None
    training = TrainingShape(
        lora_rank=0,
        freeze_vision_tower=settings.model.freeze_vision_tower,
        gradient_checkpointing=settings.model.enable_gradient_checkpointing,
        rows=settings.micro_batch_size_per_device_for_update,
        scoring_rows=settings.micro_batch_size_per_device_for_experience,
        optimizer=settings.optim.strategy,
        **_types(settings.fsdp, settings.offload),
        **_lengths(config),
    )
    model = look_up(
        settings.model.model_path, settings.model.trust_remote_code, settings.model.override_config, LoraConfig()
    )
    return training_memory(model, training)


def _lengths(config: RunConfig) -> dict[str, Any]:
    data = config.data
    devices = config.trainer.nnodes * config.trainer.n_gpus_per_node
    return {
        "prompt_tokens": data.max_prompt_length,
        "response_tokens": data.max_response_length,
        "head_chunk_elements": HEAD_CHUNK_ELEMENTS_ON_GPU,
        "devices": devices,
        "prompts": -(-data.rollout_batch_size // devices),
    }


def _divergence_chunk(config: RunConfig, estimator: Any) -> int:
    """Returns 0 if the update does not compare whole distributions."""
    algorithm = config.algorithm
    over_vocabulary = algorithm.kl_penalty == "full" and not algorithm.disable_kl
    return DIVERGENCE_CHUNK_ELEMENTS_ON_GPU if estimator.distilled_view is not None or over_vocabulary else 0


def _types(fsdp: FsdpConfig, offload: OffloadConfig) -> dict[str, Any]:
    return {
        "trained_type": fsdp.torch_dtype or "fp32",
        "compute_type": fsdp.mp_param_dtype,
        "full_shard": fsdp.enable_full_shard,
        "cpu_offload": fsdp.enable_cpu_offload,
        "offload_params": offload.offload_params,
        "offload_optimizer": offload.offload_optimizer,
    }


def _weight_copies(config: RunConfig, estimator: Any) -> int:
    """Counts copies of the trained weights: the teacher's, unless it is the actor; without LoRA, the reference's."""
    with_adapter = config.worker.actor.model.lora.rank > 0
    sources = [estimator.teacher.source] if estimator.views else []
    sources += [] if config.algorithm.disable_kl else ["reference"]
    return sum(source != "actor" and not (with_adapter and source == "reference") for source in sources)


def _cache_tokens(config: RunConfig) -> int:
    """Returns the tokens of the longest possible request: an engine needs at least this KV cache to start."""
    return config.worker.rollout.max_model_len or config.data.max_prompt_length + config.data.max_response_length


def _cpu_cache_bytes() -> int:
    """Returns the bytes that vLLM allocates for the KV cache without a GPU."""
    return int(float(os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1")) * 2**30)
