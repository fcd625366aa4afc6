"""Trains configuration files with several seeds, and compares each with the first of them, seed by seed.

    python3 -m research.seeds microgeo/NAME ... --seeds 1 2 3 --out checkpoints/seeds KEY=VALUE ...

The settings KEY=VALUE hold for all runs. Interrupted runs are resumed, and finished ones are not trained again. The table
has, for each file, the share of right responses among the training rollouts of all steps and in the last validation: its
mean over seeds, and the mean difference from the first file with its standard error.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

from cepo.report.recorded_run import load_run
from lab.support.tables import table
from research.support.seeded_runs import train_once
from research.support.study_statistics import cell

TRAINING = "reward/correct"
VALIDATION = "val/accuracy"


@dataclass(frozen=True)
class Outcome:
    """The shares of right responses of one run: of its training rollouts, and of its last validation."""

    training: float
    validation: float


def main(argv: list[str] | None = None) -> int:
    """Trains what is not trained yet, and prints the table; returns the exit code of a run that failed."""
    options = arguments(argv)
    settings = [word for word in options.words if "=" in word]
    files = [Path(word) for word in options.words if "=" not in word]
    outcomes: dict[str, list[Outcome]] = {file.stem: [] for file in files}
    for seed in options.seeds:
        for file in files:
            folder = options.out / f"{file.stem}-s{seed}"
            exit_code = train_once([f"config={file}", *settings], seed=seed, folder=folder)
            if exit_code:
                print(f"{folder} failed with exit code {exit_code}")
                return exit_code
            outcomes[file.stem].append(_outcome(folder))
    print(differences_table(outcomes))
    return 0


def arguments(argv: list[str] | None) -> argparse.Namespace:
    """Parses the command line; files and settings may stand before and after the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="+", help="configuration files, the one to compare with first, and KEY=VALUE")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--out", type=Path, default=Path("checkpoints/seeds"))
    return parser.parse_intermixed_args(argv)


def _outcome(folder: Path) -> Outcome:
    run = load_run(folder)
    _, training = run.series(TRAINING)
    _, validations = run.series(VALIDATION)
    return Outcome(training=statistics.fmean(training), validation=validations[-1])


def differences_table(outcomes: dict[str, list[Outcome]]) -> str:
    """Returns a Markdown table in percent; errors are those of the mean difference over seeds."""
    baseline = next(iter(outcomes.values()))
    rows: list[list[str]] = []
    for name, of_seeds in outcomes.items():
        row = [name]
        for measure in ("training", "validation"):
            values = [getattr(outcome, measure) for outcome in of_seeds]
            others = [getattr(outcome, measure) for outcome in baseline]
            differences = [value - other for value, other in zip(values, others, strict=True)]
            row += [f"{100 * statistics.fmean(values):.1f}", cell(differences, signed=True)]
        rows.append(row)
    return table(["file", "training", "difference", "validation", "difference"], rows)


if __name__ == "__main__":
    sys.exit(main())
