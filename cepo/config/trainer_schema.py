"""Declares the settings of a run's length, devices, records and checkpoints; a part of the schema."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from cepo.config.paths import File
from cepo.sections import DECISIVE, Count, CountOrOff, Natural, Positive, section


@section
class TrainerConfig:
    """`trainer.*`: length of the run, validation, records and checkpoints."""

    total_epochs: Count = 15
    """Passes over the training set; max_steps overrides it."""
    max_steps: Natural | None = None
    """Number of training steps, also for the learning-rate schedule; null: total_epochs decides."""
    project_name: str = "cepo"
    """Project in trackers, and outer folder of checkpoints and records."""
    experiment_name: str = "demo"
    """Run in trackers, and folder within the project's."""
    logger: list[Literal["console", "file", "tensorboard", "wandb", "mlflow", "swanlab", "trackio"]] = [
        "console",
        "file",
    ]
    """Where metrics are written; wandb, mlflow, swanlab and trackio need the extra `trackers`."""
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
    """Also measure the accuracy of one greedy response to each validation problem."""
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
    save_checkpoint_path: str | None = None
    """Run folder; null: checkpoints/<project_name>/<experiment_name>."""
    load_checkpoint_path: str | None = None
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
    """Python files that register further methods."""
    seed: Annotated[Natural, DECISIVE] = 1
    """Seed of the run: of the order of rows, of sampling, and of everything that has no seed of its own."""

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
