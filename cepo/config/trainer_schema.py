"""Declares the settings of a run's length, devices, records and checkpoints; a part of the schema."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from cepo.config.data_schema import CountOrOff
from cepo.config.paths import File
from cepo.sections import section


@section
class TrainerConfig:
    """`trainer.*`: length of the run, validation, records and checkpoints."""

    total_epochs: int = Field(default=15, ge=1, description="Passes over the training set, where max_steps is null.")
    max_steps: int | None = Field(
        default=None, ge=0, description="Training steps; also the horizon of the learning-rate schedule."
    )
    project_name: str = Field(default="cepo", description="Folder of checkpoints and records.")
    experiment_name: str = Field(default="demo", description="Folder within it.")
    logger: list[Literal["console", "file", "tensorboard", "wandb", "mlflow", "swanlab"]] = Field(
        default=["console", "file"], description="Where metrics go; the last three need the extra `trackers`."
    )
    launcher: Literal["auto", "local", "ray"] = Field(
        default="auto",
        description="Where workers run: in this process, or one per device under Ray; auto: ray for more than one "
        "device.",
    )
    nnodes: int = Field(default=1, ge=1, description="Machines.")
    n_gpus_per_node: int = Field(
        default=1, ge=1, description="Devices per machine; without GPUs, worker processes, at most one per processor."
    )
    ray_address: str | None = Field(
        default=None,
        description="Running Ray cluster to join, `auto` or host:port; null: RAY_ADDRESS, else one is started on this "
        "machine.",
    )
    start_timeout_seconds: float = Field(
        default=900.0,
        gt=0,
        description="Under Ray: how long to wait for devices, and for the workers to load their models.",
    )
    stage_timeout_seconds: float = Field(
        default=3600.0,
        gt=0,
        description="Under Ray: a worker that takes longer for one stage of a step hangs, and is restarted.",
    )
    max_restarts: int = Field(
        default=2,
        ge=0,
        description="Under Ray: how often a run restarts lost workers and goes on from its last checkpoint.",
    )
    critic_warmup: int = Field(default=0, ge=0, description="Steps in which the critic alone is trained.")
    val_freq: CountOrOff = Field(default=-1, description="Validate every so many steps.")
    val_before_train: bool = Field(default=True, description="Validate before the first step.")
    val_only: bool = Field(default=False, description="Stop after that validation.")
    val_max_samples: CountOrOff = Field(
        default=-1, description="Held-out problems per validation, drawn once by trainer.seed; -1: all."
    )
    val_greedy: bool = Field(
        default=False, description="Also measure the accuracy of one greedy response to each held-out problem."
    )
    val_generations_to_log: int = Field(default=0, ge=0, description="Validation responses recorded each time.")
    leak_probe_size: int = Field(
        default=64,
        ge=0,
        description="Held-out responses of each validation that are scored with and without the answer in view; 0: "
        "none.",
    )
    rollouts_to_log: int = Field(
        default=2, ge=0, description="Groups of responses recorded in rollouts/ at each recorded step."
    )
    rollouts_freq: int = Field(default=1, ge=1, description="Record responses every so many steps, from the first on.")
    rollouts_max_mb: int = Field(
        default=256,
        ge=1,
        description="Most megabytes of recorded responses and images; beyond, every second recorded step is removed.",
    )
    save_freq: CountOrOff = Field(default=-1, description="Write a checkpoint every so many steps.")
    save_limit: CountOrOff = Field(
        default=-1,
        description="Checkpoints kept: the last, the best by val/reward, the most recent others; -1: all.",
    )
    save_model_only: bool = Field(
        default=False,
        description="Checkpoints hold weights alone: smaller, for evaluation and merging; no run can go on from them.",
    )
    save_checkpoint_path: str | None = Field(
        default=None, description="Run folder; null: checkpoints/<project_name>/<experiment_name>."
    )
    load_checkpoint_path: str | None = Field(
        default=None, description="Checkpoint folder global_step_<N> to start from."
    )
    find_last_checkpoint: bool = Field(
        default=True, description="Resume from the run folder's last checkpoint, if there is one."
    )
    accept_changes: bool = Field(
        default=False,
        description="Resume although data, method, batch, learning rate or another setting that decides what is trained has "
        "changed since the checkpoint.",
    )
    max_try_make_batch: int = Field(
        default=20,
        description="Rounds of sampling for one step under online filtering; then the batch is filled with filtered "
        "groups. 0 or less: as many rounds as it takes.",
    )
    max_skipped_steps: CountOrOff = Field(
        default=10,
        description="Steps in a row whose updates were all skipped for gradients that are not finite, after which the "
        "run ends; -1: never.",
    )
    on_fault: Literal["warn", "skip", "stop"] = Field(
        default="warn",
        description="What becomes of a step whose log-probs, rewards or advantages are not finite, whose engine gap is "
        "above max_log_prob_gap, or whose responses or rewards have collapsed: warn; skip: also no update where the fault "
        "shows before it; stop: also end the run, the last good checkpoint kept.",
    )
    collapse_steps: int = Field(
        default=10,
        ge=1,
        description="Steps in a row in which half of the responses are empty or repeat one token, or all rewards are "
        "equal, that count as collapse.",
    )
    max_log_prob_gap: float = Field(
        default=1.0, gt=0, description="Mean gap between rollout engine and trainer, in nats a token, that is a fault."
    )
    plugins: list[File] = Field(default=[], description="Python files that register further methods.")
    seed: int = Field(default=1, ge=0, description="Seed of everything that has none of its own.")
