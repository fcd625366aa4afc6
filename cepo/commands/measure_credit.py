"""Implements `cepo credit`: compares methods' credit with Monte-Carlo truth."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.text import Text

from cepo.config import RunConfig
from cepo.config.record import plain_tree
from cepo.config.untrusted_record import TRAINED, VAL_FILES
from cepo.errors import ConfigError
from cepo.terminal.live_view import SafeConsole
from cepo.terminal.progress import log_to_stderr
from cepo.workers.named_checkpoint import config_of_checkpoint, name_of_results

if TYPE_CHECKING:
    from cepo.algorithms import Estimator


@dataclass(frozen=True, kw_only=True)
class CreditPlan:
    """A checked command line."""

    config: RunConfig
    checkpoint: str | None
    actor: Path | None  # the folder of trained weights; None for the model's own
    methods: Mapping[str, Estimator]
    numbers: Mapping[str, int]  # of `responses`, `tokens` and `continuations`
    out: Path


def make_credit_plan(
    *,
    methods: str,
    settings: Sequence[str],
    checkpoint: str | None = None,
    data: str | None = None,
    out: str | None = None,
    **numbers: int,
) -> CreditPlan:
    """Resolves and checks a command line without loading a model; the parameters are the options of `cepo credit`."""
    from cepo.config.path_checks import check_model_and_data
    from cepo.credit.method_list import read_methods
    from cepo.credit.truth import require_measurement_folder

    sources = [] if data is None else [f"data.train_files={data}"]
    config, actor = config_of_checkpoint(checkpoint, [*settings, *sources], also=TRAINED, unread=(VAL_FILES,))
    if config.worker.rollout.n < 2:
        raise ConfigError(
            f"worker.rollout.n={config.worker.rollout.n}: responses are compared within groups of at least 2"
        )
    check_model_and_data(config.worker.actor.model.model_path, config.data.train_sources)
    name = name_of_results(checkpoint or config.worker.actor.model.model_path)
    folder = Path(out or f"credit/{name}")
    require_measurement_folder(folder)
    return CreditPlan(
        config=config,
        checkpoint=checkpoint,
        actor=actor,
        methods=read_methods(methods, plain_tree(config)["algorithm"]),
        numbers=numbers,
        out=folder,
    )


def measure(plan: CreditPlan, *, dry_run: bool = False) -> list[str]:
    """Measures as planned and writes the results, or only counts the work; returns the last lines to print."""
    from cepo.credit.credit_page import PAGE_FILE, credit_headline, credit_tables, write_credit_page
    from cepo.credit.measurement import measured
    from cepo.credit.resources import opened
    from cepo.hardware import require_usable_torch
    from cepo.microgeo.world import with_embedded_world
    from cepo.run_folder.writing import write_atomically

    log_to_stderr()
    start = time.monotonic()
    require_usable_torch()
    with opened(with_embedded_world(plan.config), plan.actor, plan.methods.values()) as session:
        work, results = measured(
            plan.out,
            session,
            plan.methods,
            checkpoint=plan.checkpoint,
            actor=plan.actor,
            dry_run=dry_run,
            **plan.numbers,
        )
        if dry_run:
            return [work, f"time: {time.monotonic() - start:.0f} s"]
        tables = credit_tables(results)
        write_atomically(plan.out / "credit.md", "\n".join(table.markdown() for table in tables))
        page = write_credit_page(results, plan.out / PAGE_FILE)
    console = SafeConsole()
    console.print(Text(credit_headline(results), style="bold"))
    console.print(*(table.terminal(console.width) for table in tables))
    return [f"page: {page}", f"written: {plan.out}", f"time: {time.monotonic() - start:.0f} s"]
