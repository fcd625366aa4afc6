"""Implements `cepo report` and `cepo compare`."""

from __future__ import annotations

import argparse
import os
import sys
import webbrowser
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

from cepo.errors import CepoError

_USAGE_ERROR = 2
_PLUGIN_HELP = "Python file that registers further methods, for the credit view"


def run_report_command(argv: Sequence[str], *, console: Console | None = None) -> int:
    """`cepo report RUN [--out FILE] [--png FILE] [--pdf FILE] [--plugin FILE] [--open]`: summary and page of a run.

    Returns:
        0, or 2 with a message on standard error if the run cannot be read or a file cannot be written.
    """
    parser = argparse.ArgumentParser(prog="cepo report", description="Summary table and page of one run.")
    parser.add_argument("run", type=Path, metavar="RUN", help="run folder, the one with metrics.jsonl")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="page to write; default: report.html in the run folder"
    )
    parser.add_argument("--png", type=Path, metavar="FILE", help="also draw the curves into a PNG file")
    parser.add_argument("--pdf", type=Path, metavar="FILE", help="also draw the curves into a PDF file")
    parser.add_argument("--open", action="store_true", help="open the page where a display exists")
    parser.add_argument("--plugin", type=Path, action="append", default=[], metavar="FILE", help=_PLUGIN_HELP)
    return guarded(parser, argv, lambda arguments: _report(arguments, console or Console()))


def run_compare_command(argv: Sequence[str], *, console: Console | None = None) -> int:
    """`cepo compare RUN... [--out FILE.md] [--plot FILE.png]`: groups runs by method and shows their spread.

    Returns:
        0, or 2 with a message on standard error if a run cannot be read or a file cannot be written.
    """
    parser = argparse.ArgumentParser(prog="cepo compare", description="Runs grouped by method, with their spread.")
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="run folders; runs of one method are repeats")
    parser.add_argument("--out", type=Path, metavar="FILE.md", help="write the table as Markdown")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw mean curves with bands")
    return guarded(parser, argv, lambda arguments: _compare(arguments, console or Console()))


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


def _compare(arguments: argparse.Namespace, console: Console) -> None:
    from cepo.report.compare import compare_runs, plot_comparison
    from cepo.tracking.run_folder import write_atomically

    comparison = compare_runs(arguments.runs)
    console.print(comparison.table())
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(arguments.out, comparison.markdown())
    if arguments.plot is not None:
        plot_comparison(comparison, arguments.plot)
    for path in filter(None, (arguments.out, arguments.plot)):
        console.print(f"written: {path}", soft_wrap=True, highlight=False, markup=False)


def guarded(parser: argparse.ArgumentParser, argv: Sequence[str], command: Callable[[argparse.Namespace], None]) -> int:
    """Runs a command; a bad command line or an unreadable run ends in a message and exit code 2."""
    try:
        arguments = parser.parse_args(argv)
    except SystemExit as stop:  # argparse has printed its message, or the help
        return int(stop.code or 0)
    try:
        command(arguments)
    except (CepoError, OSError) as error:
        message = f"{parser.prog}: {error}"
        Console(stderr=True).print(message, soft_wrap=True, highlight=False, markup=False)
        return _USAGE_ERROR
    return 0
