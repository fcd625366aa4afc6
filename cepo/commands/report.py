"""Implements `cepo report` and `cepo compare`."""

from __future__ import annotations

import os
import sys
import webbrowser
from collections.abc import Sequence
from pathlib import Path

from cepo.commands.following import follow
from cepo.errors import ConfigError
from cepo.run_folder.layout import run_folder_of
from cepo.terminal.lines import print_plain
from cepo.terminal.live_view import SafeConsole
from cepo.terminal.progress import log_to_stderr, phase

_FIGURES = (".png", ".pdf", ".svg")


def write_report_of_run(
    run: Path,
    *,
    out: Path | None = None,
    figures: Sequence[Path] = (),
    plugins: Sequence[Path] = (),
    show: bool = False,
    watch: bool = False,
) -> None:
    """Prints the summary of a run and writes its page; the parameters are the options of `cepo report`."""
    from cepo.algorithms import load_plugin
    from cepo.report.findings import diagnosed_run, findings_lines
    from cepo.report.page import save_curves, write_report
    from cepo.report.recorded_run import load_run
    from cepo.report.summary import run_summary

    run = run_folder_of(run)
    for plugin in plugins:
        load_plugin(plugin)
    log_to_stderr()
    with phase("reading the run and drawing its page", is_brief=True):
        summary = run_summary(run)
        path = write_report(run, out)
    SafeConsole().print(summary)
    recorded = load_run(run)
    lines = list(findings_lines(diagnosed_run(recorded))) if recorded.last_step > 0 else []
    lines += [f"curves: {save_curves(run, file)}" for file in figures]
    lines.append(f"page: {path}")
    print_plain("\n".join(lines))
    has_display = sys.platform != "linux" or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    if show and has_display:
        webbrowser.open(path.resolve().as_uri())
    if watch:
        _watch(run, out)


def _watch(run: Path, out: Path | None) -> None:
    from cepo.report.page import write_report
    from cepo.run_folder.layout import METRICS_FILE
    from cepo.run_folder.records import read_metrics

    def written() -> list[str]:
        path = write_report(run, out)
        step = max((row.step for row in read_metrics(run)), default=0)
        return [f"page after step {step}: {path}"]

    metrics = run / METRICS_FILE
    follow(lambda: metrics.stat().st_mtime_ns, written)


def compare_runs_or_tables(runs: Sequence[str], out: Sequence[Path]) -> None:
    """Prints the comparison of runs, or of evaluations and published tables, and writes it to the files `out`."""
    from cepo.evaluation.comparison import is_scored, score_table
    from cepo.evaluation.evaluation_page import write_evaluations
    from cepo.report.compare import compare_runs, write_comparison
    from cepo.report.drawing import save_figure
    from cepo.report.score_tables import TABLE_FORMATS, write_table

    folders = [run_folder_of(Path(run)) for run in runs]
    for run, folder in zip(runs, folders, strict=True):
        if folders.count(folder) > 1:
            raise ConfigError(f"{run} is named twice; a run compared with itself has no difference and no spread")
    scored = [run for run in runs if is_scored(run)]  # evaluations and tables, which have no curves
    are_scored = len(scored) == len(runs)
    if scored and not are_scored:
        raise ConfigError(
            f"{scored[0]} is an evaluation or a table, and {next(run for run in runs if run not in scored)} a run; compare "
            "runs with one another, or their checkpoints after cepo evaluate"
        )
    endings = [*TABLE_FORMATS, ".html"]
    if not are_scored:
        endings += _FIGURES
    for path in out:
        if path.suffix not in endings:
            raise ConfigError(f"--out {path}: the ending must be one of {', '.join(endings)}")
    log_to_stderr()
    with phase("reading and comparing", is_brief=True):
        comparison = None if are_scored else compare_runs(folders)
        table = score_table(runs) if comparison is None else comparison.table()
    console = SafeConsole()
    if comparison is None:
        console.print(table.terminal(console.width))
    else:
        console.print(comparison.terminal(console.width))
    for path in out:
        if path.suffix in TABLE_FORMATS:
            write_table(table, path)
        elif comparison is None:
            write_evaluations(folders, path)
        elif path.suffix == ".html":
            write_comparison(comparison, path)
        else:
            save_figure(comparison.charts(), path)
        print_plain(f"written: {path}")
