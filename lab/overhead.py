"""Measures what teachers cost in training, by comparing steps of a method that has teachers with one that has none.

    python -m lab.overhead --with NAME --without NAME

The method with teachers is measured while it uses them (active steps) and after its schedule has ended (inactive
steps). Each step, rollout included but without validation, is paired with one of the method without teachers on the
same problems, lengths and rewards. The overhead of a schedule of `--schedule` steps follows from the two medians and
the number of active steps, which the method itself provides.

A third run is the method without teachers on the plain path: padded rows, nothing shared (`--plain-overrides`), all
rows scored before the update, and no prompts with equal rewards, so that nothing is skipped. The cost of a step with
teachers relative to it is reported too.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from lab.support.machine import load_average, machine_record
from lab.support.paired import Record, Side, Summary, paired_ratio, side_by_side, take_turns
from lab.support.tables import RESULTS, save, side_summary, spread, stage_rows, table
from testing.shapes import SHAPES

WITH, WITHOUT, PLAIN = "with teachers", "without", "without, plain path"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--with", dest="with_teachers", required=True, help="estimator whose schedule ends")
    parser.add_argument("--without", required=True, help="estimator without teachers")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="small")
    parser.add_argument("--prompts", type=int, default=3, help="per step")
    parser.add_argument("--pairs", type=int, default=5, help="active and as many inactive pairs of steps")
    parser.add_argument("--warm-up", type=int, default=1, help="first steps that are dropped")
    parser.add_argument("--schedule", type=int, default=50, help="steps of the schedule the figure is for")
    parser.add_argument("--decay", type=int, default=25, help="steps over which its weight of evidence falls to 0")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--micro-batch", type=int, default=8, help="responses per pass")
    parser.add_argument("--lora-rank", type=int, default=16, help="0: full fine-tuning")
    parser.add_argument("--dead-share", type=float, default=0.34, help="share of prompts with equal rewards")
    parser.add_argument("--gradient-checkpointing", action="store_true")
    parser.add_argument("--overrides", nargs="*", default=[], help="a.b.c=value, of both optimised sides")
    parser.add_argument(
        "--plain-overrides", nargs="*", default=["worker.actor.padding_free=false"], help="of the plain side"
    )
    parser.add_argument("--no-plain", action="store_true", help="leave the plain side out")
    parser.add_argument("--out", type=Path, default=RESULTS / "overhead.json")
    return parser.parse_args()


def sides_of(options: argparse.Namespace, folder: str) -> dict[str, Side]:
    """Returns the settings of each process, with a shorter schedule, so that half of the measured steps are active."""
    shared = {
        "folder": folder,
        "shape": options.shape,
        "prompts": options.prompts,
        "steps": options.warm_up + 2 * options.pairs,
        "dead_share": options.dead_share,
        "lora_rank": options.lora_rank,
        "micro_batch": options.micro_batch,
        "gradient_checkpointing": options.gradient_checkpointing,
    }
    decay = f"algorithm.weight.lambda_decay_steps={options.warm_up + options.pairs}"
    module, without = "lab.support.training", {"method": options.without}
    told = {
        WITH: shared | {"method": options.with_teachers, "overrides": [decay, *options.overrides]},
        WITHOUT: shared | without | {"overrides": options.overrides, "run": "without"},
    }
    if not options.no_plain:
        told[PLAIN] = (
            shared
            | without
            | {"overrides": options.plain_overrides, "dead_share": 0.0, "score_all": True, "run": "plain"}
        )
    return {name: Side(module, what) for name, what in told.items()}


def num_active_steps(options: argparse.Namespace) -> int:
    """Returns the number of steps of the full schedule in which the method uses its teachers."""
    from cepo.algorithms import build_estimator

    estimator = build_estimator(options.with_teachers, {"weight": {"lambda_decay_steps": options.decay}})
    return sum(estimator.needs_teacher(step=step) for step in range(options.schedule))


def ratio(records: dict[str, list[Record]], denominator: str, *, active: bool, key: str = "seconds") -> Summary:
    """Returns the ratio over the pairs whose step with teachers was active, or over the inactive ones."""
    pairs = [
        (with_teachers[key], other[key])
        for with_teachers, other in zip(records[WITH], records[denominator], strict=True)
        if with_teachers["active"] == active
    ]
    assert pairs, f"no step was {'active' if active else 'inactive'}"
    return paired_ratio([upper for upper, _ in pairs], [lower for _, lower in pairs])


def figures(records: dict[str, list[Record]], *, active_steps: int, schedule: int) -> dict[str, Any]:
    """Returns the ratios of active and inactive steps, and of the whole schedule."""
    found: dict[str, Any] = {}
    for key, name in (("seconds", "wall"), ("processor_seconds", "processor")):
        active, inactive = (ratio(records, WITHOUT, active=state, key=key) for state in (True, False))
        share = active_steps / schedule
        found[name] = {
            "active": active.record,
            "inactive": inactive.record,
            # An inactive step does the same work as one without teachers, so its ratio is noise. The mean includes it.
            "schedule": share * active.median + (1 - share) * inactive.median,
            "schedule_if_inactive_steps_are_equal": share * active.median + (1 - share),
        }
        if PLAIN in records:
            found[name]["active_over_plain"] = ratio(records, PLAIN, active=True, key=key).record
    return found


def main() -> int:
    """Measures all sides and writes the record."""
    options = arguments()
    with tempfile.TemporaryDirectory() as folder:
        sides = sides_of(options, folder)
        with side_by_side(sides, threads=options.threads, folder=Path(folder)) as processes:
            records = take_turns(processes, steps=2 * options.pairs, warm_up=options.warm_up)
    active_steps = num_active_steps(options)
    found = figures(records, active_steps=active_steps, schedule=options.schedule)
    parted = {f"{WITH}, active": [record for record in records[WITH] if record["active"]]}
    parted[f"{WITH}, inactive"] = [record for record in records[WITH] if not record["active"]]
    parted |= {name: those for name, those in records.items() if name != WITH}
    summaries = {name: side_summary(those) for name, those in parted.items()}
    told = {name: what for name, what in vars(options).items() if name != "out"}
    record = {
        "machine": machine_record(options.threads) | {"load_average": load_average()},
        "work": told | {"active_steps_of_the_schedule": active_steps},
        "sides": summaries,
        "ratios": found,
    }
    rows = []
    for clock, values in found.items():
        for name, value in values.items():
            rows.append(
                [clock, name.replace("_", " "), spread(Summary(**value)) if isinstance(value, dict) else f"{value:.3f}"]
            )
    stages = table(["side", "stage", "seconds", "tokens", "GFLOP"], stage_rows(summaries))
    save(record, [stages, table(["clock", "with teachers / without", "ratio"], rows)], options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
