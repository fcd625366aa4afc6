"""Implements `cepo show`: shows the credit of each token for any checkpoint and problems, without training."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cepo.config.path_checks import require_file
from cepo.errors import ConfigError
from cepo.files.safe_files import read_text
from cepo.terminal.lines import print_plain
from cepo.terminal.progress import live_view, log_to_stderr

if TYPE_CHECKING:
    from cepo.rollout.generator import Generation
    from cepo.trainer.loop import Trainer


def show_credit(
    model: str, data: str, settings: Sequence[str], *, response: Path | None, problems: int, out: Path
) -> None:
    """Writes the page with the credit of each token to `out`; the parameters are the arguments of `cepo show`."""
    if Path(model).is_file() or (Path(data) / "config.json").is_file():
        raise ConfigError(f"{model} is no model, or {data} no data: MODEL comes first (cepo show {data} {model} ...)")
    if data.startswith("config="):
        raise ConfigError(
            f"DATA is missing: cepo show {model} DATA {data}, where DATA are problems, such as problems.csv"
        )
    if out.suffix == ".html" or out.is_file():
        raise ConfigError(f"--out {out}: this is a file; give a folder, in which report.html is written")
    require_file("--response", response)
    if not any(setting.startswith("config=") for setting in settings):
        raise ConfigError("give config=FILE, which has the prompts, the method and its teachers, as microgeo/cepo does")

    from cepo.report.page import write_report
    from cepo.runtime.preflight import check_run
    from cepo.train import build_trainer
    from cepo.workers.checkpoint import load_weights
    from cepo.workers.named_checkpoint import config_of_checkpoint
    from cepo.workers.worker import Worker

    log_to_stderr()
    text = None if response is None else read_text(response).rstrip("\n")
    config, actor = config_of_checkpoint(model, [*_settings_of_one_step(data, problems, out), *settings])
    with ExitStack() as stack, live_view():
        check_run(config)
        trainer = build_trainer(config, stack)
        if actor is not None:
            assert isinstance(trainer.backend, Worker), "the launcher is local"
            load_weights(trainer.backend.actor, actor)
        show(trainer, text)
    print_plain(f"page: {write_report(out)}")


def _settings_of_one_step(data: str, problems: int, out: Path) -> list[str]:
    return [
        f"data.train_files={data}",
        "data.val_files=null",
        "trainer.val_before_train=false",
        "trainer.val_freq=-1",
        "data.shuffle=false",
        f"data.rollout_batch_size={problems}",
        f"worker.actor.global_batch_size={problems}",
        "trainer.max_steps=1",
        "trainer.logger=[file]",
        "trainer.launcher=local",
        "trainer.find_last_checkpoint=false",
        f"trainer.save_checkpoint_path={out}",
    ]


def show(trainer: Trainer, text: str | None = None) -> None:
    """Samples, scores and records one step's responses; `text` replaces the first response to the first problem.

    The student and every teacher that has a reference score all responses, also those that would not be trained on.
    """
    from cepo.trainer.recording import group_records

    processing = trainer.processing
    trainer.backend.synchronise_rollout()
    problems = [trainer.problems[index] for index in range(trainer.data.rollout_batch_size)]
    engine = trainer.backend if text is None else _WithResponse(trainer, text)
    rollouts = trainer.with_baselines(trainer.sample_problems(problems, engine, step=0), trainer.backend)
    plan = trainer.plan(rollouts, every_row=True)
    batch = trainer.score(plan)
    signal = trainer.estimate(batch)
    trainer.tracker.log_rollouts(group_records(batch, signal, processing, trainer.estimator.views, len(problems)))


class _WithResponse:
    """A sampler whose first response to the first prompt is a given text."""

    def __init__(self, trainer: Trainer, text: str) -> None:
        from cepo.rollout.generator import Generation

        ids = (*trainer.processing.encode_text(text), trainer.processing.eos_token_ids[0])
        self._given = Generation.of(ids, [0.0] * len(ids), finished=True)
        self._backend = trainer.backend

    def generate(self, requests: Any, settings: Any, on_finished: object = None) -> list[list[Generation]]:
        """Samples all responses and replaces the first; never calls `on_finished`."""
        del on_finished
        first, *further_groups = self._backend.generate(requests, settings)
        return [[self._given, *first[1:]], *further_groups]
