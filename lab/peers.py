"""Compares a training step of this package with one of TRL's GRPOTrainer.

    python -m lab.peers --method NAME

Both have the same model, prompts, lengths, rewards, LoRA and threads. They sample with transformers, each in its own
process, and alternate their steps. Response lengths, which are skewed, and the correct responses are the same on both
sides at every step. The generated and scored tokens of both are counted, and the generated ones must be equal.
`--shape` is one of testing/shapes.py; `--overrides` are settings of this package's side.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from lab.support.machine import load_average, machine_record
from lab.support.paired import Record, Side, check_same_work, paired_ratio, side_by_side, take_turns
from lab.support.tables import RESULTS, save, side_summary, spread, stage_rows, table
from testing.shapes import SHAPES

OURS, THEIRS = "this package", "TRL"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", required=True, help="the estimator that does what TRL's trainer does")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="tiny")
    parser.add_argument("--prompts", type=int, default=4, help="per step")
    parser.add_argument("--steps", type=int, default=7, help="measured steps of each side")
    parser.add_argument("--warm-up", type=int, default=2, help="steps of each side that are dropped")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--micro-batch", type=int, default=None, help="responses per pass; default: all of a step")
    parser.add_argument("--lora-rank", type=int, default=16, help="0: full fine-tuning")
    parser.add_argument("--dead-share", type=float, default=0.0, help="share of prompts with equal rewards")
    parser.add_argument("--gradient-checkpointing", action="store_true")
    parser.add_argument("--overrides", nargs="*", default=[], help="a.b.c=value, of this package's side")
    parser.add_argument("--out", type=Path, default=RESULTS / "peers.json")
    return parser.parse_args()


def work_of(options: argparse.Namespace) -> dict[str, Any]:
    rows = options.prompts * SHAPES[options.shape].group_size
    return {
        "shape": options.shape,
        "prompts": options.prompts,
        "steps": options.warm_up + options.steps,
        "dead_share": options.dead_share,
        "lora_rank": options.lora_rank,
        "micro_batch": options.micro_batch or rows,
        "gradient_checkpointing": options.gradient_checkpointing,
    }


def comparison(records: dict[str, list[Record]]) -> dict[str, Any]:
    """Returns the ratios of TRL's times to this package's: step, generation, and the rest of a step."""

    def pairs(value: Any) -> Any:
        return paired_ratio(*([value(record) for record in records[name]] for name in (THEIRS, OURS)))

    return {
        "step": pairs(lambda record: record["seconds"]),
        "step, processor time": pairs(lambda record: record["processor_seconds"]),
        "generate": pairs(lambda record: record["stages"]["generate"]),
        "everything else": pairs(lambda record: record["seconds"] - record["stages"]["generate"]),
    }


def main() -> int:
    """Measures both sides and writes the record."""
    options = arguments()
    work = work_of(options)
    with tempfile.TemporaryDirectory() as folder:
        told = work | {"folder": folder}
        sides = {
            OURS: Side("lab.support.training", told | {"method": options.method, "overrides": options.overrides}),
            THEIRS: Side("lab.support.trl_training", told),
        }
        with side_by_side(sides, threads=options.threads, folder=Path(folder)) as processes:
            records = take_turns(processes, steps=options.steps, warm_up=options.warm_up)
    check_same_work(records)
    ratios = comparison(records)
    summaries = {name: side_summary(found) for name, found in records.items()}
    record = {
        "machine": machine_record(options.threads) | {"load_average": load_average()},
        "work": work | {"method": options.method, "overrides": options.overrides},
        "sides": summaries,
        "ratios": {name: found.record for name, found in ratios.items()},
    }
    tables = [
        table(["side", "stage", "seconds", "tokens", "GFLOP"], stage_rows(summaries)),
        table(
            ["TRL / this package", "median (quartiles)"], [[name, spread(found, 2)] for name, found in ratios.items()]
        ),
    ]
    save(record, tables, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
