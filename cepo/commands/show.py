"""Implements `cepo show`: shows the credit of each token for any checkpoint and problems, without training."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from cepo.commands.exit_codes import guarded
from cepo.config import check_config, load_config
from cepo.config.checks import require_file
from cepo.errors import ConfigError
from cepo.foreign_files import read_text
from cepo.progress import live_view, log_to_stderr
from cepo.terminal import SafeConsole

if TYPE_CHECKING:
    from cepo.trainer.loop import Trainer

_TRAINED = "trainer_state.json"


def run_show_command(argv: Sequence[str], *, console: Console | None = None) -> int:
    """Runs `cepo show MODEL DATA config=FILE [--response FILE] [--problems N] [--out FOLDER] [a.b.c=value ...]`.

    Returns:
        0, or 2 with a message on standard error if the command, the configuration, the data or the model is invalid.
    """
    parser = argparse.ArgumentParser(
        prog="cepo show", description="Shows the credit of each token for a checkpoint and problems, without training."
    )
    parser.add_argument("model", metavar="MODEL", help="global_step_<N> of a run, a model folder or a hub name")
    parser.add_argument("data", metavar="DATA", help="problems, in the forms of data.train_files")
    parser.add_argument(
        "settings",
        nargs="*",
        metavar="SETTING",
        help="config=FILE (required) and settings a.b.c=value, for example the method",
    )
    parser.add_argument(
        "--response", type=Path, metavar="FILE", help="text file that replaces the first sampled response"
    )
    parser.add_argument(
        "--problems", type=int, default=1, metavar="N", help="number of problems, from the first one (default: 1)"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("shown"), metavar="FOLDER", help="folder for the page (default: shown)"
    )
    return guarded(parser, argv, lambda arguments: _show(arguments, console or SafeConsole()))


def _show(arguments: argparse.Namespace, console: Console) -> None:
    from cepo.microgeo.world import with_embedded_world
    from cepo.preflight import check_before_imports, check_devices, check_hub_names
    from cepo.report.page import write_report
    from cepo.train import build_trainer

    log_to_stderr()
    if Path(arguments.model).is_file() or (Path(arguments.data) / "config.json").is_file():
        swapped = f"cepo show {arguments.data} {arguments.model}"
        raise ConfigError(
            f"{arguments.model} is no model, or {arguments.data} no data: MODEL comes first ({swapped} ...)"
        )
    if arguments.out.suffix == ".html":
        raise ConfigError(f"--out {arguments.out}: give a folder, in which report.html is written")
    require_file("--response", arguments.response)
    if not any(setting.startswith("config=") for setting in arguments.settings):
        raise ConfigError("give config=FILE, which defines the prompts, the method and its teachers")
    text = None if arguments.response is None else read_text(arguments.response).rstrip("\n")
    config = load_config([*_settings(arguments), *arguments.settings])
    check_config(config)
    check_before_imports(config)
    check_devices(config)
    check_hub_names(config)
    with ExitStack() as stack, live_view():
        show(build_trainer(with_embedded_world(config), stack), text)
    page = write_report(arguments.out)
    console.print(f"page: {page}", soft_wrap=True, highlight=False, markup=False)


def _settings(arguments: argparse.Namespace) -> list[str]:
    trained = (Path(arguments.model) / _TRAINED).is_file()
    model = "trainer.load_checkpoint_path" if trained else "worker.actor.model.model_path"
    count = arguments.problems
    return [
        f"{model}={arguments.model}",
        f"data.train_files={arguments.data}",
        "data.val_files=null",
        "trainer.val_before_train=false",
        "trainer.val_freq=-1",
        "data.shuffle=false",
        f"data.rollout_batch_size={count}",
        f"worker.actor.global_batch_size={count}",
        "trainer.max_steps=1",
        "trainer.logger=[file]",
        "trainer.launcher=local",
        "trainer.find_last_checkpoint=false",
        f"trainer.save_checkpoint_path={arguments.out}",
    ]


def show(trainer: Trainer, text: str | None = None) -> None:
    """Samples, scores and records one step's responses; `text` replaces the first response to the first problem.

    The student and every teacher that has a reference score all responses, also those that would not be trained on.
    """
    import torch

    from cepo.trainer.asking import Asker, training_settings
    from cepo.trainer.planning import make_plan, rollout_groups
    from cepo.trainer.recording import group_records

    processing, data = trainer.processing, trainer.data
    asker = Asker(trainer.worker, trainer.algorithm, trainer.contexts, processing, trainer.rewards)
    trainer.backend.synchronise_rollout()
    problems = [trainer.problems[index] for index in range(data.rollout_batch_size)]
    engine = trainer.backend if text is None else _WithResponse(trainer, text)
    rollouts = asker.ask(problems, engine, training_settings(trainer.worker.rollout, data), step=0)
    groups = rollout_groups(rollouts, trainer.rewards, processing, seed=trainer.settings.seed)
    none = torch.zeros(len(rollouts.generations), dtype=torch.bool)
    plan = make_plan(rollouts, groups, trainer.estimator, trainer.contexts, on_policy=none, with_kl=True)
    batch = trainer.score(plan)
    signal = trainer.estimate(batch)
    trainer.tracker.log_rollouts(group_records(batch, signal, processing, trainer.estimator.views, len(problems)))


class _WithResponse:
    """A sampler whose first response to the first prompt is a given text."""

    def __init__(self, trainer: Trainer, text: str) -> None:
        from cepo.rollout.generator import Generation

        ids = (*trainer.processing.encode_text(text), trainer.processing.eos_token_ids[0])
        self._given = Generation(response_ids=ids, log_probs=(0.0,) * len(ids), finished=True)
        self._backend = trainer.backend

    def generate(self, requests: Any, settings: Any, on_finished: Any = None) -> list[list[Any]]:
        """Samples all responses and replaces the first; never calls `on_finished`."""
        del on_finished
        first, *others = self._backend.generate(requests, settings)
        return [[self._given, *first[1:]], *others]
