"""The composition root of a training run: the one place that sees every part and puts them together."""

from __future__ import annotations

import dataclasses
import logging
import signal
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cepo.config import RunConfig, check_config, dump_config, load_config, resolved_critic, run_folder
from cepo.errors import CepoError, CheckpointError, ConfigError

if TYPE_CHECKING:
    from cepo.algorithms import Estimator
    from cepo.data.dataset import ProblemSet
    from cepo.losses.objective import ObjectiveSettings
    from cepo.models.processing import Processing
    from cepo.rollout.base import Generator
    from cepo.runtime.local import LocalBackend
    from cepo.trainer.checkpoints import CheckpointStore
    from cepo.trainer.loop import Trainer

# Not __name__, which is __main__ under `python3 -m cepo.train`: the plan and what was resumed would not be logged there.
logger = logging.getLogger("cepo.train")

EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """`python3 -m cepo.train config=FILE a.b.c=value ...`; returns the exit code.

    0 when the run has finished, 2 for a mistake in config or data (before heavy work), 130 after Ctrl-C.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    _log_to_stderr()
    config = None
    try:
        config = load_config(arguments)
        for line in check_config(config):
            logger.info("plan: %s", line)
        train(config)
    except CepoError as error:
        logger.error("%s", error)
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        logger.warning("interrupted; %s", "nothing was begun" if config is None else _how_to_resume(config))
        return EXIT_INTERRUPTED
    return 0


def _how_to_resume(config: RunConfig) -> str:
    from cepo.trainer.checkpoints import CheckpointStore

    trainer = config.trainer
    last = CheckpointStore(run_folder(config), keep=-1, identity={}).find_last()
    if last is None:
        often = f"trainer.save_freq is {trainer.save_freq}; a number of steps makes a run write checkpoints on its way"
        return f"no checkpoint was written yet, so the same command starts anew ({often})"
    if trainer.find_last_checkpoint and trainer.load_checkpoint_path is None:
        return f"the last whole checkpoint is {last}; the same command resumes from it"
    return f"the last whole checkpoint is {last}; the same command with trainer.load_checkpoint_path={last} resumes from it"


def train(config: RunConfig) -> None:
    """Runs `config` from the start or from its last checkpoint.

    Raises:
        ConfigError, DataError: before any model is loaded.
        CheckpointError: the checkpoint to resume from does not fit.
    """
    signal.signal(signal.SIGTERM, _as_keyboard_interrupt)
    config = with_embedded_world(config)
    with ExitStack() as stack:
        trainer = build_trainer(config, stack)
        trainer.fit()


def build_trainer(config: RunConfig, stack: ExitStack) -> Trainer:
    """Puts a run together, cheap checks first; `stack` closes what has to be closed."""
    from cepo.algorithms import build_estimator, load_plugin
    from cepo.data.contexts import ContextBuilder
    from cepo.models.processing import Processing
    from cepo.rewards import RewardPool
    from cepo.tracking.base import check_sinks
    from cepo.trainer.checkpoints import CheckpointStore
    from cepo.trainer.loop import Trainer
    from cepo.trainer.state import TrainerState
    from cepo.trainer.validation import Validator

    check_sinks(config.trainer.logger)
    for plugin in config.trainer.plugins:
        load_plugin(plugin)
    name = config.algorithm.adv_estimator
    estimator = build_estimator(name, config.algorithm.methods.get(name))
    model = config.worker.actor.model
    processing = Processing(
        model.tokenizer_path or model.model_path,
        trust_remote_code=model.trust_remote_code,
        chat_template=_read(config.data.override_chat_template),
    )
    contexts = ContextBuilder(processing, estimator.teacher, max_context_length=config.data.max_prompt_length)
    problems, held_out = _problem_sets(config, processing)
    total_steps = _total_steps(config, len(problems))
    store = CheckpointStore(run_folder(config), keep=config.trainer.save_limit, identity=_identity(config))
    checkpoint = _checkpoint_to_load(config, store)
    reward = config.worker.reward
    rewards = stack.enter_context(
        RewardPool(
            reward.reward_function,
            reward.reward_function_kwargs,
            num_workers=reward.num_cpus,
            timeout_seconds=reward.timeout_seconds,
        )
    )
    backend = build_backend(config, processing, estimator, total_steps, _most_images(problems, held_out))
    stack.callback(backend.close)
    state = TrainerState(kl_coefficient=config.algorithm.kl_coef)
    if checkpoint is not None:
        state = store.load(checkpoint, backend)
        logger.info("resumed from %s: goes on with step %d of %d", checkpoint, state.step + 1, total_steps)
    return Trainer(
        config=config,
        problems=problems,
        processing=processing,
        estimator=estimator,
        contexts=contexts,
        backend=backend,
        rewards=rewards,
        tracker=_tracker(config, stack, store, total_steps, None if checkpoint is None else state.step),
        checkpoints=store,
        validator=None if held_out is None else Validator(held_out, config, contexts, processing, rewards),
        total_steps=total_steps,
        state=state,
    )


def build_backend(
    config: RunConfig, processing: Processing, estimator: Estimator, total_steps: int, most_images: int
) -> LocalBackend:
    """Actor and generator on this process's device."""
    from cepo.runtime.local import LocalBackend
    from cepo.workers.actor import Actor
    from cepo.workers.critic import Critic

    longest_row = config.data.max_prompt_length + config.data.max_response_length
    actor = Actor(
        config.worker.actor,
        processing,
        temperature=config.worker.rollout.temperature,
        teacher=estimator.teacher,
        objective_settings=_objective_settings(config),
        with_reference=not config.algorithm.disable_kl,
        total_steps=total_steps,
        seed=config.trainer.seed,
        longest_row=longest_row,
    )
    critic = None
    if estimator.needs_values:
        settings = resolved_critic(config.worker)
        critic = Critic(
            settings, processing, total_steps=total_steps, seed=config.trainer.seed, longest_row=longest_row
        )
    return LocalBackend(actor, _generator(config, processing, most_images), critic)


def _objective_settings(config: RunConfig) -> ObjectiveSettings:
    from cepo.losses.objective import ObjectiveSettings
    from cepo.losses.policy import ClipRange, PolicyLossSettings

    actor, algorithm = config.worker.actor, config.algorithm
    in_loss = algorithm.use_kl_loss and not algorithm.disable_kl
    return ObjectiveSettings(
        loss_type=actor.loss_type,
        policy=PolicyLossSettings(
            clip=ClipRange(actor.clip_ratio_low, actor.clip_ratio_high, actor.clip_ratio_dual),
            tau_positive=actor.tau_positive,
            tau_negative=actor.tau_negative,
        ),
        kl_penalty=algorithm.kl_penalty,
        kl_coefficient=algorithm.kl_coef if in_loss else 0.0,
    )


def with_embedded_world(config: RunConfig) -> RunConfig:
    """Replaces `microgeo:*` by the paths of the embedded world, which is built if it is not in the cache."""
    data, model, critic = config.data, config.worker.actor.model, config.worker.critic
    names = (data.train_files, data.val_files or "", model.model_path, critic.model.model_path or "")
    if not any(name.startswith("microgeo:") for name in names):
        return config
    from cepo.microgeo.world import build_world

    world = build_world()
    places = {
        "microgeo:train": str(world.train_file),
        "microgeo:validation": str(world.validation_file),
        "microgeo:model": str(world.model_path),
    }
    new_data = dataclasses.replace(
        data,
        train_files=places.get(data.train_files, data.train_files),
        val_files=places.get(data.val_files or "", data.val_files),
    )
    new_model = dataclasses.replace(model, model_path=places.get(model.model_path, model.model_path))
    actor = dataclasses.replace(config.worker.actor, model=new_model)
    critic_path = places.get(critic.model.model_path or "", critic.model.model_path)
    critic = dataclasses.replace(critic, model=dataclasses.replace(critic.model, model_path=critic_path))
    worker = dataclasses.replace(config.worker, actor=actor, critic=critic)
    return dataclasses.replace(config, data=new_data, worker=worker)


def _problem_sets(config: RunConfig, processing: Processing) -> tuple[ProblemSet, ProblemSet | None]:
    from cepo.data.dataset import ProblemSet

    logger.info("reading and checking %s", config.data.train_files)
    problems = ProblemSet(config.data.train_files, config.data, processing)
    held_out = None
    if config.data.val_files is not None:
        held_out = ProblemSet(config.data.val_files, config.data, processing)
    if len(problems) < config.data.rollout_batch_size:
        raise ConfigError(
            f"data.rollout_batch_size is {config.data.rollout_batch_size}, but {config.data.train_files} has "
            f"{len(problems)} usable problems; accepted: at most as many"
        )
    return problems, held_out


def _total_steps(config: RunConfig, num_problems: int) -> int:
    from cepo.data.order import steps_per_epoch

    if config.trainer.max_steps is not None:
        return config.trainer.max_steps
    return steps_per_epoch(num_problems, config.data.rollout_batch_size) * config.trainer.total_epochs


def _most_images(*problem_sets: ProblemSet | None) -> int:
    return max(problems.most_images for problems in problem_sets if problems is not None)


def _generator(config: RunConfig, processing: Processing, most_images: int) -> Generator:
    from cepo.rollout.factory import build_generator
    from cepo.workers.distributed import this_device

    rollout, model = config.worker.rollout, config.worker.actor.model
    length = config.data.max_prompt_length + config.data.max_response_length
    return build_generator(
        rollout.name,
        model_path=model.model_path,
        dtype=rollout.dtype,
        device=this_device().type,
        max_model_len=rollout.max_model_len or length,
        seed=rollout.seed,
        gpu_memory_utilization=rollout.gpu_memory_utilization,
        enforce_eager=rollout.enforce_eager,
        max_num_batched_tokens=rollout.max_num_batched_tokens,
        limit_images=rollout.limit_images or most_images,
        lora_rank=model.lora.rank,
        banned_token_ids=processing.banned_token_ids,
        eos_token_ids=processing.eos_token_ids,
        trust_remote_code=model.trust_remote_code,
        show_progress=not rollout.disable_tqdm and sys.stderr.isatty(),
        processing=processing,
    )


def _tracker(
    config: RunConfig, stack: ExitStack, store: CheckpointStore, total_steps: int, resumed_step: int | None
) -> Any:
    """Sinks over the run folder, from which everything that this run does not go on with is set aside first."""
    import torch

    from cepo.tracking.base import RunDescription
    from cepo.tracking.tracker import build_tracker, set_aside_earlier_records

    aside = set_aside_earlier_records(run_folder(config)) if resumed_step is None else None
    store.set_aside(after=resumed_step or 0, folder=aside)
    tracker = build_tracker(
        config.trainer.logger,
        RunDescription(
            folder=run_folder(config),
            config_text=dump_config(config),
            max_steps=total_steps,
            project=config.trainer.project_name,
            experiment=config.trainer.experiment_name,
            resumed_step=resumed_step,
            device_names=[torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        ),
    )
    stack.callback(tracker.close)
    return tracker


def _checkpoint_to_load(config: RunConfig, store: Any) -> Path | None:
    if config.trainer.load_checkpoint_path is not None:
        folder = Path(config.trainer.load_checkpoint_path)
        if not folder.is_dir():
            raise CheckpointError(
                f"trainer.load_checkpoint_path '{folder}' does not exist; give a folder global_step_<N>"
            )
        return folder
    return store.find_last() if config.trainer.find_last_checkpoint else None


def _identity(config: RunConfig) -> dict[str, Any]:
    """What a checkpoint and the run that resumes it must have in common for the result to be the same run."""
    return {
        "adv_estimator": config.algorithm.adv_estimator,
        "model_path": config.worker.actor.model.model_path,
        "lora_rank": config.worker.actor.model.lora.rank,
    }


def _read(path: str | None) -> str | None:
    return None if path is None else Path(path).read_text(encoding="utf-8")


def _as_keyboard_interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _log_to_stderr() -> None:
    logging.basicConfig(
        level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s", datefmt="%H:%M:%S"
    )
    logging.getLogger("cepo").setLevel(logging.INFO)


if __name__ == "__main__":
    sys.exit(main())
