"""Implements `cepo report` and `cepo compare`."""

from __future__ import annotations

import argparse
import os
import sys
import time
import webbrowser
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from cepo.commands.exit_codes import guarded
from cepo.errors import ConfigError
from cepo.terminal import SafeConsole

_PLUGIN_HELP = "Python file that registers further methods, needed to show their credit; may be given several times"
_SECONDS_BETWEEN_LOOKS = 2.0
_FIGURES = (".png", ".pdf", ".svg")


def run_report_command(argv: Sequence[str], *, console: Console | None = None) -> int:
    """Runs `cepo report RUN [--out FILE] [--png FILE] [--pdf FILE] [--plugin FILE] [--open] [--watch]`.

    Returns:
        0, or 2 with a message on standard error if the run cannot be read or a file cannot be written.
    """
    parser = argparse.ArgumentParser(
        prog="cepo report", description="Prints the summary of a run and writes its report as an HTML page."
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="run folder (it has metrics.jsonl)")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="page to write; default: report.html in the run folder"
    )
    parser.add_argument("--png", type=Path, metavar="FILE", help="also save the curves as a PNG file")
    parser.add_argument("--pdf", type=Path, metavar="FILE", help="also save the curves as a PDF file")
    parser.add_argument("--open", action="store_true", help="open the page if there is a display")
    parser.add_argument("--plugin", type=Path, action="append", default=[], metavar="FILE", help=_PLUGIN_HELP)
    parser.add_argument("--watch", action="store_true", help="update the page while the run continues, until Ctrl-C")
    return guarded(parser, argv, lambda arguments: _report(arguments, console or SafeConsole()))


def run_compare_command(argv: Sequence[str], *, console: Console | None = None) -> int:
    """Runs `cepo compare RUN... [--out FILE ...]`, which compares runs by their settings, or evaluations.

    Returns:
        0, or 2 with a message on standard error if a run cannot be read or a file cannot be written.
    """
    parser = argparse.ArgumentParser(
        prog="cepo compare",
        description="Compares runs (those that differ only in seeds are repeats), or evaluations and published tables.",
    )
    parser.add_argument(
        "runs",
        nargs="+",
        metavar="RUN",
        help="run folders; or folders of cepo evaluate and tables in JSON",
    )
    parser.add_argument(
        "--out",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="write the table (.md .tex .csv .json), page (.html) or curves (.png .pdf .svg); may be given several times",
    )
    return guarded(parser, argv, lambda arguments: _compare(arguments, console or SafeConsole()))


def _report(arguments: argparse.Namespace, console: Console) -> None:
    from cepo.algorithms import load_plugin
    from cepo.report.page import save_curves, write_report
    from cepo.report.summary import run_summary

    for plugin in arguments.plugin:
        load_plugin(plugin)
    console.print(run_summary(arguments.run))
    path = write_report(arguments.run, arguments.out)
    drawn = [save_curves(arguments.run, file) for file in (arguments.png, arguments.pdf) if file is not None]
    for name, written in [*(("curves", file) for file in drawn), ("page", path)]:
        console.print(f"{name}: {written}", soft_wrap=True, highlight=False, markup=False)
    if arguments.open and (sys.platform != "linux" or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
        webbrowser.open(path.resolve().as_uri())
    if arguments.watch:
        _watch(arguments, console)


def _watch(arguments: argparse.Namespace, console: Console) -> None:
    from cepo.report.page import write_report
    from cepo.tracking.run_folder import METRICS_FILE, read_metrics

    metrics, seen = arguments.run / METRICS_FILE, None
    try:
        while True:
            now = metrics.stat().st_mtime_ns
            if now != seen:
                path = write_report(arguments.run, arguments.out)
                step = max((row.step for row in read_metrics(arguments.run)), default=0)
                console.print(f"page after step {step}: {path}", soft_wrap=True, highlight=False, markup=False)
                seen = now
            time.sleep(_SECONDS_BETWEEN_LOOKS)
    except KeyboardInterrupt:
        return


def _compare(arguments: argparse.Namespace, console: Console) -> None:
    from cepo.evaluation.page import write_evaluations
    from cepo.evaluation.published import is_scored, score_table
    from cepo.report.compare import compare_runs, plot_comparison, write_comparison
    from cepo.report.score_tables import TABLE_FORMATS, terminal_blocks, write_table

    comparison, of_tables = None, all(map(is_scored, arguments.runs))
    accepted = (*TABLE_FORMATS, ".html", *(() if of_tables else _FIGURES))
    for path in arguments.out:
        if path.suffix not in accepted:
            raise ConfigError(f"--out {path}: the ending must be one of {', '.join(accepted)}")
    if of_tables:
        table = score_table(arguments.runs)
    else:
        comparison = compare_runs([Path(run) for run in arguments.runs])
        table = comparison.table()
    console.print(table.terminal(console.width))
    if comparison is not None and comparison.differing:
        console.print(*terminal_blocks(comparison.settings_table(), console.width))
    for path in arguments.out:
        if path.suffix == ".html" and comparison is None:
            write_evaluations([Path(name) for name in arguments.runs], path)
        elif comparison is not None and path.suffix == ".html":
            write_comparison(comparison, path)
        elif comparison is not None and path.suffix in _FIGURES:
            plot_comparison(comparison, path)
        else:
            write_table(table, path)
        console.print(f"written: {path}", soft_wrap=True, highlight=False, markup=False)
