"""Measures what the entropy in the loss (`worker.actor.entropy_coef`) costs an update: time and memory.

    python3 -m lab.entropy --shape small --pairs 7

Updates with and without the entropy alternate on the same rows, those of `lab.stages` with one context. They are measured
with an adapter, whose head is frozen, and with all weights trained. A time is the processor time of the process on its one
thread, which other work on the machine does not increase, and a ratio the median over the pairs. The peak is the most
bytes of tensors that are alive at one time in a further run of each, without weights, gradients and optimizer state that
exist before it.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lab.stages import build_actor
from lab.support.machine import load_average, machine_record
from lab.support.paired import paired_ratio
from lab.support.tables import RESULTS, save, spread, table
from testing.rows import build_rows, optimizer_batch
from testing.shapes import SHAPES, Shape, write_checkpoint

if TYPE_CHECKING:
    from cepo.data.batch import OptimizerBatch
    from cepo.workers.actor import Actor

COEFFICIENT = 0.01
SIDES = {"without": 0.0, "with": COEFFICIENT}
"""The coefficient of each side."""
TRAINED = {"adapter": 16, "all weights": 0}
"""The rank of LoRA by what is trained; 0 trains all weights."""
_SMALLEST_COUNTED = 4096
"""Storages of fewer bytes are not counted."""
Record = dict[str, Any]


def main(argv: list[str] | None = None) -> int:
    """Measures both kinds of training, writes the record and prints the table."""
    options = arguments(argv)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the trainer would use any GPU
    import torch

    torch.set_num_threads(1)
    shape = SHAPES[options.shape]
    found: dict[str, Record] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = write_checkpoint(shape, Path(name) / "model")
        for trained, lora_rank in TRAINED.items():
            updates = {
                side: update_of(folder, shape, options, lora_rank=lora_rank, coefficient=coefficient)
                for side, coefficient in SIDES.items()
            }
            found[trained] = compared(updates, options.pairs)
    sizes = {
        "shape": options.shape,
        "responses": options.groups * options.group_size,
        "vocabulary": shape.vocabulary,
        "hidden": shape.hidden,
        "pairs": options.pairs,
    }
    record = {"machine": machine_record(1) | {"load_average": load_average()}, "work": sizes, "trained": found}
    save(record, [table_of(found)], options.out or RESULTS / f"entropy_{options.shape}.json")
    return 0


def arguments(argv: list[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="small")
    parser.add_argument("--groups", type=int, default=1)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--out", type=Path, help="default: lab/results/entropy_<shape>.json")
    return parser.parse_args(argv)


class Update:
    """An update of a model on fixed rows, whose learning rate is 0."""

    def __init__(self, actor: Actor, batch: OptimizerBatch) -> None:
        self._actor = actor
        self._batch = batch

    def __call__(self) -> None:
        """Runs the update, without image features of an earlier one."""
        self._actor.module.encoder.forget()
        self._actor.update([self._batch], step=0)

    def peak_bytes(self) -> int:
        """Returns the most bytes of tensors that one update adds."""
        from testing.live_tensors import LiveTensors

        weights = list(self._actor.module.parameters())
        with LiveTensors(floor=_SMALLEST_COUNTED, known=weights) as live:
            self()
        return live.peak


def update_of(folder: Path, shape: Shape, options: argparse.Namespace, *, lora_rank: int, coefficient: float) -> Update:
    """Builds a model with this coefficient of the entropy, and the rows of its update."""
    from cepo.losses.objective import ObjectiveSettings
    from cepo.models.processing import Processing

    rows, *_ = build_rows(
        shape,
        Processing(str(folder)),
        groups=options.groups,
        group_size=options.group_size,
        contexts=1,
        prompt=shape.prompt_tokens,
    )
    objective = ObjectiveSettings(entropy_coefficient=coefficient)
    longest_row = shape.prompt_tokens + shape.longest
    actor = build_actor(folder, "packed", longest_row, "fp32", lora_rank=lora_rank, objective=objective)
    return Update(actor, optimizer_batch(rows))


def compared(updates: Mapping[str, Update], pairs: int) -> Record:
    """Returns both sides' median seconds and peak bytes, and the ratio of seconds over the pairs, whose order alternates."""
    peaks = {side: update.peak_bytes() for side, update in updates.items()}  # also warms up
    seconds: dict[str, list[float]] = {side: [] for side in updates}
    for pair in range(pairs):
        order = list(updates) if pair % 2 == 0 else list(updates)[::-1]
        for side in order:
            seconds[side].append(processor_seconds(updates[side]))
    ratio = paired_ratio(seconds["with"], seconds["without"])
    return {
        "seconds": {side: statistics.median(values) for side, values in seconds.items()},
        "seconds_of_pairs": seconds,
        "seconds_ratio": ratio.record,
        "ratio": spread(ratio, digits=2),
        "peak_bytes": peaks,
    }


def processor_seconds(work: Callable[[], object]) -> float:
    """Returns the processor time of one run."""
    start = time.process_time()
    work()
    return time.process_time() - start


def table_of(found: Mapping[str, Record]) -> str:
    """Returns the table of both kinds of training; the ratio has its quartiles."""
    rows: list[list[str]] = []
    for trained, record in found.items():
        row = [trained]
        for side in SIDES:
            row.append(f"{record['seconds'][side]:.2f}")
        row.append(record["ratio"])
        for side in SIDES:
            row.append(f"{record['peak_bytes'][side] / 2**20:,.0f}")
        rows.append(row)
    head = ["trained", "without, s", "with, s", "ratio", "peak without, MiB", "peak with, MiB"]
    return table(head, rows)


if __name__ == "__main__":
    sys.exit(main())
