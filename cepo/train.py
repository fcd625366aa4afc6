"""Builds and connects all parts of a training run (the composition root)."""

from __future__ import annotations

import sys

if __name__ == "__main__" and not __package__:
    # As a file, this folder comes first on the path, and its types.py hides the standard library's from every import below.
    sys.stderr.write("run the module, not its file: python3 -m cepo.train config=FILE a.b.c=value ...\n")
    raise SystemExit(2)

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from types import ModuleType
from typing import TYPE_CHECKING

from cepo.config import RunConfig, dump_for_record, load_config
from cepo.config.record import decisive_settings, run_identity
from cepo.errors import CepoError, ConfigError, WorkerLostError, place_in, unusable_place
from cepo.files.temp_folders import remove_left_behind
from cepo.hardware import reserve_memory_in_growing_segments
from cepo.runtime import preflight
from cepo.runtime.network import prepare_own_cluster
from cepo.terminal import interrupts
from cepo.terminal.lines import duration
from cepo.terminal.progress import live_view, log_to_stderr, phase

if TYPE_CHECKING:
    from cepo.config.schema import DataConfig, TrainerConfig
    from cepo.data.dataset import ProblemSet
    from cepo.data.training_set import TrainingProblems
    from cepo.models.interface import ImageSource
    from cepo.models.processing import Processing
    from cepo.report.page import Run
    from cepo.run_folder.sinks.tracker import Tracker
    from cepo.trainer.callbacks import Callback
    from cepo.trainer.loop import Trainer
    from cepo.trainer.protocol import Backend
    from cepo.trainer.run_policy import RunPolicy
    from cepo.trainer.sampling import RolloutSampler
    from cepo.trainer.validation import Validator

# Not __name__: under `python3 -m cepo.train` it is __main__, and the plan and the resumed state would not be logged.
logger = logging.getLogger("cepo.train")

EXIT_USER_ERROR = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Implements `python3 -m cepo.train config=FILE a.b.c=value ...` and returns the exit code.

    0: the run has finished. 2: a `CepoError` (config and data are checked before heavy work), or a plug-in failed.
    130: Ctrl-C. 143: SIGTERM.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    log_to_stderr()
    config = None
    with interrupts.handled():
        try:
            config = load_config(arguments)
            logger.info("%s", closing_words(train(config)))
        except CepoError as error:
            logger.error("%s", error)
            return EXIT_USER_ERROR
        except KeyboardInterrupt:
            return _interrupted(config)
        except Exception as error:
            if interrupts.is_heard():  # a library has made it of the interruption
                logger.warning("%s: %s", type(error).__name__, error)
                return _interrupted(config)
            unusable = unusable_place(error)
            if unusable is not None:
                logger.error("%s", unusable)
                return EXIT_USER_ERROR
            where = None if config is None else place_in(error, config.trainer.plugins)
            if where is None:
                raise
            logger.error("%s: %s: %s", where, type(error).__name__, error)
            return EXIT_USER_ERROR
    return 0


def closing_words(run: Run) -> str:
    """Returns the result of a finished run, how long it took, where it is, what keeps it from learning, and what to do next."""
    from cepo.report.findings import diagnosed_run, findings_lines

    parts = [f"finished step {run.last_step} after {duration(run.seconds)}"]
    steps, accuracies = run.series("val/accuracy")
    if len(accuracies) > 1:
        parts.append(
            f"validation accuracy {accuracies[0]:.3f} (step {steps[0]}) -> {accuracies[-1]:.3f} (step {steps[-1]})"
        )
    elif accuracies:
        parts.append(f"validation accuracy {accuracies[0]:.3f} (step {steps[0]})")
    checkpoints = list(run.checkpoints.values())
    if checkpoints:
        parts.append(f"checkpoint {checkpoints[-1]}")
    if run.last_step > 0:
        try:
            parts += findings_lines(diagnosed_run(run))
        except CepoError as error:  # the run itself has succeeded
            parts.append(f"no diagnosis: {error}")
    parts.append(f"next: cepo report {run.folder}")
    return "\n  ".join(parts)


def _interrupted(config: RunConfig | None) -> int:
    how_to_go_on = "no work had started" if config is None else run_policy(config).how_to_resume()
    logger.warning("interrupted; %s", how_to_go_on)
    return interrupts.exit_code()


def run_policy(config: RunConfig) -> RunPolicy:
    from cepo.trainer.run_policy import RunPolicy

    return RunPolicy(config.trainer, identity=run_identity(config), decisive=decisive_settings(config))


def train(config: RunConfig, *, callbacks: Sequence[Callback] = ()) -> Run:
    """Trains as `config` says, from the start or from its last checkpoint, and returns the run's records.

    `cepo.train(config)` is this function. The plan and the progress go to the logger `cepo.train`. `config` need not be
    checked; `callbacks` are called after each stage of each step.

    Raises:
        ConfigError, DataError, RewardError: a setting, the data or the reward function is at fault, before any model is loaded.
        CheckpointError: the checkpoint to resume from does not fit, settings have changed since it was written, or
            another run holds the run folder.
        WorkerLostError: a worker was lost, and `trainer.max_restarts` are used up or this process is the worker.
    """
    from cepo.report.page import open_run
    from cepo.trainer.callbacks import CallbackList

    if not isinstance(config, RunConfig):  # a name is likely: the other functions of `cepo` take names
        how = f"cepo.load_config({config!r})" if isinstance(config, str) else 'cepo.load_config("FILE", {...})'
        raise ConfigError(f"cepo.train takes a configuration, got {config!r}; write cepo.train({how})")
    watchers = CallbackList(callbacks)
    preflight.require_one_process()
    with live_view():
        preflight.check_run(config)
        _train_in_its_folder(config, watchers)
    return open_run(config.trainer.run_folder)


def _train_in_its_folder(config: RunConfig, callback: Callback) -> None:
    from cepo.trainer.run_policy import RunFinishedError

    remove_left_behind()
    if config.trainer.chosen_launcher == "ray" and preflight.ray_address(config.trainer) is None:
        prepare_own_cluster()
    with run_policy(config) as policy:
        while True:
            try:
                with ExitStack() as stack:
                    build_trainer(config, stack, policy, callback).fit()
                return
            except RunFinishedError as done:
                logger.info("%s", done)
                return
            except WorkerLostError as error:
                policy.restart(error)


def build_trainer(
    config: RunConfig, stack: ExitStack, policy: RunPolicy | None = None, callback: Callback | None = None
) -> Trainer:
    """Builds the trainer, with cheap checks first; `stack` closes its resources, `policy` is that of a trainer before it."""
    from cepo.algorithms import load_plugin
    from cepo.microgeo.world import with_embedded_world
    from cepo.rewards.pool import RewardPool

    located = with_embedded_world(config)  # the record keeps the toy task's names, with which it can be run again
    data = located.data
    worker = located.worker
    policy = policy or stack.enter_context(run_policy(config))
    rewards = stack.enter_context(RewardPool(worker.reward))
    with interrupts.loading(), phase("loading libraries and the tokenizer"):
        from cepo.data.prompts import ContextBuilder
        from cepo.data.training_set import most_visuals
        from cepo.models.processing import processing_of
        from cepo.trainer.callbacks import Callback
        from cepo.trainer.loop import Trainer
        from cepo.trainer.sampling import RolloutSampler

        processing = processing_of(located)
    for plugin in located.trainer.plugins:
        load_plugin(plugin)
    estimator = located.estimator
    contexts = ContextBuilder(processing, estimator.teacher, max_context_length=data.max_prompt_length)
    with phase("reading and checking the problems"):
        problems, held_out = _problem_sets(data, processing, with_solutions="solution" in estimator.reference_sources)
    total_steps = _total_steps(problems, data, located.trainer)
    policy.choose_start(data=problems.content(), total_steps=total_steps, kl_coefficient=located.algorithm.kl_coef)
    preflight.check_before_loading(worker.actor, estimator, rewards, problems, processing)
    policy.lock.acquire()  # last of the checks: a refused run leaves no folder
    visuals = most_visuals(problems, held_out)
    backend = build_backend(located, processing, total_steps, visuals, problems.image_probe())
    stack.callback(backend.close)
    _resume(backend, policy, total_steps)
    tracker = _tracker(config, stack, total_steps, policy.begin())
    sampler = RolloutSampler(worker, located.algorithm, contexts, processing, rewards)
    validator = None if held_out is None else _validator(located, held_out, sampler)
    return Trainer(
        data=data,
        algorithm=located.algorithm,
        worker=worker,
        settings=located.trainer,
        problems=problems,
        processing=processing,
        estimator=estimator,
        contexts=contexts,
        backend=backend,
        sampler=sampler,
        tracker=tracker,
        policy=policy,
        validator=validator,
        total_steps=total_steps,
        callback=callback or Callback(),
    )


def _resume(backend: Backend, policy: RunPolicy, total_steps: int) -> None:
    """Loads the checkpoint that the run resumes from, if there is one."""
    if policy.checkpoint is None:
        return
    backend.load(policy.checkpoint)
    next_step = policy.state.step + 1
    logger.info("resumed from %s: continues with step %d of %d", policy.checkpoint, next_step, total_steps)


def _validator(config: RunConfig, held_out: ProblemSet, sampler: RolloutSampler) -> Validator:
    from cepo.trainer.sampling import validation_settings
    from cepo.trainer.validation import Validator

    return Validator(
        held_out,
        sampler,
        settings=validation_settings(config.worker.rollout, config.data.max_response_length),
        batch_size=config.data.val_batch_size,
        trainer=config.trainer,
    )


def _problem_sets(
    data: DataConfig, processing: Processing, *, with_solutions: bool
) -> tuple[TrainingProblems, ProblemSet | None]:
    from cepo.data.dataset import ProblemSet
    from cepo.data.training_set import read_training_sets

    problems = read_training_sets(data, processing, with_solutions=with_solutions)
    held_out = None if data.val_files is None else ProblemSet(data.val_files, data, processing)
    return problems, held_out


def _total_steps(problems: TrainingProblems, data: DataConfig, settings: TrainerConfig) -> int:
    per_epoch = problems.steps_per_epoch(data.rollout_batch_size)
    total_steps = settings.max_steps
    if total_steps is None:
        total_steps = per_epoch * settings.total_epochs
    logger.info("%d problems make %d steps per epoch; %d steps in total", len(problems), per_epoch, total_steps)
    return total_steps


def build_backend(
    config: RunConfig,
    processing: Processing,
    total_steps: int,
    most_visuals: tuple[int, int],
    image_probe: ImageSource | None,
) -> Backend:
    """Builds the backend, on this process's device or on those of a Ray cluster; estimates its memory for GPUs alone.

    `most_visuals` are the largest numbers of images and of videos in a prompt.
    """
    import torch

    from cepo.rollout.factory import vllm_samples
    from cepo.workers.memory import estimate_memory, require_memory
    from cepo.workers.pass_sizes import with_numbers
    from cepo.workers.worker import WorkerSpec

    reserve_memory_in_growing_segments()
    estimator = config.estimator
    spec = WorkerSpec.of(
        config,
        teacher=estimator.teacher,
        needs_values=config.needs_critic,
        total_steps=total_steps,
        most_visuals=most_visuals,
    )
    under_ray = config.trainer.chosen_launcher == "ray"
    memory = None
    if under_ray or torch.cuda.is_available():
        num_banned = len(processing.banned_token_ids)
        with_vllm = vllm_samples(spec.generator, processing.family, num_banned=num_banned)
        memory = estimate_memory(with_numbers(config), with_vllm=with_vllm)
        spec = spec.with_pass_needs(config, with_vllm=with_vllm)
    if under_ray:
        from cepo.data.row_settings import RowRules
        from cepo.runtime.ray_backend import RayBackend

        rules = RowRules.of(config.data)
        return RayBackend(config.trainer, spec, row_rules=rules, memory=memory, image_probe=image_probe)
    from cepo.workers.distributed import this_device
    from cepo.workers.worker import Worker

    require_memory(memory, spec.generator, this_device())
    return Worker(spec.for_this_device(memory), processing)


def _tracker(config: RunConfig, stack: ExitStack, total_steps: int, resumed_step: int | None) -> Tracker:
    from cepo.report.html_snippet import tracked_credit
    from cepo.run_folder.sinks.base import RunDescription
    from cepo.run_folder.sinks.tracker import build_tracker

    settings = config.trainer
    tracker = build_tracker(
        settings.logger,
        RunDescription(
            folder=settings.run_folder,
            config_text=dump_for_record(config),
            max_steps=total_steps,
            project=settings.project_name,
            experiment=settings.experiment_name,
            resumed_step=resumed_step,
            max_rollouts_mb=settings.rollouts_max_mb,
            credit_of=tracked_credit,
        ),
    )
    stack.callback(tracker.close)
    return tracker


class _CallableModule(ModuleType):
    """A module that `cepo.train(config)` calls as the function `train`, while `python3 -m cepo.train` runs it.

    A name of a package is either a function or a submodule: importing this module anywhere sets `cepo.train` to it. Python
    lets a module choose its own class for such a case ("Customizing module attribute access" in its reference).
    """

    __call__ = staticmethod(train)


sys.modules[__name__].__class__ = _CallableModule


if __name__ == "__main__":
    interrupts.exit_process(main())
