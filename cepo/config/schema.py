"""Declares the settings of a run, under EasyR1's key names; each field has its own description."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Field
from typing_extensions import TypedDict

from cepo.config.algorithm_schema import AlgorithmConfig
from cepo.config.data_schema import CountOrOff, DataConfig, Joined, parts_of
from cepo.config.paths import located, split_function
from cepo.config.trainer_schema import TrainerConfig
from cepo.sections import section

FloatType = Literal["bf16", "fp16", "fp32"]


@section
class LoraConfig:
    """`worker.actor.model.lora.*`."""

    rank: int = Field(default=0, ge=0, description="Rank of the adapter; 0: full fine-tuning.")
    alpha: int = Field(default=64, ge=1, description="Numerator of the adapter's scale alpha / rank.")
    use_dora: bool = Field(
        default=False,
        description="DoRA: train each adapted row's magnitude too; the rollout engine gets merged weights, not an "
        "adapter.",
    )
    quantization: Literal["nf4", "fp4"] | None = Field(
        default=None,
        description="QLoRA: keep the language model's linear layers in this 4-bit type of bitsandbytes; the rollout "
        "engine gets the dequantised weights with the adapter in them. null: the base has the type of the computation.",
    )
    double_quantization: bool = Field(default=True, description="The scales of the 4-bit weights are quantised too.")
    target_modules: str = Field(default="all-linear", description="`all-linear`, or module names separated by commas.")
    exclude_modules: str | None = Field(
        default=".*visual.*",
        description="Regular expression of modules that get no adapter; null: none. The default stands for the vision "
        "tower, whatever name the model gives it.",
    )


@section
class ModelConfig:
    """`worker.actor.model.*`."""

    model_path: str = Field(description="Hub name `org/name`, local folder, or `microgeo:model`.")
    tokenizer_path: str | None = Field(default=None, description="Tokenizer and processor, if not those of model_path.")
    override_config: Mapping[str, Any] = Field(
        default={}, description="Entries that replace the model configuration's own."
    )
    enable_gradient_checkpointing: bool = Field(
        default=True, description="Recompute activations in the backward pass to save memory."
    )
    trust_remote_code: bool = Field(default=False, description="Run Python code that comes with the model.")
    freeze_vision_tower: bool = Field(default=False, description="Train the language model only.")
    fp32_logits: bool = Field(
        default=True,
        description="Accumulate and keep the LM head's logits in float32, in the trainer and in the generator; false: "
        "both round them to the 16-bit type they compute in.",
    )
    lora: LoraConfig = LoraConfig()


@section
class OptimConfig:
    """`worker.actor.optim.*` and `worker.critic.optim.*`. The scheduler advances once per training step."""

    lr: float = Field(default=1e-6, ge=0, description="Peak learning rate.")
    betas: list[Annotated[float, Field(ge=0, lt=1)]] = Field(
        default=[0.9, 0.999], min_length=2, max_length=2, description="Adam's decay rates."
    )
    weight_decay: float = Field(default=0.01, ge=0, description="Decoupled weight decay.")
    strategy: Literal["adamw", "adamw_bf16"] = Field(
        default="adamw",
        description="Optimizer; adamw_bf16: momentum in bf16, and what rounding takes from a bf16 weight is carried "
        "on.",
    )
    lr_warmup_ratio: float = Field(default=0.0, ge=0, le=1, description="Warm-up as a share of all training steps.")
    lr_warmup_steps: int | None = Field(default=None, ge=0, description="Warm-up steps; null: lr_warmup_ratio decides.")
    min_lr_ratio: float | None = Field(
        default=None, ge=0, le=1, description="Where cosine and linear end, as a share of lr; null: 0."
    )
    lr_scheduler_type: Literal["constant", "cosine", "linear"] = Field(
        default="constant", description="Course of the learning rate after warm-up."
    )


@section
class FsdpConfig:
    """`worker.actor.fsdp.*` and `worker.critic.fsdp.*`."""

    torch_dtype: FloatType | None = Field(default=None, description="Type the trained weights are kept in; null: fp32.")
    mp_param_dtype: FloatType = Field(default="bf16", description="Type of the forward and backward computation.")
    mp_reduce_dtype: FloatType = Field(default="fp32", description="Type gradients are reduced in.")
    enable_full_shard: bool = Field(
        default=True,
        description="Free gathered weights after each layer's forward; false: keep them until the backward.",
    )
    enable_cpu_offload: bool = Field(
        default=False,
        description="Keep weights, gradients and optimizer state in host memory; without effect on a CPU.",
    )
    enable_rank0_init: bool = Field(
        default=False,
        description="The first process reads the weights and sends them to the others; false: each reads them.",
    )
    fsdp_size: CountOrOff = Field(
        default=-1,
        description="Devices that weights are sharded over; further ones hold copies of the shards; -1: all.",
    )


@section
class OffloadConfig:
    """`worker.actor.offload.*` and `worker.critic.offload.*`: what leaves the device while it is not used."""

    offload_params: bool = Field(
        default=False, description="Weights leave the device while responses are sampled; without effect on a CPU."
    )
    offload_optimizer: bool = Field(
        default=False, description="Optimizer state leaves the device outside of updates; without effect on a CPU."
    )


@section
class ActorConfig:
    """`worker.actor.*`: the trained policy and its update."""

    global_batch_size: int = Field(default=256, ge=1, description="Prompts per optimizer step.")
    micro_batch_size_per_device_for_update: int = Field(
        default=4, ge=1, description="Samples per forward and backward pass."
    )
    micro_batch_size_per_device_for_experience: int = Field(default=16, ge=1, description="Samples per log-prob pass.")
    padding_free: bool = Field(
        default=True,
        description="Pack rows without padding and compute tokens that rows share once; false: padded rows.",
    )
    dynamic_batching: bool = Field(
        default=True,
        description="Fill passes up to a number of tokens: the micro-batch size times the longest prompt with the "
        "longest response. false: passes of micro-batch size samples.",
    )
    max_grad_norm: float = Field(default=1.0, gt=0, description="Gradient norm is clipped to this.")
    clip_ratio_low: float = Field(
        default=0.2, ge=0, le=1, description="The probability ratio is clipped below at 1 - this."
    )
    clip_ratio_high: float = Field(
        default=0.28, ge=0, description="The probability ratio is clipped above at 1 + this."
    )
    clip_ratio_dual: float | None = Field(
        default=3.0, gt=1, description="Bound of the loss for negative advantages; null: none."
    )
    loss_avg_mode: Literal["token", "seq", "seq_sum", "constant"] = Field(
        default="token",
        description="Mean over tokens, over sequences of token means, over sequences of token sums, or by a constant "
        "length.",
    )
    loss_type: Literal["default", "gspo", "gspo_token", "cispo", "sapo"] = Field(
        default="default", description="Policy loss; `default` is the clipped surrogate."
    )
    rollout_is: Literal["none", "truncate", "mask"] = Field(
        default="none",
        description="Weight of tokens for the gap between trainer and rollout engine, P_trainer / P_engine: at most "
        "rollout_is_threshold; mask: 0 where it is outside 1 / threshold to threshold.",
    )
    rollout_is_threshold: float = Field(default=2.0, gt=1, description="Bound of that weight.")
    tau_positive: float = Field(
        default=1.0, gt=0, description="Gate temperature of `sapo` for advantages of at least 0."
    )
    tau_negative: float = Field(default=1.05, gt=0, description="Gate temperature of `sapo` for negative advantages.")
    ppo_epochs: int = Field(default=1, ge=1, description="Passes over the rollout batch.")
    model: ModelConfig = Field()
    optim: OptimConfig = OptimConfig()
    fsdp: FsdpConfig = FsdpConfig()
    offload: OffloadConfig = OffloadConfig()


@section
class CriticModelConfig:
    """`worker.critic.model.*`. The value head replaces the language head; the critic has no adapter."""

    model_path: str | None = Field(
        default=None,
        description="As the actor's; null: the actor's, with its override_config and trust_remote_code. EasyR1 takes "
        "null for no model.",
    )
    override_config: Mapping[str, Any] = Field(
        default={}, description="Entries that replace the model configuration's own."
    )
    enable_gradient_checkpointing: bool = Field(
        default=True, description="Recompute activations in the backward pass to save memory."
    )
    trust_remote_code: bool = Field(default=False, description="Run Python code that comes with the model.")
    freeze_vision_tower: bool = Field(default=False, description="Train the language model and the value head only.")


@section
class CriticConfig:
    """`worker.critic.*`: the value model and its update, for methods that need values."""

    global_batch_size: int | None = Field(
        default=None,
        ge=1,
        description="Prompts per optimizer step; null: the actor's. EasyR1 takes 256 where nothing is set.",
    )
    micro_batch_size_per_device_for_update: int = Field(
        default=4, ge=1, description="Samples per forward and backward pass."
    )
    micro_batch_size_per_device_for_experience: int = Field(
        default=16, ge=1, description="Samples per pass that predicts values."
    )
    padding_free: bool = Field(
        default=False,
        description="Pack rows without padding and compute tokens that rows share once; false: padded rows.",
    )
    dynamic_batching: bool = Field(
        default=True,
        description="Fill passes up to a number of tokens: the micro-batch size times the longest prompt with the "
        "longest response. false: passes of micro-batch size samples.",
    )
    max_grad_norm: float = Field(default=1.0, gt=0, description="Gradient norm is clipped to this.")
    cliprange_value: float = Field(
        default=0.5, gt=0, description="A value counts at most this far from the one before the update."
    )
    loss_avg_mode: Literal["token", "seq", "seq_sum", "constant"] = Field(
        default="token",
        description="Mean over tokens, over sequences of token means, over sequences of token sums, or by a constant "
        "length.",
    )
    ppo_epochs: int = Field(default=1, ge=1, description="Passes over the rollout batch.")
    model: CriticModelConfig = CriticModelConfig()
    optim: OptimConfig = OptimConfig()
    fsdp: FsdpConfig = FsdpConfig()
    offload: OffloadConfig = OffloadConfig()


class SamplingOverrides(TypedDict, total=False):
    """`worker.rollout.val_override_config`: the entries that it may have."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)  # pyright: ignore[reportGeneralTypeIssues]

    n: Annotated[int, Field(ge=1)]
    temperature: Annotated[float, Field(ge=0)]
    top_p: Annotated[float, Field(gt=0, le=1)]
    top_k: CountOrOff
    presence_penalty: Annotated[float, Field(ge=-2, le=2)]


@section
class RolloutConfig:
    """`worker.rollout.*`: how responses are sampled."""

    name: Literal["auto", "vllm", "transformers"] = Field(
        default="auto", description="Generator; auto: vLLM where it is installed, else transformers."
    )
    n: int = Field(default=1, ge=1, description="Responses per prompt.")
    temperature: float = Field(
        default=1.0, gt=0, description="Sampling temperature; log-probs are of logits divided by it."
    )
    top_p: float = Field(default=1.0, gt=0, le=1, description="Nucleus sampling; not mirrored in log-probs.")
    top_k: CountOrOff = Field(default=-1, description="Sample among the k likeliest tokens; not mirrored in log-probs.")
    seed: int = Field(default=1, ge=0, description="Sampling seed, combined with the step.")
    dtype: FloatType = Field(default="bf16", description="Type the generator computes in.")
    gpu_memory_utilization: float = Field(default=0.6, gt=0, le=1, description="vLLM's share of the device's memory.")
    enforce_eager: bool = Field(default=False, description="Do without CUDA graphs.")
    sleep: Literal["auto", "always", "never"] = Field(
        default="auto",
        description="Free vLLM's GPU memory while scoring and updating; auto: where these would not fit beside it.",
    )
    limit_images: int = Field(default=0, ge=0, description="Images a prompt may have; 0: as many as the data has.")
    max_model_len: int | None = Field(
        default=None, ge=1, description="Context length of the engine; null: prompt plus response."
    )
    max_num_batched_tokens: int = Field(default=8192, ge=1, description="Tokens the engine handles in one pass.")
    ignore_eos: bool = Field(default=False, description="Generate up to the full length whatever the model says.")
    disable_tqdm: bool = Field(default=False, description="Show no progress while generating.")
    tensor_parallel_size: int = Field(
        default=1, ge=1, description="Devices of a machine that share one engine (vLLM): a divisor of n_gpus_per_node."
    )
    val_override_config: SamplingOverrides = Field(
        default={},
        description="Sampling settings of validation alone: n, temperature (0: greedy), top_p, top_k, presence_penalty.",
    )


def _located_functions(text: str) -> str:
    functions = [split_function(part) for part in parts_of(text)]
    return ",".join(f"{located(file)}:{function}" for file, function in functions)


@section
class RewardConfig:
    """`worker.reward.*`."""

    reward_function: Annotated[Joined, AfterValidator(_located_functions)] = Field(
        default="cepo/rewards/math.py:compute_score",
        description="`file.py:function`; without a name: `main`. Several as a list, or separated by commas, are added "
        "up.",
    )
    reward_weights: list[float] | None = Field(
        default=None, description="Weight of each of several reward functions; null: 1 each."
    )
    reward_function_kwargs: Mapping[str, Any] = Field(
        default={},
        description="Keyword arguments of that function; of several, a section for each under its file's name.",
    )
    answer_function: Annotated[str, AfterValidator(_located_functions)] | None = Field(
        default=None,
        description="`file.py:function` that returns the final answer in a response's text, or None; null: the last "
        "`\\boxed{}` or `<answer>`. Rewards get it as `extracted_answer`, teachers as references.",
    )
    skip_special_tokens: bool = Field(default=True, description="Decode responses without special tokens.")
    num_cpus: int = Field(default=1, ge=1, description="Worker processes that score responses.")
    timeout_seconds: float = Field(
        default=10.0, gt=0, description="Time after which one response's scoring is given up and counts 0."
    )

    @property
    def reward_functions(self) -> list[str]:
        """The reward functions one by one."""
        return parts_of(self.reward_function)


@section
class WorkerConfig:
    """`worker.*`."""

    actor: ActorConfig = Field()
    critic: CriticConfig = CriticConfig()
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig = RewardConfig()


@section
class RunSettings:
    """Everything that a configuration may hold except the methods' own sections."""

    data: DataConfig = Field()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    worker: WorkerConfig = Field()
    trainer: TrainerConfig = TrainerConfig()


@section
class RunConfig(RunSettings):
    """A whole run. Made by `cepo.config.load_config`.

    Attributes:
        methods: the sections `algorithm.<name>`, the chosen method's and all others that are written, in full. They are
            plain data, so that a run reaches processes that have not imported the file of a plug-in's method.
        from_environment: path and unresolved text of settings that took text from the environment.
    """

    methods: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict[str, Mapping[str, Any]])
    from_environment: Mapping[tuple[str, ...], Any] = dataclasses.field(
        default_factory=dict[tuple[str, ...], Any], compare=False, repr=False
    )
