"""Measures training steps at the size of SmolLM2-135M by stage, and each stage's share of the processor's speed.

    python -m lab.real_step                        # the default method, cepo, and TRL's GRPOTrainer
    python -m lab.real_step --before FOLDER        # also both methods of another checkout

All sides do the work of one step of `configs/real_model`: 16 prompts of 53 tokens, 8 responses of 28 to 40 tokens to each,
LoRA of rank 16, float32. They alternate their steps, each in a process of its own, and generate equally many tokens. The
weights are random, because the time does not depend on them.

A stage's operations are those of matrix products that are computed: a prompt once for all its responses, and scored
contexts as they share their tokens. The processor's speed is that of one large product, measured before and after.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cepo.algorithms.settings import DEFAULT_ESTIMATOR
from cepo.config import load_config
from lab.support.machine import load_average, machine_record
from lab.support.model_flops import ModelFlops
from lab.support.paired import Record, Side, Summary, check_same_work, paired_ratio, side_by_side, take_turns
from lab.support.profiling import GIGA, product_speed
from lab.support.tables import RESULTS, save, side_summary, spread, table
from testing.shapes import SMOLLM2_135M

SHAPE = SMOLLM2_135M
LORA_RANK = 16
PLAIN = DEFAULT_ESTIMATOR
OURS = (PLAIN, "cepo")
TRL = f"TRL's {PLAIN}"
BEFORE = ", before"
PASS_SIZES = ("micro_batch_size_per_device_for_update", "micro_batch_size_per_device_for_experience")
PRODUCT_TOKENS = 1024


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=16, help="per step")
    parser.add_argument("--steps", type=int, default=3, help="measured steps of each side")
    parser.add_argument("--warm-up", type=int, default=1, help="steps of each side that are dropped")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--trl-micro-batch", type=int, default=16, help="responses in a pass of TRL's update")
    parser.add_argument("--before", type=Path, help="another checkout, with this one's lab/support")
    parser.add_argument("--no-trl", action="store_true", help="leave TRL out")
    parser.add_argument("--out", type=Path, default=RESULTS / "real_step.json")
    return parser.parse_args()


def sides_of(options: argparse.Namespace, folder: str) -> dict[str, Side]:
    """Returns each side's program, options and checkout."""
    work = {
        "folder": folder,
        "shape": SHAPE.name,
        "prompts": options.prompts,
        "steps": options.warm_up + options.steps,
        "dead_share": 0.25,
        "lora_rank": LORA_RANK,
        "micro_batch": options.trl_micro_batch,
    }
    actor = load_config([f"config=real_model/{PLAIN}"]).worker.actor
    passes = [f"worker.actor.{name}={getattr(actor, name)}" for name in PASS_SIZES]
    sides: dict[str, Side] = {}
    for method in OURS:
        own_work = work | {"method": method, "overrides": passes}
        sides[method] = Side("lab.support.training", own_work | {"run": method})
        if options.before is not None:
            run = own_work | {"run": f"{method}-before"}
            sides[method + BEFORE] = Side("lab.support.training", run, root=options.before.absolute())
    if not options.no_trl:
        sides[TRL] = Side("lab.support.trl_training", work)
    return sides


def computed_flops(records: Mapping[str, Sequence[Record]], side: str) -> dict[str, float]:
    """Returns the operations of one of our sides by stage, means over its steps.

    A pass's computed tokens are counted in the run. GRPO's are those of the update alone, and CEPO has the same update, so
    that the rest of its tokens are the teachers'.
    """
    costs = ModelFlops(SHAPE, LORA_RANK)
    linear = costs.token + costs.adapter_token
    means = side_summary(records[side])
    checkout = BEFORE if side.endswith(BEFORE) else ""
    update = side_summary(records[PLAIN + checkout])
    update_tokens = update["counts"]["work/tokens_computed"]
    update_responses = update["counts"]["live_rows"] * _mean_length(update)
    # Forward and backward: frozen weights have no gradient of their own, adapters have.
    flops = {
        "generate": means["flops"]["generate"],
        "update": update_tokens * (2 * costs.token + 3 * costs.adapter_token) + update_responses * 2 * costs.head,
    }
    teacher_rows = means["counts"]["teacher_rows"]
    if teacher_rows:
        scored_tokens = means["counts"]["work/tokens_computed"] - update_tokens
        flops["score"] = scored_tokens * linear + teacher_rows * _mean_length(means) * costs.head
    return flops


def _mean_length(summary: Mapping[str, Any]) -> float:
    return summary["tokens"]["generate"] / summary["counts"]["responses"]


@dataclass(frozen=True, kw_only=True)
class Speeds:
    """GFLOP/s of one large product by the library that this package uses here, and by the one that PyTorch uses."""

    ours: float
    pytorch: float


def product_speeds(threads: int) -> Speeds:
    """Measures the product of `PRODUCT_TOKENS` tokens with `threads` threads."""
    import torch
    from torch.nn import functional

    torch.set_num_threads(threads)
    ours = product_speed(SHAPE, PRODUCT_TOKENS, device="cpu", dtype="float32")
    pytorch = product_speed(SHAPE, PRODUCT_TOKENS, device="cpu", dtype="float32", compute=functional.linear)
    return Speeds(ours=ours["gflops_per_second"], pytorch=pytorch["gflops_per_second"])


def stage_table(records: Mapping[str, Sequence[Record]], speeds: Speeds) -> str:
    """Formats seconds, operations and share of the processor's speed for each stage of our sides, and TRL's seconds."""
    lines: list[list[str]] = []
    for side, own_records in records.items():
        summary = side_summary(own_records)
        flops = {} if side == TRL else computed_flops(records, side)
        for stage in ("generate", "score", "update"):
            seconds = summary["stage_seconds"].get(stage, 0.0)
            if seconds == 0:
                continue
            line = [side, stage, f"{seconds:.2f}"]
            if stage in flops:
                speed = flops[stage] / seconds / GIGA
                line += [f"{flops[stage] / GIGA:,.0f}", f"{speed:.0f}", f"{speed / speeds.ours:.0%}"]
                line.append(f"{speed / speeds.pytorch:.0%}")
            else:
                line += [""] * 4
            lines.append(line)
        lines.append([side, "step", f"{summary['seconds']['median']:.2f}", "", "", "", ""])
    head = ["side", "stage", "seconds", "GFLOP", "GFLOP/s", "of our product's speed", "of PyTorch's product's speed"]
    return table(head, lines)


def ratios(records: Mapping[str, Sequence[Record]]) -> dict[str, Summary]:
    """Returns the medians of the pairs' ratios of whole steps."""

    def of(numerator: str, denominator: str) -> Summary:
        return paired_ratio(
            [record["seconds"] for record in records[numerator]], [record["seconds"] for record in records[denominator]]
        )

    pairs = [("cepo", PLAIN), (TRL, PLAIN)]
    pairs += [(method + BEFORE, method) for method in OURS]
    pairs.append(("cepo" + BEFORE, PLAIN + BEFORE))
    present = [pair for pair in pairs if set(pair) <= set(records)]
    return {f"{numerator} / {denominator}": of(numerator, denominator) for numerator, denominator in present}


def main() -> int:
    """Measures all sides, writes the record and prints the tables."""
    options = arguments()
    before = product_speeds(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        sides = sides_of(options, folder)
        with side_by_side(sides, threads=options.threads, folder=Path(folder)) as processes:
            records = take_turns(processes, steps=options.steps, warm_up=options.warm_up)
    after = product_speeds(options.threads)
    speeds = Speeds(
        ours=statistics.fmean([before.ours, after.ours]),
        pytorch=statistics.fmean([before.pytorch, after.pytorch]),
    )
    check_same_work(records)
    found = ratios(records)
    record = {
        "machine": machine_record(options.threads) | {"load_average": load_average()},
        "work": {"prompts": options.prompts, "steps": options.steps, "threads": options.threads, "shape": SHAPE.name},
        "product_gflops": {"ours": speeds.ours, "pytorch": speeds.pytorch},
        "sides": {name: side_summary(own_records) for name, own_records in records.items()},
        "computed_flops": {name: computed_flops(records, name) for name in records if name != TRL},
        "ratios": {name: summary.record for name, summary in found.items()},
    }
    rows = [[name, spread(summary, 2)] for name, summary in found.items()]
    tables = [stage_table(records, speeds), table(["whole steps", "median (quartiles)"], rows)]
    tables.append(f"one product of {PRODUCT_TOKENS} tokens: {speeds.ours:.0f} GFLOP/s, by PyTorch {speeds.pytorch:.0f}")
    save(record, tables, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
