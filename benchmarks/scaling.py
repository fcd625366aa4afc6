"""Measures how scoring's time and memory grow with the sizes of its input.

    python -m benchmarks.scaling --method NAME

Time: one group's responses with 1 to 3 contexts are scored on the optimised path and on the plain one
(`--plain-overrides`: padded rows, nothing shared). Each has its own process, and they alternate point by point. Times
are processor times on a CPU, which other work there affects less, and wall times on a GPU. Group size, response, prompt
and contexts are varied one at a time; the exponent is the slope of log seconds over log size by least squares.

Memory: the peak of a scoring pass of one layer and a head, each in a new process. It is fitted as
a + b vocabulary + c tokens + d vocabulary x tokens, where d is at least 4 bytes if a pass holds all logits in float32.
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
"""glibc returns freed blocks of this size to the system at once, so that resident memory equals memory in use."""


def arguments() -> argparse.Namespace:
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
    """Returns the base point and the points that differ from it in one size."""
    base = Point(**{name: sizes[min(2, len(sizes) - 1)] for name in VARIED if (sizes := getattr(options, name))})
    points = [base]
    for name in VARIED:
        points += [replace(base, **{name: size}) for size in getattr(options, name) if size != getattr(base, name)]
    largest = replace(base, group_size=max(options.group_size))
    return points if largest in points else [*points, largest]


def measure(options: argparse.Namespace, points: Sequence[Point]) -> dict[str, list[Record]]:
    """Measures all points `repeats` times on both sides, after the first point as a warm-up."""
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
    return [record[key] for record in records if record["point"] == asdict(point)]


def clock() -> str:
    """Returns which seconds are compared: wall time with a GPU, otherwise processor time."""
    import torch

    return "seconds" if torch.cuda.is_available() else "processor_seconds"


def exponent(sizes: Sequence[float], costs: Sequence[float]) -> float:
    """Returns the slope of log cost over log size by least squares."""
    slope, _ = statistics.linear_regression([math.log(size) for size in sizes], [math.log(cost) for cost in costs])
    return slope


def fitted_exponents(records: dict[str, list[Record]], points: Sequence[Point]) -> dict[str, dict[str, float]]:
    """Returns side -> varied size -> exponent of the median seconds."""
    found: dict[str, dict[str, float]] = {}
    for side, those in records.items():
        for name in VARIED:
            along = [point for point in points if replace(point, **{name: getattr(points[0], name)}) == points[0]]
            if len(along) > 1:
                costs = [statistics.median(at(those, point, clock())) for point in along]
                found.setdefault(side, {})[name] = exponent([getattr(point, name) for point in along], costs)
    return found


def peak_bytes(vocabulary: int, tokens: int, hidden: int) -> int:
    """Returns the bytes beyond the model for scoring a response of `tokens` tokens; call it in a new process."""
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
    # If building the model needed more than the pass, this is an upper bound.
    return max(highest, highest_before) - before


def peaks(options: argparse.Namespace) -> list[dict[str, int]]:
    """Measures the memory grid, each point in its own process."""
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
    """Fits bytes = a + b vocabulary + c tokens + d vocabulary x tokens by least squares; adds the largest residual."""
    import numpy

    columns = numpy.array(
        [[1.0, each["vocabulary"], each["tokens"], each["vocabulary"] * each["tokens"]] for each in found]
    )
    bytes_found = numpy.array([float(each["bytes"]) for each in found])
    # Scaled columns, since the original ones span nine orders of magnitude.
    scale = columns.max(axis=0)
    solution = numpy.linalg.lstsq(columns / scale, bytes_found, rcond=None)[0] / scale
    residual = float(abs(columns @ solution - bytes_found).max())
    names = ("constant_bytes", "bytes_per_vocabulary_entry", "bytes_per_token", "bytes_per_vocabulary_entry_and_token")
    return dict(zip(names, map(float, solution), strict=True)) | {"largest_residual_bytes": residual}


def time_tables(records: dict[str, list[Record]], points: Sequence[Point]) -> tuple[list[dict[str, Any]], list[str]]:
    """Returns both sides' medians and the paired ratio of each point, as records and as tables."""
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
