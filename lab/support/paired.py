"""Measures processes that run side by side and alternate their steps, so that a slow minute affects all of them."""

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

from lab.support.machine import ROOT, environment

Record = dict[str, Any]
"""A process's record of one step: `seconds`, and counts."""


@dataclass(frozen=True)
class Side:
    """What a measured process runs.

    Attributes:
        module: run with `python -m`; it calls `serve`.
        options: passed to the module as JSON.
        root: the checkout whose code runs.
    """

    module: str
    options: Mapping[str, Any]
    root: Path = ROOT


class StepProcess:
    """A process that performs a step on request and reports its cost; its output goes to the file `log`."""

    def __init__(self, side: Side, *, threads: int, log: Path) -> None:
        self.log = log
        self._stream = log.open("w")
        self._process = subprocess.Popen(
            [sys.executable, "-m", side.module, json.dumps(side.options)],
            cwd=side.root,
            env=environment(threads, log.parent / "cache", root=side.root),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stream,
            text=True,
        )

    def step(self) -> Record:
        """Lets the process perform its next step and returns the record.

        Raises:
            RuntimeError: the process ended instead.
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
    """The measured process's side: `wait` for a request, then `report` the step on the original standard output."""

    def __init__(self) -> None:
        self._reports = os.fdopen(os.dup(sys.stdout.fileno()), "w")
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def wait(self) -> bool:
        """Waits for the next request; returns False if no more steps are requested."""
        return sys.stdin.readline().strip() == "step"

    def report(self, record: Record) -> None:
        """Sends the record of a step."""
        self._reports.write(json.dumps(record) + "\n")
        self._reports.flush()


def serve(step: Callable[[int], Record]) -> None:
    """Performs steps 0, 1, ... as long as they are requested."""
    server, number = StepServer(), 0
    while server.wait():
        server.report(step(number))
        number += 1


@contextmanager
def side_by_side(sides: Mapping[str, Side], *, threads: int, folder: Path) -> Iterator[dict[str, StepProcess]]:
    """Yields a process for each named side; the logs are in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    processes: dict[str, StepProcess] = {}
    try:
        for name, side in sides.items():
            processes[name] = StepProcess(side, threads=threads, log=folder / f"{name}.log")
        yield processes
    finally:
        for process in processes.values():
            process.close()


def take_turns(processes: Mapping[str, StepProcess], *, steps: int, warm_up: int = 0) -> dict[str, list[Record]]:
    """Performs steps in the order ABAB...; returns the records without the first `warm_up` of each side."""
    records: dict[str, list[Record]] = {name: [] for name in processes}
    for number in range(warm_up + steps):
        for name, process in processes.items():
            record = process.step()
            state = "warm-up" if number < warm_up else f"step {number - warm_up + 1} of {steps}"
            print(f"{name}, {state}: {record['seconds']:.3f} s", file=sys.stderr, flush=True)
            if number >= warm_up:
                records[name].append(record)
    return records


def check_same_work(records: Mapping[str, Sequence[Record]]) -> None:
    """Checks that all sides generated the same number of tokens at every step.

    Raises:
        RuntimeError: they did not, so their times cannot be compared.
    """
    counts = {name: [record["tokens"]["generate"] for record in of_side] for name, of_side in records.items()}
    first_counts, *other_counts = counts.values()
    if any(numbers != first_counts for numbers in other_counts):
        raise RuntimeError(f"the sides generated different numbers of tokens: {counts}")


@dataclass(frozen=True)
class Summary:
    """The median and quartiles of some values."""

    median: float
    lower_quartile: float
    upper_quartile: float
    count: int

    @property
    def record(self) -> dict[str, float]:
        return asdict(self)


def summary(values: Sequence[float]) -> Summary:
    """Returns median and quartiles by linear interpolation between the values; for a single value, that value."""
    if len(values) == 1:
        return Summary(values[0], values[0], values[0], 1)
    lower, median, upper = statistics.quantiles(values, n=4, method="inclusive")
    return Summary(median, lower, upper, len(values))


def paired_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Summary:
    """Summarises the pairs' ratios (it is no ratio of medians), since both sides of a pair ran in the same minute."""
    return summary([upper / lower for upper, lower in zip(numerators, denominators, strict=True)])


def mean_of(records: Sequence[Record], key: str) -> dict[str, float]:
    """Returns the means of the numbers in the mapping `key` of the records; missing numbers count as 0."""
    names = sorted({name for record in records for name in record[key]})
    return {name: statistics.fmean(record[key].get(name, 0.0) for record in records) for name in names}


def median_of(records: Sequence[Record], key: str) -> dict[str, float]:
    """Returns medians in the same way as `mean_of`."""
    names = sorted({name for record in records for name in record[key]})
    return {name: statistics.median(record[key].get(name, 0.0) for record in records) for name in names}
