"""Implements `cepo credit`: compares methods' credit with Monte-Carlo truth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from cepo.commands.checkpoint_arguments import (
    config_of_checkpoint,
    name_of_results,
    run_command,
    split_arguments,
    truth,
)
from cepo.config import RunConfig
from cepo.config.loader import plain_tree
from cepo.errors import ConfigError

if TYPE_CHECKING:
    from cepo.credit.method_list import MeasuredMethod

_USAGE = """usage: cepo credit methods=NAME[,NAME(setting=value, ...) ...] [config=FILE] [checkpoint=FOLDER|MODEL] [data=SOURCE]
                   [responses=80] [tokens=64] [continuations=32] [--out FOLDER] [dry_run=true] [a.b.c=value ...]

Compares the token credit of methods with Monte-Carlo estimates.

methods        for example "a, b(clip_radius=0.9, negative.select=random)"; settings in algorithm apply too
checkpoint     global_step_<N> of a run, a model folder, or a hub name; default: the configuration's model
config         configuration; default: that of the checkpoint's run, without its methods' settings
data           problems; default: data.train_files
responses      number of measured responses, from groups whose rewards differ
tokens         tokens measured per response, drawn at random from longer responses
continuations  continuations sampled from each prefix
--out          new folder, or the folder of an interrupted measurement with the same settings; default: credit/<checkpoint>
dry_run        true: count the continuations and estimate the time
"""
OWN_KEYS = ("methods", "checkpoint", "data", "responses", "tokens", "continuations", "out", "dry_run")


@dataclass(frozen=True, kw_only=True)
class CreditPlan:
    """A checked command line; `actor` is the folder of trained weights, None for the model's own weights."""

    config: RunConfig
    checkpoint: str | None
    actor: Path | None
    methods: Sequence[MeasuredMethod]
    numbers: Mapping[str, int]
    dry_run: bool
    out: Path


def run_credit_command(argv: Sequence[str], *, console: Console | None = None) -> int:
    """Runs `cepo credit methods=... [config=FILE] [checkpoint=...] ... [a.b.c=value ...]`; see `--help`.

    Returns:
        0, or 2 with a message on standard error if the command, the config, the data or the checkpoint is invalid.
    """

    def work(console: Console) -> None:
        for line in measure(make_credit_plan(argv)):
            console.print(line, soft_wrap=True, highlight=False, markup=False)

    return run_command("credit", _USAGE, argv, console, work)


def make_credit_plan(argv: Sequence[str]) -> CreditPlan:
    """Resolves and checks a command line without loading a model.

    Raises:
        ConfigError, CheckpointError: a file or model does not exist, or a value is out of bounds.
    """
    from cepo.config.checks import check_model_and_data
    from cepo.credit.method_list import read_methods

    own, settings = split_arguments(argv, OWN_KEYS)
    if "data" in own:
        settings.append(f"data.train_files={own['data']}")
    checkpoint = own.get("checkpoint")
    config, actor = config_of_checkpoint(checkpoint, settings, also=("worker.actor",))
    if config.worker.rollout.n < 2:
        raise ConfigError(
            f"worker.rollout.n={config.worker.rollout.n}: responses are compared within groups of at least 2"
        )
    if "methods" not in own:
        raise ConfigError("methods=NAME[,NAME ...] is missing: name the methods to measure")
    check_model_and_data(config.worker.actor.model.model_path, config.data.train_sources)
    name = name_of_results(checkpoint or config.worker.actor.model.model_path)
    return CreditPlan(
        config=config,
        checkpoint=checkpoint,
        actor=actor,
        methods=read_methods(own["methods"], plain_tree(config)["algorithm"]),
        numbers={
            "responses": number_of(own, "responses", 80, least=1),
            "tokens": number_of(own, "tokens", 64, least=1),
            "continuations": number_of(own, "continuations", 32, least=2),
        },
        dry_run=truth(own, "dry_run"),
        out=Path(own.get("out") or f"credit/{name}"),
    )


def measure(plan: CreditPlan) -> list[str]:
    """Measures as planned and writes the results; returns the lines to print.

    Raises:
        ConfigError, DataError, CheckpointError, EngineError, RewardError: a stage failed.
    """
    from cepo.credit.measurement import CreditMeasurement, Effort
    from cepo.credit.session import opened
    from cepo.credit.tables import credit_markdown
    from cepo.hardware.devices import require_usable_torch
    from cepo.microgeo.world import with_embedded_world
    from cepo.tracking.run_folder import write_atomically

    require_usable_torch()
    numbers = plan.numbers
    effort = Effort(
        num_responses=numbers["responses"], num_tokens=numbers["tokens"], num_continuations=numbers["continuations"]
    )
    with opened(with_embedded_world(plan.config), plan.actor) as session:
        measurement = CreditMeasurement(plan.out, session, plan.methods, effort, plan.checkpoint)
        if plan.dry_run:
            return measurement.lines()
        table = credit_markdown(measurement.run())
        write_atomically(plan.out / "credit.md", table)
        return [table, f"written: {plan.out}"]


def number_of(own: Mapping[str, str], name: str, default: int, *, least: int) -> int:
    """Returns a whole number among a command's own arguments, or the default; raises ConfigError below `least`."""
    text = own.get(name, str(default))
    if not text.isdecimal() or int(text) < least:
        raise ConfigError(f"{name}={text}: give a whole number of at least {least}")
    return int(text)
