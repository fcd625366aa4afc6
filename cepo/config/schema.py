"""Declares the settings of a run, under EasyR1's key names; each field has its own description."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field

from cepo.algorithms import estimator_class
from cepo.algorithms.settings import DEFAULT_ESTIMATOR, SharedSettings
from cepo.config.data_schema import DataConfig
from cepo.config.rollout_schema import FloatType, RewardConfig, RolloutConfig
from cepo.config.trainer_schema import TrainerConfig
from cepo.sections import NOT_DECISIVE, BelowOne, Count, CountOrOff, Natural, NotNegative, Positive, Share, section
from cepo.trees import Fields


@section
class AlgorithmConfig(SharedSettings):
    """`algorithm.*`: the method, the settings of methods, and what counts as a correct response."""

    adv_estimator: str = DEFAULT_ESTIMATOR
    """Name of the method (the advantage estimator). It reads some of the sections below, with its own presets, and
    `algorithm.<name>` if it has settings that no other method has."""
    disable_kl: bool = False
    """Train without a KL penalty, and without reference weights."""
    use_kl_loss: bool = False
    """Add the KL to the loss; false: subtract it from each token's reward."""
    kl_penalty: Literal["kl", "abs", "mse", "low_var_kl", "full"] = "kl"
    """Estimator of the KL at a sampled token; full: the KL over the whole vocabulary."""
    kl_coef: NotNegative = 1e-3
    """Weight of the KL penalty; with kl_type=adaptive the initial weight."""
    kl_type: Literal["fixed", "adaptive"] = "fixed"
    """fixed: the weight of the KL is constant; adaptive: it follows kl_target, which needs use_kl_loss=false."""
    kl_horizon: Positive = 10000.0
    """Adaptive KL: horizon in sequences; the larger it is, the more slowly the weight changes."""
    kl_target: Positive = 0.1
    """Adaptive KL: target of the KL in nats per token."""
    online_filtering: bool = False
    """Keep only groups whose mean filter_key is between filter_low and filter_high, and sample other problems in place
    of the rest."""
    filter_key: str = "overall"
    """Reward field that online filtering averages over a group."""
    filter_low: float = 0.01
    """Online filtering keeps groups with a mean above this."""
    filter_high: float = 0.99
    """Online filtering keeps groups with a mean below this."""
    overlong_filter: bool = False
    """Do not train on responses that the length limit cut; their rewards still count in their groups."""
    top_entropy: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Train only on this share of the tokens, those with the highest entropy, counted over the rollouts that learn.
    1.0: all tokens; below 1.0 a step takes one more pass."""
    correct_key: str = "accuracy"
    """Reward field that decides whether a response is correct; if the scores do not have it, `overall` decides."""
    correct_threshold: float = 0.5
    """A response is correct if that field is at least this."""

    @property
    def needs_critic(self) -> bool:
        return estimator_class(self.adv_estimator).needs_values


@section
class LoraConfig:
    """`worker.actor.model.lora.*`."""

    rank: Natural = 0
    """Rank of the LoRA adapter; 0 trains all weights (full fine-tuning)."""
    alpha: Count = 64
    """Numerator of the adapter's scale, alpha / rank."""
    use_dora: bool = False
    """Train a DoRA adapter, which also learns each adapted row's magnitude. The rollout engine then receives merged
    weights, not an adapter."""
    quantization: Literal["nf4", "fp4"] | None = None
    """QLoRA: store the language model's linear layers in this 4-bit type of bitsandbytes, to save memory. The rollout
    engine receives dequantised weights with the adapter merged in. null: the base model keeps the compute type."""
    double_quantization: bool = True
    """Quantise the scales of the 4-bit weights too: 0.52 instead of 0.56 bytes per weight."""
    target_modules: str = "all-linear"
    """Modules that get an adapter: `all-linear`, or names separated by commas."""
    exclude_modules: str | None = ".*visual.*"
    """Regular expression of modules that get no adapter; null: exclude none. The default means the vision tower,
    whatever the model calls it."""

    def served_rank(self, *, merged: bool) -> int:
        """Returns the rank of the adapter that the rollout engine serves on the base; 0 if it loads all weights instead.

        It loads them if the adapter is `merged` by request, is a DoRA adapter, which vLLM cannot serve, or was trained
        on a 4-bit base, which is not the one that vLLM reads from the checkpoint.
        """
        return 0 if merged or self.use_dora or self.quantization is not None else self.rank


@section
class LoadedModelConfig:
    """`worker.{actor,critic}.model.*`."""

    override_config: Fields = {}
    """Entries that replace those of the model's own configuration."""
    enable_gradient_checkpointing: Annotated[bool, NOT_DECISIVE] = True
    """Recompute activations in the backward pass. This saves memory and costs time."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. Enable it only for a model you trust."""
    freeze_vision_tower: bool = False
    """Train only what follows the vision tower."""


@section
class ModelConfig(LoadedModelConfig):
    """`worker.actor.model.*`."""

    model_path: str
    """Model to train: hub name `org/name`, local folder, or `microgeo:model`."""
    tokenizer_path: str | None = None
    """Where the tokenizer and the processor are loaded from; null: model_path."""
    fp32_logits: bool = True
    """Accumulate and keep the LM head's logits in float32, in the trainer and in the rollout engine; false: both round
    them to the 16-bit type they compute in."""
    lora: LoraConfig = LoraConfig()


@section
class CriticModelConfig(LoadedModelConfig):
    """`worker.critic.model.*`. The value head replaces the language head; the critic has no adapter."""

    model_path: str | None = None
    """Value model, in the same forms as the actor's; null: the actor's model, with its override_config and
    trust_remote_code."""


@section
class OptimConfig:
    """`worker.actor.optim.*` and `worker.critic.optim.*`. The scheduler advances once per training step."""

    lr: Share = 1e-6
    """Peak learning rate, about the most by which a step moves a weight."""
    betas: Annotated[list[BelowOne], Field(min_length=2, max_length=2)] = [0.9, 0.999]
    """Adam's decay rates of the first and the second moment."""
    weight_decay: NotNegative = 0.01
    """Decoupled weight decay."""
    strategy: Literal["adamw", "adamw_bf16"] = "adamw"
    """Optimizer. adamw_bf16, for weights stored in bf16 (fsdp.torch_dtype), has a bf16 momentum and carries each
    weight's rounding error to the next step."""
    lr_warmup_ratio: Share = 0.0
    """Warm-up steps as a share of all training steps."""
    lr_warmup_steps: Natural | None = None
    """Number of warm-up steps; null: lr_warmup_ratio decides."""
    min_lr_ratio: Share | None = None
    """Final learning rate of cosine and linear, as a share of lr; null: 0."""
    lr_scheduler_type: Literal["constant", "cosine", "linear"] = "constant"
    """Learning-rate schedule after warm-up."""


@section
class FsdpConfig:
    """`worker.actor.fsdp.*` and `worker.critic.fsdp.*`."""

    torch_dtype: FloatType | None = None
    """Data type in which the trained weights are stored; null: fp32."""
    mp_param_dtype: FloatType = "bf16"
    """Data type of the forward and backward passes."""
    mp_reduce_dtype: FloatType = "fp32"
    """Data type in which gradients are reduced across devices."""
    enable_full_shard: Annotated[bool, NOT_DECISIVE] = True
    """Free the gathered weights of a layer after its forward pass. false: keep them until the backward pass, which
    saves a gather and takes more memory."""
    enable_cpu_offload: Annotated[bool, NOT_DECISIVE] = False
    """Keep weights, gradients and optimizer state in host memory, for models that do not fit on the device. No effect
    on a CPU."""
    enable_rank0_init: Annotated[bool, NOT_DECISIVE] = False
    """Rank 0 reads the weights and sends them to the other ranks; false: each rank reads them."""
    fsdp_size: Annotated[CountOrOff, NOT_DECISIVE] = -1
    """Number of devices the weights are sharded over, a divisor of all devices; the others hold replicas of the shards.
    -1: all devices."""


@section
class OffloadConfig:
    """`worker.actor.offload.*` and `worker.critic.offload.*`: what leaves the device while it is not used."""

    offload_params: bool = False
    """Move the weights to host memory while responses are sampled. No effect on a CPU."""
    offload_optimizer: bool = False
    """Keep the optimizer state in host memory except during updates. No effect on a CPU."""


@section
class UpdateConfig:
    """`worker.{actor,critic}.*`: how a model is scored and updated. One declaration for both, so that they cannot differ."""

    micro_batch_size_per_device_for_update: Annotated[Count, NOT_DECISIVE] = 4
    """Samples per forward and backward pass on a device. Lower it if an update runs out of memory."""
    micro_batch_size_per_device_for_experience: Annotated[Count, NOT_DECISIVE] = 16
    """Samples per log-prob pass on a device. Lower it if scoring runs out of memory."""
    dynamic_batching: Annotated[bool, NOT_DECISIVE] = True
    """Fill each pass up to a number of tokens: the micro-batch size times the longest prompt plus the longest response.
    false: each pass has micro-batch size samples."""
    max_grad_norm: Positive = 1.0
    """The gradient is clipped to this norm."""
    loss_avg_mode: Literal["token", "seq", "seq_sum", "constant"] = "token"
    """Average of the token losses. token: over all tokens; seq: over sequences, of their token means; seq_sum: over
    sequences, of their token sums; constant: sum divided by the number of sequences times data.max_response_length (Dr.
    GRPO)."""
    ppo_epochs: Count = 1
    """Number of times the update passes over each rollout batch."""
    optim: OptimConfig = OptimConfig()
    fsdp: FsdpConfig = FsdpConfig()
    offload: Annotated[OffloadConfig, NOT_DECISIVE] = OffloadConfig()


@section
class ActorConfig(UpdateConfig):
    """`worker.actor.*`: the trained policy and its update."""

    global_batch_size: Count = 256
    """Prompts per optimizer step; it must divide data.rollout_batch_size."""
    padding_free: Annotated[bool, NOT_DECISIVE] = True
    """Pack rows without padding, and compute tokens that several rows share only once; false: pad the rows."""
    clip_ratio_low: Share = 0.2
    """Lower clip range: the probability ratio is clipped at 1 - clip_ratio_low."""
    clip_ratio_high: NotNegative = 0.28
    """Upper clip range: the probability ratio is clipped at 1 + clip_ratio_high."""
    clip_ratio_dual: Annotated[float, Field(gt=1)] | None = 3.0
    """Dual clip: a token with negative advantage A has a loss of at most -A times this; null: no bound."""
    loss_type: Literal["default", "gspo", "gspo_token", "cispo", "sapo"] = "default"
    """Policy loss; `default` is PPO's clipped surrogate."""
    rollout_is: Literal["none", "truncate", "mask"] = "none"
    """Weight of each token's loss that corrects the mismatch between trainer and rollout engine, rho = P_trainer /
    P_engine. truncate: rho, at most rollout_is_threshold; mask: rho, but 0 outside 1 / rollout_is_threshold to
    rollout_is_threshold; none: off. Needs temperature 1."""
    rollout_is_threshold: Annotated[float, Field(gt=1)] = 2.0
    """Bound of rho in rollout_is."""
    tau_positive: Positive = 1.0
    """Temperature of the gate of loss_type `sapo` for advantages of 0 or more."""
    tau_negative: Positive = 1.05
    """Temperature of the gate of loss_type `sapo` for negative advantages."""
    model: ModelConfig = Field()


@section
class CriticConfig(UpdateConfig):
    """`worker.critic.*`: the value model and its update, for methods that need values."""

    global_batch_size: Count | None = None
    """Prompts per optimizer step; null: the actor's."""
    padding_free: Annotated[bool, NOT_DECISIVE] = False
    """As worker.actor.padding_free."""
    cliprange_value: Positive = 0.5
    """Clip range of the value loss: how far a value may move from its value before the update."""
    model: CriticModelConfig = CriticModelConfig()


@section
class WorkerConfig:
    """`worker.*`."""

    actor: ActorConfig = Field()
    critic: CriticConfig = CriticConfig()
    rollout: Annotated[RolloutConfig, NOT_DECISIVE] = RolloutConfig()
    reward: Annotated[RewardConfig, NOT_DECISIVE] = RewardConfig()

    @property
    def resolved_critic(self) -> CriticConfig:
        """`critic`, with batch size and model path taken from the actor if they are null.

        The actor's model path brings its `override_config`, which the critic's entries override, and
        `trust_remote_code`.
        """
        model, actors = self.critic.model, self.actor.model
        if model.model_path is None:
            model = dataclasses.replace(
                model,
                model_path=actors.model_path,
                override_config={**actors.override_config, **model.override_config},
                trust_remote_code=actors.trust_remote_code or model.trust_remote_code,
            )
        size = self.critic.global_batch_size or self.actor.global_batch_size
        return dataclasses.replace(self.critic, model=model, global_batch_size=size)


@section
class RunSettings:
    """Everything that a configuration may hold except the methods' own sections."""

    data: DataConfig = Field()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    worker: WorkerConfig = Field()
    trainer: Annotated[TrainerConfig, NOT_DECISIVE] = TrainerConfig()


@section
class RunConfig(RunSettings):
    """A whole run. Made by `cepo.config.load_config`.

    Attributes:
        methods: by name, all settings that the chosen method reads, and the methods with a section of their own. They are
            plain data, so that a run reaches processes that have not imported the file of a plug-in's method.
        from_environment: path and unresolved text of settings that took text from the environment.
    """

    methods: Mapping[str, Fields] = dataclasses.field(default_factory=dict[str, Fields])
    from_environment: Mapping[tuple[str, ...], object] = dataclasses.field(
        default_factory=dict[tuple[str, ...], object], compare=False, repr=False
    )
