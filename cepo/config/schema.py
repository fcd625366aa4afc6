"""Declares the settings of a run, under EasyR1's key names; each field has its own description."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from cepo.algorithms import Estimator, build_estimator
from cepo.algorithms.settings import DEFAULT_ESTIMATOR, SharedSettings
from cepo.config.paths import File, located_data
from cepo.config.worker_schema import Joined, WorkerConfig, parts_of
from cepo.files.trees import Fields
from cepo.sections.fields import (
    DECISIVE,
    FROM_RECORD,
    NOT_DECISIVE,
    NOT_FROM_RECORD,
    Count,
    CountOrOff,
    EffectiveIf,
    Natural,
    NotNegative,
    Positive,
    section,
)


def _one_line(text: str) -> str:
    if not text.isprintable():
        raise ValueError(f"{text!a} has a line end or another control character; give a name without it")
    return text


def _name(text: str) -> str:
    if Path(text).is_absolute() or ".." in Path(text).parts:
        raise ValueError(f"'{text}' is a path; give a name, and the run folder as trainer.save_checkpoint_path=FOLDER")
    return text


def _located_sources(text: str) -> str:
    return ",".join(located_data(source) for source in parts_of(text))


Sources = Annotated[Joined, AfterValidator(_located_sources)]
"""One or more data sets, separated by commas or as a list."""
OneLine = Annotated[str, AfterValidator(_one_line)]
"""A name of a folder without line ends and other control characters, which shells and YAML change."""
Name = Annotated[OneLine, AfterValidator(_name)]
"""A name below `checkpoints/`, which leads to no other place."""
WITH_KL = EffectiveIf("disable_kl", False)
WITH_FILTERING = EffectiveIf("online_filtering", True)


@section
class DataConfig:
    """`data.*`: the sources of the problems and how prompts are made from them."""

    train_files: Annotated[Sources, NOT_FROM_RECORD]
    """Training set: hub name `org/name@split`, local file or folder, or `microgeo:train`. Give several as a list, or
    separated by commas."""
    train_weights: list[Positive] | None = None
    """Share of problems from each training set, in the order of train_files; the sum does not matter. null: all rows
    form one set."""
    val_files: Annotated[Annotated[str, AfterValidator(located_data)] | None, NOT_DECISIVE, NOT_FROM_RECORD] = None
    """Validation set, in the same forms; null: no validation."""
    prompt_key: str = "prompt"
    """Column with the question: text, or a list of chat messages. For all keys, dots lead into nested columns:
    `extra_info.question`."""
    answer_key: str = "answer"
    """Column with the reference answer. If it is prompt_key, that of a conversation: its last turn, the assistant's."""
    solution_key: str = "solution"
    """Column with a worked solution; a dataset may lack it."""
    image_key: str = "images"
    """Column with the list of images; a row may have none."""
    image_marks: Literal["text", "front"] = "text"
    """Where a question's images stand: `text`: at its `<image>` marks, one for each; `front`: marks that are missing are
    put in front of the question."""
    teacher_image_key: str | None = None
    """Column with the images that teachers see instead of the row's, as many as those: crops, for example, or annotated
    figures. A row without any shows its own; null: all rows do."""
    image_hosts: Annotated[list[str], NOT_FROM_RECORD] = []
    """Hosts (`name` or `name:port`, by https; `http://name` allows http) from which images given as addresses are
    downloaded. Empty: an address is an error."""
    video_key: str = "videos"
    """Column with the list of videos; a row may have none. Needs the extra `video`."""
    video_fps: Positive = 2.0
    """Frames per second that are taken from a video."""
    image_dir: Annotated[File | None, NOT_FROM_RECORD] = None
    """Folder that paths of images and videos are relative to and must lie in; null: the working directory, and paths
    may lead anywhere."""
    max_prompt_length: Count = 512
    """Longest prompt in tokens, expanded image tokens included."""
    max_response_length: Count = 512
    """Longest response in tokens."""
    rollout_batch_size: Count = 512
    """Prompts per training step."""
    mini_rollout_batch_size: Count | None = None
    """Prompts sampled per round of algorithm.online_filtering; null: rollout_batch_size."""
    val_batch_size: Annotated[CountOrOff, NOT_DECISIVE] = -1
    """Prompts per validation batch; -1: the whole set. A small value limits how many videos are in memory at once."""
    format_prompt: Annotated[File | None, NOT_FROM_RECORD] = None
    """Jinja file that wraps the question (variable `content`); null: the question alone."""
    override_chat_template: Annotated[File | None, NOT_FROM_RECORD] = None
    """File with a chat template that replaces the model's own."""
    chat_template_kwargs: Fields = {}
    """Variables of the chat template, such as `enable_thinking: false`, for students and teachers alike."""
    shuffle: bool = True
    """Visit the training rows in a seeded random order; false: in the order of the data."""
    seed: Natural = 1
    """Seed of the order of the training rows; trainer.seed if it is not set."""
    min_pixels: Count | None = 262144
    """Enlarge images with fewer pixels; null: the processor's own limit, which keeps small figures cheap."""
    max_pixels: Count | None = 4194304
    """Shrink images with more pixels; null: the processor's own limit. A lower value gives images fewer tokens."""
    filter_overlong_prompts: bool = True
    """Drop and count rows whose prompt exceeds max_prompt_length; false: such a row is an error."""
    skip_bad_rows: bool = False
    """Drop and count rows with an unreadable image, mismatched placeholders or an empty answer; false: such a row is an
    error."""

    @property
    def longest_row(self) -> int:
        """Most tokens of a prompt and its response together."""
        return self.max_prompt_length + self.max_response_length

    @property
    def train_sources(self) -> list[str]:
        return parts_of(self.train_files)


@section
class AlgorithmConfig(SharedSettings):
    """`algorithm.*`: the method, the settings of methods, and what counts as a correct response."""

    adv_estimator: str = DEFAULT_ESTIMATOR
    """Name of the method (the advantage estimator). It reads some of the sections below, with its own presets, and
    `algorithm.<name>` if it has settings that no other method has."""
    disable_kl: bool = False
    """Train without a KL penalty, and without reference weights."""
    use_kl_loss: Annotated[bool, WITH_KL] = False
    """Add the KL to the loss; false: subtract it from each token's reward."""
    kl_penalty: Annotated[Literal["kl", "abs", "mse", "low_var_kl"], WITH_KL] = "kl"
    """Estimator of the KL at a sampled token."""
    kl_coef: Annotated[NotNegative, WITH_KL] = 1e-3
    """Weight of the KL penalty; with kl_type=adaptive the initial weight."""
    kl_type: Annotated[Literal["fixed", "adaptive"], WITH_KL] = "fixed"
    """fixed: the weight of the KL is constant; adaptive: it follows kl_target, which needs use_kl_loss=false."""
    kl_horizon: Annotated[Positive, WITH_KL] = 10000.0
    """Adaptive KL: horizon in sequences; the larger it is, the more slowly the weight changes."""
    kl_target: Annotated[Positive, WITH_KL] = 0.1
    """Adaptive KL: target of the KL in nats per token."""
    online_filtering: bool = False
    """Keep only groups whose mean filter_key is between filter_low and filter_high, and sample other problems in place
    of the rest."""
    filter_key: Annotated[str, WITH_FILTERING] = "overall"
    """Reward field that online filtering averages over a group."""
    filter_low: Annotated[float, WITH_FILTERING] = 0.01
    """Online filtering keeps groups with a mean above this."""
    filter_high: Annotated[float, WITH_FILTERING] = 0.99
    """Online filtering keeps groups with a mean below this."""
    overlong_filter: bool = False
    """Do not train on responses that the length limit cut; their rewards still count in their groups."""
    top_entropy: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Train only on this share of the tokens, those with the highest entropy, counted over the rollouts that learn.
    1.0: all tokens; below 1.0 a step takes one more pass."""
    correct_key: Annotated[str, FROM_RECORD] = "accuracy"
    """Reward field that decides whether a response is correct; if the scores do not have it, `overall` decides."""
    correct_threshold: Annotated[float, FROM_RECORD] = 0.5
    """A response is correct if that field is at least this."""


@section
class TrainerConfig:
    """`trainer.*`: length of the run, validation, records and checkpoints."""

    total_epochs: Count = 15
    """Passes over the training set; max_steps overrides it."""
    max_steps: Count | None = None
    """Number of training steps, also for the learning-rate schedule; null: total_epochs decides."""
    project_name: Name = "cepo"
    """Project in trackers, and outer folder of checkpoints and records."""
    experiment_name: Name = "demo"
    """Run in trackers, and folder within the project's."""
    logger: list[Literal["console", "file", "tensorboard", "wandb", "mlflow", "swanlab", "trackio"]] = [
        "console",
        "file",
    ]
    """Where metrics are written, beside the records in the run folder (`file`), which every run has; wandb, mlflow, swanlab
    and trackio need the extra `trackers`."""
    launcher: Literal["auto", "local", "ray"] = "auto"
    """Where the workers run. local: in this process; ray: one process per device under Ray; auto: ray for more than one
    device."""
    nnodes: Count = 1
    """Number of machines."""
    n_gpus_per_node: Count = 1
    """Devices per machine. Without GPUs: worker processes, at most one per processor."""
    ray_address: str | None = None
    """Running Ray cluster to join, `auto` or host:port. null: RAY_ADDRESS, else a cluster is started on this
    machine."""
    start_timeout_seconds: Positive = 900.0
    """Under Ray: how long to wait for free devices, and for the workers to load their models, in seconds."""
    stage_timeout_seconds: Positive = 3600.0
    """Under Ray: time limit for one stage of a step, in seconds; a worker that exceeds it counts as hung and is
    restarted."""
    max_restarts: Natural = 2
    """Under Ray: how often a run restarts lost workers and continues from its last checkpoint."""
    critic_warmup: Annotated[Natural, DECISIVE] = 0
    """Number of first steps that train the critic only."""
    val_freq: CountOrOff = -1
    """Validate every this many steps and after the last step; -1: not during training."""
    val_before_train: bool = True
    """Validate before the first step, and after the last step too."""
    val_only: bool = False
    """Validate once and stop without training."""
    val_max_samples: CountOrOff = -1
    """Problems per validation, drawn once with trainer.seed; -1: the whole validation set."""
    val_greedy: bool = False
    """Also measure the accuracy of one greedy response to each validation problem, and the headroom of sampling over it."""
    val_blind: bool = False
    """Also measure the accuracy of as many responses to the validation problems with their images black."""
    val_generations_to_log: Natural = 0
    """Validation problems whose responses are recorded at each validation."""
    leak_probe_size: Natural = 64
    """Responses of each validation that are scored with and without the answer in the context, to detect a leak of
    answers; 0: none."""
    rollouts_to_log: Natural = 2
    """Groups of responses recorded in rollouts/ at each recorded step."""
    rollouts_freq: Count = 1
    """Record responses every this many steps, beginning with the first step."""
    rollouts_max_mb: Count = 256
    """Size limit of recorded responses and images, in MB; beyond it every second recorded step is removed."""
    save_freq: CountOrOff = -1
    """Write a checkpoint every this many steps, and after the last step; -1: after the last step only."""
    save_limit: CountOrOff = -1
    """Number of checkpoints to keep: the last one, the best by val/reward, and the most recent others; -1: all."""
    save_model_only: bool = False
    """Write checkpoints with weights only: smaller, and enough for evaluation and merging, but no run can resume from
    them."""
    save_on_interrupt: bool = True
    """After Ctrl-C or SIGTERM finish the step and save a checkpoint first; a second signal ends at once."""
    save_checkpoint_path: OneLine | None = None
    """Run folder; null: checkpoints/<project_name>/<experiment_name>."""
    load_checkpoint_path: OneLine | None = None
    """Checkpoint folder global_step_<N> to start from."""
    find_last_checkpoint: bool = True
    """Resume from the last checkpoint in the run folder, if there is one."""
    accept_changes: bool = False
    """Resume even if a setting that decides what is trained (data, method, batch, learning rate and others) has changed
    since the checkpoint."""
    max_try_make_batch: Annotated[int, DECISIVE] = 20
    """Most sampling rounds per step under online filtering; after them, groups that were filtered out fill the batch. 0
    or less: rounds end only if three passes over the data keep no group."""
    max_skipped_steps: CountOrOff = 10
    """End the run after this many consecutive steps whose updates were all skipped because gradients were not finite;
    -1: never."""
    on_fault: Literal["warn", "skip", "stop"] = "warn"
    """Reaction to a fault: log-probs, rewards or advantages that are not finite, an engine gap above max_log_prob_gap,
    or collapsed responses or rewards. warn: log a warning; skip: also skip the update, if the fault is found before it;
    stop: also end the run and keep the last good checkpoint."""
    collapse_steps: Count = 10
    """Number of consecutive steps that count as collapse if in each of them half of the responses are empty or repeat
    one token, or all rewards are equal."""
    max_log_prob_gap: Positive = 1.0
    """Largest mean gap between the log-probs of rollout engine and trainer, in nats per token, that is not a fault."""
    plugins: Annotated[list[File], DECISIVE] = []
    """Python files that register further methods and policy losses."""
    seed: Annotated[Natural, DECISIVE] = 1
    """Seed of the run: of the order of rows, of sampling, and of everything that has no seed of its own."""

    @property
    def validates_at_the_end(self) -> bool:
        """Whether the weights of the run's last step are validated."""
        return self.val_freq > 0 or self.val_before_train

    @property
    def num_devices(self) -> int:
        """The number of devices of the whole run; without GPUs, the number of worker processes."""
        return self.nnodes * self.n_gpus_per_node

    @property
    def chosen_launcher(self) -> str:
        """`local` or `ray`: `launcher`, with `auto` resolved for this run's devices."""
        if self.launcher != "auto":
            return self.launcher
        return "ray" if self.num_devices > 1 else "local"

    @property
    def run_folder(self) -> Path:
        """The run folder: `save_checkpoint_path`, else checkpoints/<project_name>/<experiment_name>."""
        if self.save_checkpoint_path is not None:
            return Path(self.save_checkpoint_path)
        return Path("checkpoints") / self.project_name / self.experiment_name


@section
class RunSettings:
    """Everything that a configuration may hold except the methods' own sections."""

    data: Annotated[DataConfig, FROM_RECORD] = Field()
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
        set_with_method: settings of training outside `algorithm` that the file which chose the method changes too: key and
            value, with the value that holds without this file.
    """

    methods: Mapping[str, Fields] = dataclasses.field(default_factory=dict[str, Fields])
    from_environment: Mapping[tuple[str, ...], object] = dataclasses.field(
        default_factory=dict[tuple[str, ...], object], compare=False, repr=False
    )
    set_with_method: Mapping[str, tuple[object, object]] = dataclasses.field(
        default_factory=dict[str, tuple[object, object]], compare=False, repr=False
    )

    @property
    def estimator(self) -> Estimator:
        """The chosen method with its settings. It holds no state, so that each use may build it anew."""
        name = self.algorithm.adv_estimator
        return build_estimator(name, self.methods.get(name))

    @property
    def needs_critic(self) -> bool:
        return "values" in self.estimator.reads

    @property
    def named_models(self) -> list[tuple[str, str | None]]:
        """The settings that name a model which the run reads, with their values."""
        model = self.worker.actor.model
        named = [
            ("worker.actor.model.model_path", model.model_path),
            ("worker.actor.model.tokenizer_path", model.tokenizer_path),
            ("algorithm.teacher.model_path", self.estimator.teacher.model_path),
        ]
        if self.needs_critic:
            named.append(("worker.critic.model.model_path", self.worker.critic.model.model_path))
        return named

    @property
    def named_data(self) -> list[tuple[str, str]]:
        """The settings that name data, with each source."""
        named = [("data.train_files", source) for source in self.data.train_sources]
        if self.data.val_files is not None:
            named.append(("data.val_files", self.data.val_files))
        return named
