"""How scoring's cost grows with group size, response, prompt and contexts, and its memory with vocabulary and length.

    python -m benchmarks.scaling --method NAME

Time: one group's responses behind 1 to 3 contexts, on the optimised path and on the plain one (`--plain-overrides`: padded rows,
nothing shared), a process each, point by point in turn. Seconds are those of the process on a CPU, which other work there
changes less, and passed ones on a GPU. One size is varied at a time; the exponent is the slope of log seconds over log size by
least squares. Memory: the peak of a scoring pass of one layer and a head, each in a fresh process; fitted as
a + b vocabulary + c tokens + d vocabulary x tokens, where d is at least 4 bytes for a pass that holds all logits in float32.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.support.machine import ROOT, environment, load_average, machine_record
from benchmarks.support.paired import Record, paired_ratio, side_by_side, take_turns
from benchmarks.support.scoring import Point
from benchmarks.support.shapes import SHAPES
from benchmarks.support.tables import RESULTS, save, table

OPTIMISED, PLAIN = "optimised", "plain"
VARIED = ("group_size", "response", "prompt", "contexts")
RETURN_FREED_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(2**20)}
"""glibc gives freed blocks of this size back at once, so that what is resident is what is held."""


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", help="estimator of the run that scores; it changes nothing in a scoring pass")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="small")
    parser.add_argument("--group-size", type=int, nargs="+", default=[2, 4, 8, 16, 32], help="the third is the base")
    parser.add_argument("--response", type=int, nargs="+", default=[32, 64, 128, 256], help="the third is the base")
    parser.add_argument("--prompt", type=int, nargs="+", default=[340, 400, 700, 1400], help="the third is the base")
    parser.add_argument("--contexts", type=int, nargs="+", default=[1, 2, 3], help="the third is the base")
    parser.add_argument("--repeats", type=int, default=3, help="measurements of each point")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--micro-batch", type=int, default=8, help="responses per pass")
    parser.add_argument("--overrides", nargs="*", default=[], help="a.b.c=value, of the optimised side")
    parser.add_argument(
        "--plain-overrides", nargs="*", default=["worker.actor.padding_free=false"], help="of the plain side"
    )
    parser.add_argument("--vocabulary", type=int, nargs="*", default=[32_768, 65_536, 151_936], help="none: no memory")
    parser.add_argument("--tokens", type=int, nargs="*", default=[2_048, 4_096, 8_192], help="of the memory grid")
    parser.add_argument("--hidden", type=int, default=256, help="of the memory grid's model")
    parser.add_argument("--out", type=Path, default=RESULTS / "scaling.json")
    parser.add_argument("--peak", type=int, nargs=3, metavar=("VOCABULARY", "TOKENS", "HIDDEN"), help=argparse.SUPPRESS)
    return parser.parse_args()


def grid(options: argparse.Namespace) -> list[Point]:
    """The base point, and those that differ from it in one size."""
    base = Point(**{name: sizes[min(2, len(sizes) - 1)] for name in VARIED if (sizes := getattr(options, name))})
    points = [base]
    for name in VARIED:
        points += [replace(base, **{name: size}) for size in getattr(options, name) if size != getattr(base, name)]
    largest = replace(base, group_size=max(options.group_size))
    return points if largest in points else [*points, largest]


def measure(options: argparse.Namespace, points: Sequence[Point]) -> dict[str, list[Record]]:
    """All points `repeats` times on both sides; the first point once more before, to warm up."""
    order = [points[0], *(point for _ in range(options.repeats) for point in points)]
    with tempfile.TemporaryDirectory() as folder:
        told = {
            "folder": folder,
            "shape": options.shape,
            "method": options.method,
            "points": [asdict(point) for point in order],
            "micro_batch": options.micro_batch,
        }
        module = "benchmarks.support.scoring"
        sides = {
            OPTIMISED: (module, told | {"run": OPTIMISED, "overrides": options.overrides}),
            PLAIN: (module, told | {"run": PLAIN, "overrides": options.plain_overrides}),
        }
        with side_by_side(sides, threads=options.threads, folder=Path(folder)) as processes:
            return take_turns(processes, steps=len(order) - 1, warm_up=1)


def at(records: Sequence[Record], point: Point, key: str) -> list[float]:
    """The measurements of a point."""
    return [record[key] for record in records if record["point"] == asdict(point)]


def clock() -> str:
    """Which seconds are compared."""
    import torch

    return "seconds" if torch.cuda.is_available() else "processor_seconds"


def exponent(sizes: Sequence[float], costs: Sequence[float]) -> float:
    """The slope of log cost over log size by least squares."""
    slope, _ = statistics.linear_regression([math.log(size) for size in sizes], [math.log(cost) for cost in costs])
    return slope


def fitted_exponents(records: dict[str, list[Record]], points: Sequence[Point]) -> dict[str, dict[str, float]]:
    """Side -> varied size -> exponent of the median seconds."""
    found: dict[str, dict[str, float]] = {}
    for side, those in records.items():
        for name in VARIED:
            along = [point for point in points if replace(point, **{name: getattr(points[0], name)}) == points[0]]
            if len(along) > 1:
                costs = [statistics.median(at(those, point, clock())) for point in along]
                found.setdefault(side, {})[name] = exponent([getattr(point, name) for point in along], costs)
    return found


def peak_bytes(vocabulary: int, tokens: int, hidden: int) -> int:
    """Memory that scoring one response of `tokens` tokens takes on top of the model; in a fresh process."""
    import psutil
    import torch

    from benchmarks.distillation_memory import build_batch, build_model, highest_resident_bytes

    torch.set_num_threads(1)
    module = build_model(vocabulary, hidden).eval()
    batch, _ = build_batch(vocabulary, hidden, tokens)
    before, highest_before = psutil.Process().memory_info().rss, highest_resident_bytes()
    with torch.no_grad():
        module(batch)
    highest = highest_resident_bytes()
    # Where the model's construction held more than the pass, the pass took at most the difference to that.
    return max(highest, highest_before) - before


def peaks(options: argparse.Namespace) -> list[dict[str, int]]:
    """The memory grid, each point in a process of its own."""
    found = []
    for vocabulary in options.vocabulary:
        for tokens in options.tokens:
            command = [
                sys.executable,
                "-m",
                "benchmarks.scaling",
                "--peak",
                *map(str, (vocabulary, tokens, options.hidden)),
            ]
            with tempfile.TemporaryDirectory() as cache:
                variables = environment(1, Path(cache)) | RETURN_FREED_MEMORY
                done = subprocess.run(command, env=variables, cwd=ROOT, stdout=subprocess.PIPE, check=True)
            found.append(
                {"vocabulary": vocabulary, "tokens": tokens, "bytes": json.loads(done.stdout.splitlines()[-1])}
            )
            print(f"memory: {found[-1]}", file=sys.stderr, flush=True)
    return found


def memory_fit(found: Sequence[dict[str, int]]) -> dict[str, float]:
    """Least squares of bytes = a + b vocabulary + c tokens + d vocabulary x tokens, and the largest residual."""
    import numpy

    columns = numpy.array(
        [[1.0, each["vocabulary"], each["tokens"], each["vocabulary"] * each["tokens"]] for each in found]
    )
    bytes_found = numpy.array([float(each["bytes"]) for each in found])
    # Columns of like size: the plain ones span nine orders of magnitude.
    scale = columns.max(axis=0)
    solution = numpy.linalg.lstsq(columns / scale, bytes_found, rcond=None)[0] / scale
    residual = float(abs(columns @ solution - bytes_found).max())
    names = ("constant_bytes", "bytes_per_vocabulary_entry", "bytes_per_token", "bytes_per_vocabulary_entry_and_token")
    return dict(zip(names, map(float, solution), strict=True)) | {"largest_residual_bytes": residual}


def time_tables(records: dict[str, list[Record]], points: Sequence[Point]) -> tuple[list[dict[str, Any]], list[str]]:
    """Per point the medians of both sides and the paired ratio, as records and as tables."""
    rows, found = [], []
    for point in points:
        ratio, wall = (
            paired_ratio(*(at(records[side], point, key) for side in (OPTIMISED, PLAIN)))
            for key in (clock(), "seconds")
        )
        medians = {side: statistics.median(at(those, point, clock())) for side, those in records.items()}
        counts = next(each for each in records[PLAIN] if each["point"] == asdict(point))
        gap = at(records[OPTIMISED], point, "sum_of_log_probs")[0] - at(records[PLAIN], point, "sum_of_log_probs")[0]
        found.append(
            {
                "point": asdict(point),
                "seconds": medians,
                "optimised_over_plain": ratio.record,
                "optimised_over_plain_wall": wall.record,
                "tokens": counts["tokens"],
                "flops_of_the_plain_path": counts["flops"]["score"],
                "mean_log_prob_difference": gap / counts["tokens"]["responses"],
            }
        )
        sizes = [getattr(point, name) for name in VARIED]
        times = [f"{medians[OPTIMISED]:.3f}", f"{medians[PLAIN]:.3f}", f"{ratio.median:.2f}"]
        rows.append([*sizes, f"{counts['tokens']['score']:,}", f"{counts['flops']['score'] / 1e9:,.1f}", *times])
    head = [
        "responses",
        "response",
        "prompt",
        "contexts",
        "tokens",
        "GFLOP, plain",
        "optimised, s",
        "plain, s",
        "ratio",
    ]
    return found, [table(head, rows)]


def main() -> int:
    """Measures time and memory and writes the record."""
    options = arguments()
    if options.peak is not None:
        print(peak_bytes(*options.peak))
        return 0
    if options.method is None:
        print("--method is missing: the name of an estimator", file=sys.stderr)
        return 2
    points = grid(options)
    records = measure(options, points)
    times, tables = time_tables(records, points)
    exponents = fitted_exponents(records, points)
    tables.append(
        table(
            ["side", *VARIED],
            [[side, *(f"{slopes.get(name, math.nan):.2f}" for name in VARIED)] for side, slopes in exponents.items()],
        )
    )
    record: dict[str, Any] = {
        "machine": machine_record(options.threads) | {"load_average": load_average()},
        "work": {name: value for name, value in vars(options).items() if name not in ("out", "peak")},
        "points": times,
        "exponents": exponents,
    }
    if options.vocabulary:
        found = peaks(options)
        record["memory"] = {"peaks": found, "fit": memory_fit(found)}
        rows = [[f"{each['vocabulary']:,}", f"{each['tokens']:,}", f"{each['bytes'] / 2**20:,.0f}"] for each in found]
        tables.append(table(["vocabulary", "tokens", "peak, MiB"], rows))
        tables.append(
            table(["fit", "value"], [[name, f"{value:,.2f}"] for name, value in record["memory"]["fit"].items()])
        )
    save(record, tables, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
