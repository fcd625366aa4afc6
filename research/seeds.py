"""Trains configuration files with several seeds, and compares each with the first of them, seed by seed.

    python3 -m research.seeds microgeo/NAME ... --seeds 1 2 3 --out checkpoints/seeds KEY=VALUE ...
    python3 -m research.seeds microgeo/NAME ... --seeds 1 2 3 --results FILE --page docs/results.md KEY=VALUE ...

The settings KEY=VALUE hold for all runs. Interrupted runs are resumed, and finished ones are not trained again. The table
has, for each file, the share of right responses among the training rollouts of all steps and in the last validation: its
mean over seeds with the standard error, the mean paired difference from the first file, and the p of a t test against 0,
adjusted by Holm's method over the files. `--results` writes the figures of each run as JSON, from which `--page` writes the
table into a page, between the marks of `MARKS`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from cepo.report.recorded_run import load_run
from lab.support.machine import ROOT, machine_record
from lab.support.tables import table
from research.support.seeded_runs import train_once
from research.support.study_statistics import adjusted_cells, cell, paired

LEARNING = ROOT / "research" / "results" / "learning_microgeo.json"
"""The record of the methods that papers compare with, whose table `docs/results.md` has."""
MARKS = ("<!-- table of research.seeds -->\n", "<!-- end of the table -->\n")
"""What stands before and after the table in a page."""
NOT_RUN = "Not run yet.\n"
"""What stands between the marks before there is a record."""
TRAINING = "reward/correct"
VALIDATION = "val/accuracy"
Record = dict[str, Any]


def main(argv: list[str] | None = None) -> int:
    """Trains what is not trained yet, and prints the table; returns the exit code of a run that failed."""
    options = arguments(argv)
    settings = [word for word in options.words if "=" in word]
    files = [Path(word) for word in options.words if "=" not in word]
    runs: list[Record] = []
    for seed in options.seeds:
        for file in files:
            folder = options.out / f"{file.stem}-s{seed}"
            exit_code = train_once([f"config={file}", *settings], seed=seed, folder=folder)
            if exit_code:
                print(f"{folder} failed with exit code {exit_code}")
                return exit_code
            runs.append(record_of(folder, file=file.stem, seed=seed))
    written = differences_table(runs)
    if options.results is not None:
        record = {
            "files": [str(file) for file in files],
            "settings": settings,
            "machine": machine_record(torch.get_num_threads()),
            "runs": runs,
        }
        options.results.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    if options.page is not None:
        page = options.page.read_text(encoding="utf-8")
        options.page.write_text(with_table(page, written), encoding="utf-8")
    print(written)
    return 0


def arguments(argv: list[str] | None) -> argparse.Namespace:
    """Parses the command line; files and settings may stand before and after the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="+", help="configuration files, the one to compare with first, and KEY=VALUE")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--out", type=Path, default=Path("checkpoints/seeds"))
    parser.add_argument("--results", type=Path, help="JSON file to write")
    parser.add_argument("--page", type=Path, help="Markdown page with the marks, in which the table is written")
    return parser.parse_intermixed_args(argv)


def record_of(folder: Path, *, file: str, seed: int) -> Record:
    """Returns the shares of right responses of a run: of each step's rollouts, and of each validation by step."""
    run = load_run(folder)
    _, trained = run.series(TRAINING)
    _, step_seconds = run.series("timing_s/step")
    held_out: dict[str, float] = {}
    for step, value in run.values_by_step(VALIDATION).items():
        held_out[str(step)] = round(value, 5)
    return {
        "file": file,
        "seed": seed,
        "trained": [round(value, 5) for value in trained],
        "held_out": held_out,
        "step_seconds": [round(value, 2) for value in step_seconds],
    }


def rollout_accuracy(record: Record) -> float:
    """Returns the share of right responses among the training rollouts of all steps."""
    return statistics.fmean(record["trained"])


def held_out_accuracy(record: Record) -> float:
    """Returns the share of right responses in the last validation."""
    last_step = max(record["held_out"], key=int)
    return record["held_out"][last_step]


def differences_table(runs: Sequence[Record]) -> str:
    """Returns a Markdown table in percent, of the files in the order of their first run."""
    by_file: dict[str, dict[int, Record]] = {}
    for record in runs:
        by_file.setdefault(record["file"], {})[record["seed"]] = record
    baseline, *others = by_file
    rows = [[file, str(len(of_seeds))] for file, of_seeds in by_file.items()]
    head = ["file", "seeds"]
    for title, measure in (("rollouts %", rollout_accuracy), ("held out %", held_out_accuracy)):
        head += [title, f"minus {baseline}", "p, Holm"]
        differences = {file: paired(by_file[baseline], by_file[file], measure) for file in others}
        for row, cells in zip(rows, _cells(by_file, differences, measure), strict=True):
            row += cells
    return table(head, rows)


def _cells(
    by_file: Mapping[str, Mapping[int, Record]],
    differences: Mapping[str, Sequence[float]],
    measure: Callable[[Record], float],
) -> list[list[str]]:
    """Returns for each file the mean of one measure, its difference from the first file, and the adjusted p."""
    p_of_file = adjusted_cells(differences)
    rows: list[list[str]] = []
    for file, of_seeds in by_file.items():
        mean = cell([measure(record) for record in of_seeds.values()])
        if file in differences:
            rows.append([mean, cell(differences[file], signed=True), p_of_file[file]])
        else:
            rows.append([mean, "", ""])
    return rows


def with_table(page: str, written: str) -> str:
    """Returns the page with the table between its marks; raises `ValueError` if it lacks them."""
    before, start, rest = page.partition(MARKS[0])
    _, end, after = rest.partition(MARKS[1])
    if not start or not end:
        raise ValueError(f"the page lacks the marks {MARKS[0].strip()} and {MARKS[1].strip()} around the table")
    return f"{before}{start}\n{written.strip()}\n\n{end}{after}"


if __name__ == "__main__":
    sys.exit(main())
