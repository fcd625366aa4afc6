"""The settings of a run, under EasyR1's key names. Every field is read somewhere; its description is its metadata's `help`."""

# ruff: noqa: RUF009  (`option` returns a dataclass field: nothing mutable is shared between instances)

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from cepo.algorithms.settings import DEFAULT_ESTIMATOR
from cepo.config.data_schema import DataConfig
from cepo.config.options import OptionRule, described, option, parts_of

FloatType = Literal["bf16", "fp16", "fp32"]


@dataclass(frozen=True, kw_only=True)
class AlgorithmConfig:
    """`algorithm.*`: the method, and what counts as a correct response. Each method adds a section under its own name."""

    adv_estimator: str = option(DEFAULT_ESTIMATOR, "Name of the method; `algorithm.<name>.*` holds its settings.")
    disable_kl: bool = option(False, "No KL penalty and no reference weights.")
    use_kl_loss: bool = option(False, "KL as a term of the loss; false: subtracted from each token's reward.")
    kl_penalty: Literal["kl", "abs", "mse", "low_var_kl", "full"] = option(
        "kl", "Estimator of the KL at a sampled token; full: the KL over the whole vocabulary."
    )
    kl_coef: float = option(1e-3, "Weight of the KL.", minimum=0)
    kl_type: Literal["fixed", "adaptive"] = option("fixed", "Whether that weight follows the KL; in the reward only.")
    kl_horizon: float = option(10000.0, "How slowly it follows, in sequences.", above=0)
    kl_target: float = option(0.1, "The KL it aims at, in nats.", above=0)
    gamma: float = option(
        1.0,
        "Discount of later rewards, for methods that have one, unless their own section says.",
        minimum=0,
        maximum=1,
    )
    lam: float = option(1.0, "Lambda of generalised advantages, likewise.", minimum=0, maximum=1)
    online_filtering: bool = option(
        False, "Keep groups whose mean filter_key lies between the bounds; sample again for others."
    )
    filter_key: str = option("overall", "Reward field of that filter.")
    filter_low: float = option(0.01, "Groups are kept above this mean.")
    filter_high: float = option(0.99, "Groups are kept below this mean.")
    correct_key: str = option("accuracy", "Reward field that tells right from wrong.")
    correct_threshold: float = option(0.5, "A response is right where that field is at least this.")
    methods: Mapping[str, Mapping[str, Any]] = option(
        {},
        "The sections `algorithm.<name>`: the chosen method's in full, and every other one that was written.",
        internal=True,
    )


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """`worker.actor.model.lora.*`."""

    rank: int = option(0, "Rank of the adapter; 0: full fine-tuning.", minimum=0)
    alpha: int = option(64, "Numerator of the adapter's scale alpha / rank.", minimum=1)
    use_dora: bool = option(
        False, "DoRA: train each adapted row's magnitude too; the rollout engine gets merged weights, not an adapter."
    )
    quantization: Literal["nf4", "fp4"] | None = option(
        None,
        "QLoRA: keep the language model's linear layers in this 4-bit type of bitsandbytes; the rollout engine gets the "
        "dequantised weights with the adapter in them. null: the base has the type of the computation.",
    )
    double_quantization: bool = option(True, "The scales of the 4-bit weights are quantised too.")
    target_modules: str = option("all-linear", "`all-linear`, or module names separated by commas.")
    exclude_modules: str | None = option(
        ".*visual.*",
        "Regular expression of modules that get no adapter; null: none. The default stands for the vision tower, whatever "
        "name the model gives it.",
    )


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """`worker.actor.model.*`."""

    model_path: str = field(metadata=described("Hub name `org/name`, local folder, or `microgeo:model`."))
    tokenizer_path: str | None = option(None, "Tokenizer and processor, if not those of model_path.")
    override_config: Mapping[str, Any] = option({}, "Entries that replace the model configuration's own.")
    enable_gradient_checkpointing: bool = option(True, "Recompute activations in the backward pass to save memory.")
    trust_remote_code: bool = option(False, "Run Python code that comes with the model.")
    freeze_vision_tower: bool = option(False, "Train the language model only.")
    fp32_logits: bool = option(
        True,
        "Accumulate and keep the LM head's logits in float32, in the trainer and in the generator; false: both round them to "
        "the 16-bit type they compute in.",
    )
    lora: LoraConfig = field(default_factory=LoraConfig)


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """`worker.actor.optim.*` and `worker.critic.optim.*`. The scheduler advances once per training step."""

    lr: float = option(1e-6, "Peak learning rate.", minimum=0)
    betas: list[float] = option([0.9, 0.999], "Adam's decay rates.", length=2, minimum=0, below=1)
    weight_decay: float = option(0.01, "Decoupled weight decay.", minimum=0)
    strategy: Literal["adamw", "adamw_bf16"] = option(
        "adamw", "Optimizer; adamw_bf16: momentum in bf16, and what rounding takes from a bf16 weight is carried on."
    )
    lr_warmup_ratio: float = option(0.0, "Warm-up as a share of all training steps.", minimum=0, maximum=1)
    lr_warmup_steps: int | None = option(None, "Warm-up steps; null: lr_warmup_ratio decides.", minimum=0)
    min_lr_ratio: float | None = option(
        None, "Where cosine and linear end, as a share of lr; null: 0.", minimum=0, maximum=1
    )
    lr_scheduler_type: Literal["constant", "cosine", "linear"] = option(
        "constant", "Course of the learning rate after warm-up."
    )


@dataclass(frozen=True, kw_only=True)
class FsdpConfig:
    """`worker.actor.fsdp.*` and `worker.critic.fsdp.*`."""

    torch_dtype: FloatType | None = option(None, "Type the trained weights are kept in; null: fp32.")
    mp_param_dtype: FloatType = option("bf16", "Type of the forward and backward computation.")
    mp_reduce_dtype: FloatType = option("fp32", "Type gradients are reduced in.")
    enable_full_shard: bool = option(
        True, "Free gathered weights after each layer's forward; false: keep them until the backward."
    )
    enable_cpu_offload: bool = option(
        False, "Keep weights, gradients and optimizer state in host memory; without effect on a CPU."
    )
    enable_rank0_init: bool = option(
        False, "The first process reads the weights and sends them to the others; false: each reads them."
    )
    fsdp_size: int = option(
        -1, "Devices that weights are sharded over; further ones hold copies of the shards; -1: all.", minimum=1, off=-1
    )


@dataclass(frozen=True, kw_only=True)
class OffloadConfig:
    """`worker.actor.offload.*` and `worker.critic.offload.*`: what leaves the device while it is not used."""

    offload_params: bool = option(
        False, "Weights leave the device while responses are sampled; without effect on a CPU."
    )
    offload_optimizer: bool = option(
        False, "Optimizer state leaves the device outside of updates; without effect on a CPU."
    )


@dataclass(frozen=True, kw_only=True)
class ActorConfig:
    """`worker.actor.*`: the trained policy and its update."""

    global_batch_size: int = option(256, "Prompts per optimizer step.", minimum=1)
    micro_batch_size_per_device_for_update: int = option(4, "Samples per forward and backward pass.", minimum=1)
    micro_batch_size_per_device_for_experience: int = option(16, "Samples per log-prob pass.", minimum=1)
    padding_free: bool = option(
        True, "Pack rows without padding and compute tokens that rows share once; false: padded rows."
    )
    dynamic_batching: bool = option(
        True,
        "Fill passes up to a number of tokens: the micro-batch size times the longest prompt with the longest response. "
        "false: passes of micro-batch size samples.",
    )
    max_grad_norm: float = option(1.0, "Gradient norm is clipped to this.", above=0)
    clip_ratio_low: float = option(0.2, "The probability ratio is clipped below at 1 - this.", minimum=0, maximum=1)
    clip_ratio_high: float = option(0.28, "The probability ratio is clipped above at 1 + this.", minimum=0)
    clip_ratio_dual: float | None = option(3.0, "Bound of the loss for negative advantages; null: none.", above=1)
    loss_avg_mode: Literal["token", "seq", "seq_sum", "constant"] = option(
        "token",
        "Mean over tokens, over sequences of token means, over sequences of token sums, or by a constant length.",
    )
    loss_type: Literal["default", "gspo", "gspo_token", "cispo", "sapo"] = option(
        "default", "Policy loss; `default` is the clipped surrogate."
    )
    tau_positive: float = option(1.0, "Gate temperature of `sapo` for advantages of at least 0.", above=0)
    tau_negative: float = option(1.05, "Gate temperature of `sapo` for negative advantages.", above=0)
    ppo_epochs: int = option(1, "Passes over the rollout batch.", minimum=1)
    model: ModelConfig
    optim: OptimConfig = field(default_factory=OptimConfig)
    fsdp: FsdpConfig = field(default_factory=FsdpConfig)
    offload: OffloadConfig = field(default_factory=OffloadConfig)


@dataclass(frozen=True, kw_only=True)
class CriticModelConfig:
    """`worker.critic.model.*`. The value head replaces the language head; the critic has no adapter."""

    model_path: str | None = option(
        None,
        "As the actor's; null: the actor's, with its override_config and trust_remote_code. EasyR1 takes null for no model.",
    )
    override_config: Mapping[str, Any] = option({}, "Entries that replace the model configuration's own.")
    enable_gradient_checkpointing: bool = option(True, "Recompute activations in the backward pass to save memory.")
    trust_remote_code: bool = option(False, "Run Python code that comes with the model.")
    freeze_vision_tower: bool = option(False, "Train the language model and the value head only.")


@dataclass(frozen=True, kw_only=True)
class CriticConfig:
    """`worker.critic.*`: the value model and its update, for methods that need values."""

    global_batch_size: int | None = option(
        None, "Prompts per optimizer step; null: the actor's. EasyR1 takes 256 where nothing is set.", minimum=1
    )
    micro_batch_size_per_device_for_update: int = option(4, "Samples per forward and backward pass.", minimum=1)
    micro_batch_size_per_device_for_experience: int = option(16, "Samples per pass that predicts values.", minimum=1)
    padding_free: bool = option(
        False, "Pack rows without padding and compute tokens that rows share once; false: padded rows."
    )
    dynamic_batching: bool = option(
        True,
        "Fill passes up to a number of tokens: the micro-batch size times the longest prompt with the longest response. "
        "false: passes of micro-batch size samples.",
    )
    max_grad_norm: float = option(1.0, "Gradient norm is clipped to this.", above=0)
    cliprange_value: float = option(0.5, "A value counts at most this far from the one before the update.", above=0)
    loss_avg_mode: Literal["token", "seq", "seq_sum", "constant"] = option(
        "token",
        "Mean over tokens, over sequences of token means, over sequences of token sums, or by a constant length.",
    )
    ppo_epochs: int = option(1, "Passes over the rollout batch.", minimum=1)
    model: CriticModelConfig = field(default_factory=CriticModelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    fsdp: FsdpConfig = field(default_factory=FsdpConfig)
    offload: OffloadConfig = field(default_factory=OffloadConfig)


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """`worker.rollout.*`: how responses are sampled."""

    name: Literal["auto", "vllm", "transformers"] = option(
        "auto", "Generator; auto: vLLM where it is installed, else transformers."
    )
    n: int = option(1, "Responses per prompt.", minimum=1)
    temperature: float = option(1.0, "Sampling temperature; log-probs are of logits divided by it.", above=0)
    top_p: float = option(1.0, "Nucleus sampling; not mirrored in log-probs.", above=0, maximum=1)
    top_k: int = option(-1, "Sample among the k likeliest tokens; not mirrored in log-probs.", minimum=1, off=-1)
    seed: int = option(1, "Sampling seed, combined with the step.", minimum=0)
    dtype: FloatType = option("bf16", "Type the generator computes in.")
    gpu_memory_utilization: float = option(0.6, "vLLM's share of the device's memory.", above=0, maximum=1)
    enforce_eager: bool = option(False, "Do without CUDA graphs.")
    sleep: Literal["auto", "always", "never"] = option(
        "auto", "Free vLLM's GPU memory while scoring and updating; auto: where these would not fit beside it."
    )
    limit_images: int = option(0, "Images a prompt may have; 0: as many as the data has.", minimum=0)
    max_model_len: int | None = option(None, "Context length of the engine; null: prompt plus response.", minimum=1)
    max_num_batched_tokens: int = option(8192, "Tokens the engine handles in one pass.", minimum=1)
    ignore_eos: bool = option(False, "Generate up to the full length whatever the model says.")
    disable_tqdm: bool = option(False, "Show no progress while generating.")
    tensor_parallel_size: int = option(
        1, "Devices of a machine that share one engine (vLLM): a divisor of n_gpus_per_node.", minimum=1
    )
    val_override_config: Mapping[str, Any] = option(
        {},
        "Sampling settings that differ in validation: n, temperature (0: greedy), top_p, top_k.",
        entries={
            "n": (int, OptionRule(help="", minimum=1)),
            "temperature": (float, OptionRule(help="", minimum=0)),
            "top_p": (float, OptionRule(help="", above=0, maximum=1)),
            "top_k": (int, OptionRule(help="", minimum=1, off=-1)),
        },
    )


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """`worker.reward.*`."""

    reward_function: str = option(
        "cepo/rewards/math.py:compute_score",
        "`file.py:function`; without a name: `main`. Several as a list, or separated by commas, are added up.",
        joined=True,
    )
    reward_weights: list[float] | None = option(None, "Weight of each of several reward functions; null: 1 each.")
    reward_function_kwargs: Mapping[str, Any] = option(
        {}, "Keyword arguments of that function; of several, a section for each under its file's name."
    )
    skip_special_tokens: bool = option(True, "Decode responses without special tokens.")
    num_cpus: int = option(1, "Worker processes that score responses.", minimum=1)
    timeout_seconds: float = option(10.0, "Time after which one response's scoring is given up and counts 0.", above=0)

    @property
    def reward_functions(self) -> list[str]:
        """The reward functions one by one."""
        return parts_of(self.reward_function)


@dataclass(frozen=True, kw_only=True)
class WorkerConfig:
    """`worker.*`."""

    actor: ActorConfig
    critic: CriticConfig = field(default_factory=CriticConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """`trainer.*`: length of the run, validation, records and checkpoints."""

    total_epochs: int = option(15, "Passes over the training set, where max_steps is null.", minimum=1)
    max_steps: int | None = option(None, "Training steps; also the horizon of the learning-rate schedule.", minimum=0)
    project_name: str = option("cepo", "Folder of checkpoints and records.")
    experiment_name: str = option("demo", "Folder within it.")
    logger: list[Literal["console", "file", "tensorboard", "wandb", "mlflow", "swanlab"]] = option(
        ["console", "file"], "Where metrics go; the last three need the extra `trackers`."
    )
    launcher: Literal["auto", "local", "ray"] = option(
        "auto", "Where workers run: in this process, or one per device under Ray; auto: ray for more than one device."
    )
    nnodes: int = option(1, "Machines.", minimum=1)
    n_gpus_per_node: int = option(
        1, "Devices per machine; without GPUs, worker processes, at most one per processor.", minimum=1
    )
    ray_address: str | None = option(
        None,
        "Running Ray cluster to join, `auto` or host:port; null: RAY_ADDRESS, else one is started on this machine.",
    )
    start_timeout_seconds: float = option(
        900.0, "Under Ray: how long to wait for devices, and for the workers to load their models.", above=0
    )
    stage_timeout_seconds: float = option(
        3600.0, "Under Ray: a worker that takes longer for one stage of a step hangs, and is restarted.", above=0
    )
    max_restarts: int = option(
        2, "Under Ray: how often a run restarts lost workers and goes on from its last checkpoint.", minimum=0
    )
    critic_warmup: int = option(0, "Steps in which the critic alone is trained.", minimum=0)
    val_freq: int = option(-1, "Validate every so many steps.", minimum=1, off=-1)
    val_before_train: bool = option(True, "Validate before the first step.")
    val_only: bool = option(False, "Stop after that validation.")
    val_max_samples: int = option(
        -1, "Held-out problems per validation, drawn once by trainer.seed; -1: all.", minimum=1, off=-1
    )
    val_generations_to_log: int = option(0, "Validation responses recorded each time.", minimum=0)
    leak_probe_size: int = option(
        64,
        "Held-out responses of each validation that are scored with and without the answer in view; 0: none.",
        minimum=0,
    )
    rollouts_to_log: int = option(2, "Groups of responses written to rollouts.jsonl at each step.", minimum=0)
    save_freq: int = option(-1, "Write a checkpoint every so many steps.", minimum=1, off=-1)
    save_limit: int = option(
        -1, "Checkpoints kept: the last, the best by val/reward, the most recent others; -1: all.", minimum=1, off=-1
    )
    save_model_only: bool = option(
        False, "Checkpoints hold weights alone: smaller, for evaluation and merging; no run can go on from them."
    )
    save_checkpoint_path: str | None = option(None, "Run folder; null: checkpoints/<project_name>/<experiment_name>.")
    load_checkpoint_path: str | None = option(None, "Checkpoint folder global_step_<N> to start from.")
    find_last_checkpoint: bool = option(True, "Resume from the run folder's last checkpoint, if there is one.")
    max_try_make_batch: int = option(
        20,
        "Rounds of sampling for one step under online filtering; then the batch is filled with filtered groups. 0 or less: "
        "as many rounds as it takes.",
    )
    max_skipped_steps: int = option(
        10,
        "Steps in a row whose updates were all skipped for gradients that are not finite, after which the run ends; -1: never.",
        minimum=1,
        off=-1,
    )
    plugins: list[str] = option([], "Python files that register further methods.")
    seed: int = option(1, "Seed of everything that has none of its own.", minimum=0)


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """A whole run. Made by `cepo.config.load_config`."""

    data: DataConfig
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    worker: WorkerConfig
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    from_environment: Mapping[tuple[str, ...], Any] = field(
        default_factory=dict,
        compare=False,
        repr=False,
        metadata=described("Settings that took text from the environment: path and unresolved text.", internal=True),
    )
