"""Declares the settings of a run's models, sampling and rewards, `worker.*`; a part of the schema."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field
from typing_extensions import TypedDict

from cepo.config.paths import located, split_function
from cepo.files.trees import Fields, is_list
from cepo.losses.settings import DEFAULT_LOSS, SharedLossSettings
from cepo.sections.fields import (
    DECISIVE,
    FROM_RECORD,
    NOT_DECISIVE,
    NOT_FROM_RECORD,
    BelowOne,
    Count,
    CountOrOff,
    Natural,
    NotNegative,
    Positive,
    Share,
    section,
)

FloatType = Literal["bf16", "fp16", "fp32"]


def _joined(value: Any) -> Any:
    texts = is_list(value) and value and all(isinstance(entry, str) and "," not in entry for entry in value)
    return ",".join(value) if texts else value


Joined = Annotated[str, BeforeValidator(_joined, json_schema_input_type=str | list[str])]
"""Text with one or more names, separated by commas or as a list."""


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
    target_modules: Joined = "all-linear"
    """Modules that get an adapter: `all-linear`, or their names, as a list or separated by commas."""
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
    enable_gradient_checkpointing: Annotated[bool | Literal["auto"], NOT_DECISIVE, FROM_RECORD] = "auto"
    """Recompute activations in the backward pass. This saves memory and costs time. auto: on a GPU, unless its free memory
    holds those of 8,000 tokens; true on a CPU."""
    compile_layers: Annotated[bool | Literal["auto"], NOT_DECISIVE, FROM_RECORD] = "auto"
    """Compile the language model's layers by torch.compile. Each kind of layer takes some seconds at its first pass.
    auto: on a GPU, not on a CPU. Layers that cannot be compiled compute as they are, and a line says so."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. Enable it only for a model you trust."""
    freeze_vision_tower: Annotated[bool, FROM_RECORD] = False
    """Train only what follows the vision tower."""


@section
class ModelConfig(LoadedModelConfig):
    """`worker.actor.model.*`."""

    model_path: str
    """Model to train: hub name `org/name`, local folder, or `microgeo:model`."""
    tokenizer_path: str | None = None
    """Where the tokenizer and the processor are loaded from; null: model_path."""
    fp32_logits: Annotated[bool, FROM_RECORD] = True
    """Accumulate and keep the LM head's logits in float32, in the trainer and in the rollout engine; false: both round
    them to the 16-bit type they compute in."""
    lora: Annotated[LoraConfig, FROM_RECORD] = LoraConfig()


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
    weight_decay: Share = 0.01
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
    -1: all devices; trainer.n_gpus_per_node if it is not set, so that weights are gathered within a machine."""


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

    micro_batch_size_per_device_for_update: Annotated[Natural, NOT_DECISIVE] = 0
    """Samples per forward and backward pass on a device. 0: as many as a GPU's free memory holds, by an estimate that the
    log states; 4 on a CPU. Lower it if an update runs out of memory."""
    micro_batch_size_per_device_for_experience: Annotated[Natural, NOT_DECISIVE] = 0
    """Samples per log-prob pass on a device. 0: as many as a GPU's free memory holds; 16 on a CPU. Lower it if scoring runs
    out of memory."""
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
class ActorConfig(UpdateConfig, SharedLossSettings):
    """`worker.actor.*`: the trained policy and its update."""

    global_batch_size: Count = 256
    """Prompts per optimizer step; it must divide data.rollout_batch_size. If only that is set, or that as an argument and
    this in a file, the smaller of both."""
    padding_free: Annotated[bool, NOT_DECISIVE] = True
    """Pack rows without padding, and compute tokens that several rows share only once; false: pad the rows."""
    loss_type: str = DEFAULT_LOSS
    """Name of the policy loss: default (PPO's clipped surrogate), gspo, gspo_token, cispo, sapo, or one that a file in
    trainer.plugins registers."""
    loss: Annotated[dict[str, dict[str, Any]], NOT_FROM_RECORD] = {}
    """Settings of losses of one's own, by the loss's name: `worker.actor.loss.<name>.*`."""
    entropy_coef: float = 0.0
    """Coefficient of the entropy of each token's distribution, in nats, which the loss subtracts with the weights of
    loss_avg_mode: above 0 a bonus, below 0 a penalty. 0: no entropy in the loss, at no cost."""
    rollout_is: Literal["none", "truncate", "mask"] = "none"
    """Weight of each token's loss that corrects the mismatch between trainer and rollout engine, rho = P_trainer /
    P_engine. truncate: rho, at most rollout_is_threshold; mask: rho, but 0 outside 1 / rollout_is_threshold to
    rollout_is_threshold; none: off. Needs temperature 1."""
    rollout_is_threshold: Annotated[float, Field(gt=1)] = 2.0
    """Bound of rho in rollout_is."""
    model: Annotated[ModelConfig, NOT_FROM_RECORD] = Field()


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


class SamplingOverrides(TypedDict, total=False):
    """`worker.rollout.val_override_config`: the entries that it may have."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)  # pyright: ignore[reportGeneralTypeIssues]

    n: Count
    temperature: NotNegative
    top_p: Annotated[float, Field(gt=0, le=1)]
    top_k: CountOrOff
    presence_penalty: Annotated[float, Field(ge=-2, le=2)]


@section
class RolloutConfig:
    """`worker.rollout.*`: how responses are sampled."""

    name: Literal["auto", "vllm", "transformers"] = "auto"
    """Rollout engine; auto: vLLM if it is installed, else transformers."""
    n: Annotated[Count, DECISIVE] = 1
    """Responses per prompt, which form a group."""
    temperature: Annotated[Positive, DECISIVE] = 1.0
    """Sampling temperature; log-probs are computed from logits divided by it."""
    top_p: Annotated[float, Field(gt=0, le=1), DECISIVE] = 1.0
    """Nucleus sampling; 1.0: off. Log-probs are those of the whole distribution."""
    top_k: Annotated[CountOrOff, DECISIVE] = -1
    """Sample among the k most probable tokens; -1: off. Log-probs are those of the whole distribution."""
    seed: Annotated[Natural, DECISIVE] = 1
    """Sampling seed, combined with the step and the prompt; trainer.seed if it is not set."""
    dtype: FloatType = "bf16"
    """Data type in which the rollout engine computes."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.6
    """Share of the device's memory that vLLM takes. Raise it if vLLM finds too little memory for its KV cache; lower it
    if the trainer runs out of memory."""
    enforce_eager: bool = False
    """Run vLLM without CUDA graphs."""
    sleep: bool | Literal["auto"] = "auto"
    """On a GPU, vLLM frees its memory during scoring and updates, at the cost of copying its weights twice per step.
    auto: only if its memory does not fit beside the trainer's, by the memory estimate (docs/gpus.md)."""
    limit_images: Natural = 0
    """Most images in a prompt; 0: as many as the data has."""
    max_model_len: Count | None = None
    """Context length of the rollout engine in tokens; null: data.max_prompt_length + data.max_response_length."""
    max_num_batched_tokens: Count = 8192
    """Tokens that the rollout engine processes in one pass, at least its context length."""
    max_num_seqs: Count | None = None
    """Responses that one vLLM engine samples at once; null: as many as it gets in a step, 128 to 1024."""
    quantization: Literal["fp8"] | None = None
    """fp8: vLLM rounds its linear weights to 8 bits, which samples faster from slightly other probabilities;
    worker.actor.rollout_is must correct for them. Needs a GPU of compute capability 8.9 or later. null: off."""
    merge_lora: bool = False
    """Sample from weights with the adapter merged into them, instead of computing the adapter beside them: each token
    is cheaper and each update loads all weights. The sums are rounded to dtype."""
    ignore_eos: Annotated[bool, DECISIVE] = False
    """Do not stop at the end-of-sequence token: every response has the full length."""
    disable_tqdm: bool = False
    """Hide the progress bar of sampling."""
    tensor_parallel_size: Count = 1
    """Devices of a machine that share one vLLM engine (tensor parallelism), a divisor of trainer.n_gpus_per_node. Raise
    it if the model does not fit on one device."""
    val_override_config: SamplingOverrides = {}
    """Sampling settings for validation only: n, temperature (0: greedy), top_p, top_k, presence_penalty."""


def parts_of(text: str) -> list[str]:
    return [part.strip() for part in text.split(",")]


def _located_functions(text: str) -> str:
    functions = [split_function(part) for part in parts_of(text)]
    return ",".join(f"{located(file)}:{function}" for file, function in functions)


@section
class RewardConfig:
    """`worker.reward.*`."""

    reward_function: Annotated[Joined, AfterValidator(_located_functions), DECISIVE] = (
        "cepo/rewards/math.py:compute_score"
    )
    """Reward function as `file.py:function`; without a function name, `main`. The scores of several functions, as a
    list or separated by commas, are added up."""
    reward_weights: Annotated[list[float] | None, DECISIVE, FROM_RECORD] = None
    """Weights of the reward functions, one each; null: 1 each."""
    reward_function_kwargs: Annotated[Fields, DECISIVE] = {}
    """Keyword arguments of the reward function. For several functions: one section each, named after the function's
    file."""
    answer_function: Annotated[Annotated[str, AfterValidator(_located_functions)] | None, DECISIVE] = None
    """Function as `file.py:function` that returns the final answer in a response's text, or None; null: the last
    `\\boxed{}` or `<answer>`. Rewards receive the answer as `extracted_answer`, teachers as a reference."""
    skip_special_tokens: Annotated[bool, DECISIVE, FROM_RECORD] = True
    """Decode responses without special tokens."""
    num_cpus: Count = 1
    """Number of worker processes that score responses. Raise it if a run waits for rewards."""
    timeout_seconds: Annotated[Positive, FROM_RECORD] = 10.0
    """Time limit for scoring one response, in seconds; beyond it the response scores 0."""
    start_timeout_seconds: Positive = 300.0
    """Time limit for loading the reward functions' files, with all that they import, in seconds."""

    @property
    def reward_functions(self) -> list[str]:
        return parts_of(self.reward_function)


@section
class WorkerConfig:
    """`worker.*`."""

    actor: Annotated[ActorConfig, FROM_RECORD] = Field()
    critic: CriticConfig = CriticConfig()
    rollout: Annotated[RolloutConfig, NOT_DECISIVE, FROM_RECORD] = RolloutConfig()
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
