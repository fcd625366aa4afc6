"""Measures signal, noise and direction of each method's gradient over batches of rollouts.

    python3 -m lab.studies.gradient methods=NAME[,NAME(setting=value, ...) ...] [batches=30] [projections=0] \\
        [config=FILE] [checkpoint=FOLDER|MODEL] [data=SOURCE] [out=FOLDER] [dry_run=true] [a.b.c=value ...]

batches: number of batches of data.rollout_batch_size prompts with worker.rollout.n responses each. projections: numbers
that each gradient is projected to, if exact gradients would fill the disk; 0: exact ones. All other arguments are those
of `cepo credit`; an interrupted measurement goes on in its folder.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from cepo.commands.cli import Command, cli
from cepo.commands.cli import main as run_command
from cepo.terminal.lines import print_plain


def measure(batches: int, projections: int, dry_run: bool, **options: Any) -> None:
    """Measures, writes the results and prints them; `options` are those of `cepo credit`."""
    from cepo.commands.measure_credit import make_credit_plan
    from cepo.credit.resources import opened
    from cepo.hardware import require_usable_torch
    from cepo.microgeo.world import with_embedded_world
    from cepo.run_folder.writing import write_atomically
    from cepo.terminal.progress import log_to_stderr
    from lab.studies.gradient.measurement import GradientMeasurement

    log_to_stderr()
    plan = make_credit_plan(**options)
    out = Path(f"{plan.out}-gradient") if options["out"] is None else plan.out
    require_usable_torch()
    with opened(with_embedded_world(plan.config), plan.actor, plan.methods.values()) as session:
        measurement = GradientMeasurement(
            out, session, plan.methods, num_batches=batches, dimensions=projections, checkpoint=plan.checkpoint
        )
        if dry_run:
            print_plain("\n".join(measurement.lines()))
            return
        table = gradient_markdown(measurement.run())
        write_atomically(out / "gradient.md", table)
    print_plain(f"{table}\nwritten: {out}")


COMMAND = Command(
    "gradient",
    callback=measure,
    help=__doc__,
    params=[
        *cli.commands["credit"].params,
        click.Option(["--batches"], type=click.IntRange(2), default=30),
        click.Option(["--projections"], type=click.IntRange(0), default=0),
    ],
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns 0, or 2 with a message if the arguments, the data or the checkpoint is invalid."""
    return run_command(arguments, COMMAND, "python3 -m lab.studies.gradient")


def gradient_markdown(results: Mapping[str, Any]) -> str:
    """Returns the table of the methods' gradients, with 95 % intervals."""
    counts = results["counts"]
    lines = [
        f"{counts['batches']} batches of {counts['prompts']} prompts with {counts['responses']} responses, gradients in "
        f"{counts['weights']:,} weights."
    ]
    if counts["projections"]:
        lines.append(
            f"Each was projected to {counts['projections']:,} numbers, which changed squared lengths by at most "
            f"{counts['largest_length_error']:.1%}."
        )
    first = results["gradient"][0]["name"]
    lines += [
        "",
        f"| method | signal / noise | ratio to {first} | 95 % | direction | 95 % | length |",
        "| --- |" + " --- |" * 6,
    ]
    for row in results["gradient"]:
        ratio, direction = row["ratio"], row["direction"]
        cells = [row["name"], _plain(row["snr"]), _plain(ratio, 2), _interval(ratio, 2), _plain(direction)]
        lines.append(f"| {' | '.join([*cells, _interval(direction), _plain(row['length'], 2)])} |")
    return "\n".join(lines) + "\n"


def _plain(figure: Mapping[str, float | None], digits: int = 3) -> str:
    return "-" if figure["value"] is None else f"{figure['value']:.{digits}f}"


def _interval(figure: Mapping[str, float | None], digits: int = 3) -> str:
    return "-" if figure["low"] is None else f"{figure['low']:.{digits}f} to {figure['high']:.{digits}f}"


if __name__ == "__main__":
    sys.exit(main())
