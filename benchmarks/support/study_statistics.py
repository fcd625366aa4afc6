"""Figures over the study's seeds: means with errors, differences paired by seed, and the verdicts on the paper's claims."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy

from benchmarks.support.study_plan import EQUAL_RATE, PAPER_RATIO
from benchmarks.support.study_records import Record, final
from cepo.report.compare import Spread

BySeed = Mapping[int, Record]
Measure = Callable[[Record], float | None]
SIGNIFICANT = 0.05


def cell(values: Sequence[float], *, signed: bool = False) -> str:
    """Mean ± standard error over seeds, of shares in percent; one value has no error."""
    if not values:
        return "not run"
    spread = Spread(values=tuple(100 * value for value in values))
    error = "" if spread.error is None else f" ± {spread.error:.1f}"
    return f"{spread.mean:{'+' if signed else ''}.1f}{error}"


def paired(first: BySeed, second: BySeed, measure: Measure = final) -> list[float]:
    """Second minus first at each seed that both have a value for."""
    both = [(measure(first[seed]), measure(second[seed])) for seed in sorted(first.keys() & second.keys())]
    return [after - before for before, after in both if before is not None and after is not None]


def p_value(differences: Sequence[float]) -> float | None:
    """Two-sided, of Student's t test against a mean of 0; None for fewer than two values or no spread.

    With t = sqrt(n - 1) tan(a), Student's density becomes cos(a)^(n - 2) on (-pi/2, pi/2).
    """
    spread = Spread(values=tuple(differences)) if differences else None
    if spread is None or not spread.error:
        return None
    return tail(spread.mean / spread.error, len(differences) - 1)


def tail(t: float, freedom: int) -> float:
    """P(|T| > |t|) of Student's distribution."""
    angles = numpy.linspace(math.atan(abs(t) / math.sqrt(freedom)), math.pi / 2, 4001)
    whole = numpy.linspace(0, math.pi / 2, 4001)
    parts = (float(numpy.trapezoid(numpy.cos(part) ** (freedom - 1), part)) for part in (angles, whole))
    return next(parts) / next(parts)


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Adjusted for the number of tests that were made: the chance that any of them is below alpha by chance is at most alpha."""
    made = sorted((p, place) for place, p in enumerate(p_values) if p is not None)
    adjusted: list[float | None] = [None] * len(p_values)
    largest = 0.0
    for rank, (p, place) in enumerate(made):
        largest = max(largest, min(1.0, (len(made) - rank) * p))
        adjusted[place] = largest
    return adjusted


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A statement of the paper as the sign of a mean over seeds: `differences` of a world's runs, above 0 where it holds.

    `runs(arm, rate)` are the world's runs; where `rate` is the paper's, cepo has five times the others' learning rate.
    """

    text: str
    differences: Callable[[Callable[[str], BySeed]], list[float]]
    unit: float = 100.0
    """What the values are multiplied with in the table: shares in points, nats as they are."""
    of_rate: bool = True
    """Whether it is a claim on accuracy, which is tested at each choice of learning rates."""


def _higher(better: str, worse: str, text: str = "") -> Claim:
    return Claim(text=text or f"{better} above {worse}", differences=lambda runs: paired(runs(worse), runs(better)))


def _below_untrained(arm: str) -> Claim:
    return Claim(
        text=f"{arm} below the untrained model",
        differences=lambda runs: [untrained(record) - final(record) for record in runs(arm).values()],
    )


def untrained(record: Record) -> float:
    return record["sampled"]["0"]


def _risen(name: str, sign: int) -> Callable[[Callable[[str], BySeed]], list[float]]:
    """The last third of the steps with evidence against the first."""
    return lambda runs: [
        sign * (thirds[-1] - thirds[0]) for record in runs("cepo").values() if (thirds := record["evidence"].get(name))
    ]


def _clipped(record: Record) -> float | None:
    thirds = record["evidence"].get("clipped")
    return sum(thirds) / len(thirds) if thirds else None


def _absorbed(record: Record) -> float | None:
    """How far the effect of an answer in view on wrong responses has moved from its start towards 0, in nats per token."""
    gaps = record["hint_gap_wrong"]
    start, end = gaps.get("0"), gaps.get(str(record["steps"]))
    return None if start is None or end is None else abs(start) - abs(end)


CLAIMS = (
    _higher("cepo", "grpo"),
    _higher("cepo", "rlsd"),
    _higher("grpo", "rlsd"),
    _higher("rlsd", "sdpo"),
    _higher("sdpo", "opsd"),
    _below_untrained("opsd"),
    _below_untrained("sdpo"),
    Claim(text="positive evidence of cepo rises", differences=_risen("positive", 1), of_rate=False),
    Claim(text="negative evidence of cepo falls", differences=_risen("negative", -1), of_rate=False),
    Claim(
        text="cepo clips fewer weights than rlsd",
        differences=lambda runs: paired(runs("cepo"), runs("rlsd"), _clipped),
        of_rate=False,
    ),
    *(
        Claim(
            text=f"{arm} absorbs the answer's effect more than grpo (nats)",
            differences=lambda runs, arm=arm: paired(runs("grpo"), runs(arm), _absorbed),
            unit=1.0,
            of_rate=False,
        )
        for arm in ("opsd", "sdpo")
    ),
)
ABLATION_CLAIMS = tuple(
    _higher(better, worse)
    for better, worse in (
        ("cepo", "teacher snapshot"),
        ("teacher snapshot", "teacher reference"),
        ("teacher reference", "grpo"),
        ("cepo", "ground_truth + peer_full"),
        ("ground_truth + peer_full", "peer_full + peer_full"),
        ("peer_full + peer_full", "grpo"),
        ("grpo", "peer_suffix + peer_suffix"),
        ("peer_suffix + peer_suffix", "peer_prefix + peer_prefix"),
        ("lambda constant 0.5", "grpo"),
        ("lambda constant 0.5", "lambda constant 1.0"),
        ("lambda 1.0 over half", "lambda 1.0 over all"),
        ("cepo", "clip radius 0.1"),
        ("cepo", "clip radius 0.8"),
    )
)
"""The paper's orders, neighbours by neighbours."""


def verdict(differences: Sequence[float]) -> str:
    """`seen` where the mean is above 0 and p is below 0.05, `reversed` where it is below 0 and p is, else `not seen`."""
    if not differences:
        return "not run"
    p = p_value(differences)
    if p is None:
        return "not seen (one run)" if len(differences) == 1 else "not seen (no spread)"
    if p >= SIGNIFICANT:
        return "not seen"
    return "seen" if sum(differences) > 0 else "reversed"


@dataclass(frozen=True, kw_only=True)
class Runs:
    """The records of one world at one batch size."""

    records: Sequence[Record]
    world: str
    batch: int
    own_rates: Mapping[str, float]

    def at(self, arm: str, rate: float) -> BySeed:
        """The runs of an arm by seed."""
        return {
            record["seed"]: record
            for record in self.records
            if (record["world"], record["batch"], record["arm"], record["rate"], record["tuning"])
            == (self.world, self.batch, arm, rate, False)
        }

    def equal(self, arm: str) -> BySeed:
        """At the equal learning rate."""
        return self.at(arm, EQUAL_RATE)

    def paper(self, arm: str) -> BySeed:
        """At the paper's ratio of learning rates."""
        return self.at(arm, PAPER_RATIO * EQUAL_RATE if arm == "cepo" else EQUAL_RATE)
