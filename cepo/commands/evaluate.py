"""Implements `cepo evaluate`: measures a model or a checkpoint, and prints the table of its results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cepo.config.untrusted_record import TRAIN_FILES, VAL_FILES
from cepo.evaluation.evaluate import Plan, evaluate, make_plan
from cepo.evaluation.protocols import with_protocol
from cepo.terminal import interrupts
from cepo.terminal.lines import print_plain
from cepo.terminal.live_view import SafeConsole
from cepo.terminal.progress import log_to_stderr
from cepo.workers.named_checkpoint import config_of_checkpoint, name_of_results


def planned(options: Mapping[str, str], settings: Sequence[str]) -> Plan:
    """Resolves and checks a command line without loading a model."""
    checkpoint = options.get("checkpoint")
    # A record's data need not be trusted, or be here, if they are not read.
    unread = (TRAIN_FILES, VAL_FILES) if options.get("data") else (TRAIN_FILES,)
    config, actor = config_of_checkpoint(checkpoint, with_protocol(options, settings), unread=unread)
    return make_plan(options, config, actor, name=name_of_results(checkpoint or config.worker.actor.model.model_path))


def evaluate_planned(plan: Plan) -> int:
    """Evaluates, prints the table of results and returns the exit code: 130 after Ctrl-C, 143 after SIGTERM."""
    from cepo.evaluation.evaluation_page import figure_rows, write_evaluations
    from cepo.evaluation.results import PAGE_FILE
    from cepo.report.score_tables import terminal_table

    log_to_stderr()
    try:
        rows = list(figure_rows(evaluate(plan)))
    except KeyboardInterrupt:
        print_plain("cepo evaluate: interrupted; what was sampled is in generations.jsonl", to_stderr=True)
        return interrupts.exit_code()
    console = SafeConsole()
    title = "accuracy in %, ± standard error over independent problems"
    console.print(title, terminal_table(rows, console.width))
    page = write_evaluations([plan.out], plan.out / PAGE_FILE)
    print_plain(f"page: {page}\nwritten: {plan.out}")
    return 0
