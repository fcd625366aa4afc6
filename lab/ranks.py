"""Counts how work and messages of a step are spread over ranks.

    python -m lab.ranks --method NAME

Trains the built-in toy task for some steps with 1, 2 and 4 worker processes under Ray, on the same problems with the same
responses, with adapters on the language model and with all weights. Counted per step are tokens scored and computed,
images encoded, bytes from the trainer to each rank, and bytes from each rank to the others for weights and gradients.
The last are compared with arithmetic over the weights' shapes (exit code 1 if they differ by more than 1 %).
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lab.support.collectives import Calls, Sharding, WeightBytes, expected_bytes
from lab.support.counting_rank import CountingRank, counts_of
from lab.support.machine import ROOT, load_average, machine_record
from lab.support.tables import RESULTS, save, table

VARIANTS = {"adapters": ["worker.actor.model.lora.rank=8"], "all weights": ["worker.actor.model.lora.rank=0"]}
TOLERANCE = 0.01


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", required=True, help="estimator of the runs")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--steps", type=int, default=3, help="the first is not counted")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--group-size", type=int, default=4)
    parser.add_argument("--overrides", nargs="*", default=[], help="a.b.c=value")
    parser.add_argument("--out", type=Path, default=RESULTS / "ranks.json")
    return parser.parse_args()


def trained(options: argparse.Namespace, variant: str, ranks: int, folder: Path) -> None:
    """Trains under Ray with ranks that count."""
    import cepo.runtime.ray_backend as ray_backend
    from cepo.config import check_config, load_config
    from cepo.train import train

    ray_backend.RankProcess = CountingRank
    config = load_config(
        [
            f"config={ROOT}/configs/microgeo/base.yaml",
            f"algorithm.adv_estimator={options.method}",
            "data.val_files=null",
            f"data.rollout_batch_size={options.prompts}",
            f"worker.actor.global_batch_size={options.prompts // 2}",
            "worker.rollout.name=transformers",
            f"worker.rollout.n={options.group_size}",
            "trainer.launcher=ray",
            f"trainer.n_gpus_per_node={ranks}",
            "trainer.val_before_train=false",
            "trainer.logger=[file]",
            "trainer.save_freq=-1",
            f"trainer.max_steps={options.steps}",
            *VARIANTS[variant],
            *options.overrides,
            f"trainer.save_checkpoint_path={folder}",
        ]
    )
    check_config(config)
    train(config)


def counted(variant: str, ranks: int, folder: Path) -> dict[str, Any]:
    """Returns a finished run's counts per step, without its first step."""
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()][1:]

    def mean(name: str) -> float:
        return statistics.fmean(step[name] for step in steps)

    found: dict[str, Any] = {"variant": variant, "ranks": ranks}
    for name in ("tokens_computed", "pictures_encoded"):
        found |= {name: {"sum": mean(f"work/{name}"), "max": mean(f"work/{name}_max")}}
    for name in ("tokens_scored", "bytes_sent"):
        found |= {name: {"sum": ranks * mean(f"work/{name}_per_rank"), "max": mean(f"work/{name}_max")}}
    return found | {"to_other_ranks": between_ranks(ranks, folder)}


def between_ranks(ranks: int, folder: Path) -> dict[str, Any]:
    """Returns the bytes to other ranks per step, counted and by arithmetic, of the rank with most (all are close)."""
    by_rank = []
    for rank in range(ranks):
        first, _, _, *steps = counts_of(folder, rank)  # sharding; weights before the first step; first step
        sharding = Sharding(
            blocks=WeightBytes(**first["sharding"]["blocks"]),
            outside=WeightBytes(**first["sharding"]["outside"]),
            synchronised=first["sharding"]["synchronised"],
        )
        sent = [step["sent"] for step in steps]
        expected = [expected_bytes(sharding, Calls(**step["calls"]), ranks) for step in steps]
        calls = {name: statistics.fmean(step["calls"][name] for step in steps) for name in steps[0]["calls"]}
        by_rank.append({"counted": _means(sent), "by_arithmetic": _means(expected), "calls": calls})
    most = max(by_rank, key=lambda one: sum(one["counted"].values()))
    return most | {"sharding": asdict(sharding)}


def _means(records: Sequence[dict[str, int]]) -> dict[str, float]:
    return {name: statistics.fmean(record[name] for record in records) for name in records[0]}


def disagreements(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Describes where counted bytes differ from the arithmetic."""
    found = []
    for row in rows:
        expected = row["to_other_ranks"]["by_arithmetic"]
        for name, bytes_sent in row["to_other_ranks"]["counted"].items():
            if abs(bytes_sent - expected[name]) > TOLERANCE * expected[name]:
                found.append(f"{row['variant']}, {row['ranks']} ranks, {name}: {bytes_sent} and {expected[name]} bytes")
    return found


def work_table(rows: Sequence[dict[str, Any]]) -> str:
    """Formats the counts per rank, for the rank with the most unless a heading says otherwise."""
    head = [
        "trained",
        "ranks",
        "tokens scored",
        "tokens computed",
        "max / mean",
        "images encoded, all ranks",
        "largest",
    ]
    head += ["bytes from the trainer", "MB to other ranks: scoring", "update", "generators", "by arithmetic, sum"]
    lines = []
    for row in rows:
        computed, images, peers = row["tokens_computed"], row["pictures_encoded"], row["to_other_ranks"]
        line = [row["variant"], row["ranks"], f"{row['tokens_scored']['max']:,.0f}", f"{computed['max']:,.0f}"]
        line += [f"{computed['max'] * row['ranks'] / computed['sum']:.2f}"]
        line += [f"{images['sum']:,.1f}", f"{images['max']:,.1f}", f"{row['bytes_sent']['max']:,.0f}"]
        line += [f"{sent / 1e6:,.1f}" for sent in peers["counted"].values()]
        lines.append([*line, f"{sum(peers['by_arithmetic'].values()) / 1e6:,.1f}"])
    return table(head, lines)


def main() -> int:
    """Counts and writes the record; returns 1 if counted bytes differ from the arithmetic."""
    options = arguments()
    logging.basicConfig(level=logging.ERROR)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="cepo-ranks-") as scratch:
        for variant in options.variants:
            for ranks in options.ranks:
                folder = Path(scratch) / f"{variant.replace(' ', '-')}-{ranks}"
                trained(options, variant, ranks, folder)
                rows.append(counted(variant, ranks, folder))
                print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    record: dict[str, Any] = {
        "machine": machine_record(1) | {"load_average": load_average()},
        "work": {name: value for name, value in vars(options).items() if name != "out"},
        "counted": rows,
    }
    save(record, [work_table(rows)], options.out)
    wrong = disagreements(rows)
    print("\n".join(wrong), file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
