"""Paired runs: measured processes that live side by side and take their steps in turn, so that a slow minute hits all of them."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.support.machine import ROOT, environment

Record = dict[str, Any]
"""What a process says of one step: `seconds`, and counts beside it."""


class StepProcess:
    """A process that takes one step whenever it is asked, and tells what the step cost.

    Args:
        module: run with `python -m`; it calls `serve`.
        options: given to it as JSON.
        threads: that it computes with.
        log: file that gets its output.
    """

    def __init__(self, module: str, options: Mapping[str, Any], *, threads: int, log: Path) -> None:
        self.log = log
        self._stream = log.open("w")
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, json.dumps(options)],
            cwd=ROOT,
            env=environment(threads, log.parent / "cache"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stream,
            text=True,
        )

    def step(self) -> Record:
        """Lets the process take its next step.

        Raises:
            RuntimeError: it ended instead.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write("step\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass
        line = self._process.stdout.readline()
        if not line:
            self._stream.flush()
            tail = "\n".join(self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-15:])
            raise RuntimeError(f"the measured process ended (exit code {self._process.wait()}); {self.log}:\n{tail}")
        return json.loads(line)

    def close(self) -> None:
        """Ends the process."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._stream.close()


class StepServer:
    """The other side: `wait` until the next step is wanted, then `report` it. The first standard output is kept for reports."""

    def __init__(self) -> None:
        self._reports = os.fdopen(os.dup(sys.stdout.fileno()), "w")
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def wait(self) -> bool:
        """False once no more steps are wanted."""
        return sys.stdin.readline().strip() == "step"

    def report(self, record: Record) -> None:
        """Hands the step's record over."""
        self._reports.write(json.dumps(record) + "\n")
        self._reports.flush()


def serve(step: Callable[[int], Record]) -> None:
    """Takes steps 0, 1, ... as long as they are asked for."""
    server, number = StepServer(), 0
    while server.wait():
        server.report(step(number))
        number += 1


@contextmanager
def side_by_side(
    sides: Mapping[str, tuple[str, Mapping[str, Any]]], *, threads: int, folder: Path
) -> Iterator[dict[str, StepProcess]]:
    """One process for each side, name -> (module, options); their logs lie in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    processes: dict[str, StepProcess] = {}
    try:
        for name, (module, options) in sides.items():
            processes[name] = StepProcess(module, options, threads=threads, log=folder / f"{name}.log")
        yield processes
    finally:
        for process in processes.values():
            process.close()


def take_turns(processes: Mapping[str, StepProcess], *, steps: int, warm_up: int = 0) -> dict[str, list[Record]]:
    """Steps in the order ABAB..., the first `warm_up` of each side dropped."""
    records: dict[str, list[Record]] = {name: [] for name in processes}
    for number in range(warm_up + steps):
        for name, process in processes.items():
            record = process.step()
            state = "warm-up" if number < warm_up else f"step {number - warm_up + 1} of {steps}"
            print(f"{name}, {state}: {record['seconds']:.3f} s", file=sys.stderr, flush=True)
            if number >= warm_up:
                records[name].append(record)
    return records


@dataclass(frozen=True)
class Summary:
    """Median and quartiles of some values."""

    median: float
    lower_quartile: float
    upper_quartile: float
    count: int

    @property
    def record(self) -> dict[str, float]:
        return asdict(self)


def summary(values: Sequence[float]) -> Summary:
    """Quartiles by linear interpolation between the values themselves; those of a single value are the value."""
    if len(values) == 1:
        return Summary(values[0], values[0], values[0], 1)
    lower, median, upper = statistics.quantiles(values, n=4, method="inclusive")
    return Summary(median, lower, upper, len(values))


def paired_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Summary:
    """Of the ratios of the pairs, not the ratio of the medians: both sides of a pair ran in the same minute."""
    return summary([upper / lower for upper, lower in zip(numerators, denominators, strict=True)])


def mean_of(records: Sequence[Record], key: str) -> dict[str, float]:
    """The means of the numbers in the mapping `key` of each record; what a record lacks counts 0."""
    names = sorted({name for record in records for name in record[key]})
    return {name: statistics.fmean(record[key].get(name, 0.0) for record in records) for name in names}


def median_of(records: Sequence[Record], key: str) -> dict[str, float]:
    """As `mean_of`, medians."""
    names = sorted({name for record in records for name in record[key]})
    return {name: statistics.median(record[key].get(name, 0.0) for record in records) for name in names}
