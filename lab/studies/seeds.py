"""Trains configuration files with several seeds, and compares each with the first of them, seed by seed.

    python3 -m lab.studies.seeds microgeo/NAME ... --seeds 1 2 3 --out checkpoints/seeds KEY=VALUE ...
    python3 -m lab.studies.seeds microgeo/NAME ... --seeds 1 2 3 --results FILE --page lab/notes/toy-results.md KEY=VALUE ...

The settings KEY=VALUE hold for all runs. Interrupted runs are resumed, and finished ones are not trained again. The table
has, for each file, the share of right responses among the training rollouts of all steps and in the last validation: its
mean over seeds with the standard error, the mean paired difference from the first file, and the p of a t test against 0,
adjusted by Holm's method over the files. `--results` writes the figures of each run as JSON, from which `--page` writes the
table into a page, between the marks of `lab.studies.support.marked_tables`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from lab.studies.support.compared_runs import Record, by_name_and_seed, differences_table, figures_of, names_in
from lab.studies.support.marked_tables import write_table
from lab.studies.support.seeded_runs import train_once
from lab.support.machine import ROOT, machine_record

LEARNING = ROOT / "lab" / "studies" / "results" / "learning_microgeo.json"
"""The record of the methods that papers compare with, whose table `lab/notes/toy-results.md` has."""
PROGRAM = "lab.studies.seeds"
"""The name in the marks of the table's place in a page."""


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
            runs.append({"file": file.stem, "seed": seed} | figures_of(folder, trained="reward/correct"))
    written = table_of(runs)
    if options.results is not None:
        record = {
            "files": [str(file) for file in files],
            "settings": settings,
            "machine": machine_record(torch.get_num_threads()),
            "runs": runs,
        }
        options.results.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    if options.page is not None:
        write_table(options.page, written, program=PROGRAM)
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


def table_of(runs: Sequence[Record]) -> str:
    """Returns the table of differences from the file of the first run."""
    files = names_in(runs, "file")
    by_file = by_name_and_seed(runs, kind="file", names=files)
    return differences_table(by_file, kind="file", baseline=files[0])


if __name__ == "__main__":
    sys.exit(main())
