"""Builds the study's table of gradient signal and accuracy from the results of `python3 -m lab.gradient`."""

from __future__ import annotations

import json
from collections.abc import Mapping

from lab.support.machine import ROOT
from lab.support.study_plan import BASELINE, PLAN
from lab.support.study_records import final
from lab.support.study_statistics import Runs, cell, paired
from lab.support.tables import table


def gradients_part(runs: Runs) -> str:
    """Returns the page's part with the gradient figures of docs/credit.md and the accuracy of the arms."""
    moments: Mapping[str, str] = PLAN["gradient_measurements"][runs.world]
    measured: dict[str, dict[str, str]] = {}
    for moment, name in moments.items():
        file = ROOT / "lab" / "results" / f"credit_gradient_{name}.json"
        for row in json.loads(file.read_text(encoding="utf-8"))["gradient"]:
            ratio = row["ratio"]
            text = f"{ratio['value']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})"
            measured.setdefault(row["name"], {})[moment] = text
    base = runs.equal(BASELINE)
    rows = [
        [name, *(measured[name][moment] for moment in moments), arm,
         cell([final(record) for record in runs.equal(arm).values()]),
         "" if arm == BASELINE else cell(paired(base, runs.equal(arm)), signed=True)]
        for name, arm in PLAN["gradients"].items() if name in measured
    ]  # fmt: skip
    head = ["estimator", *(f"SNR ratio, {moment}" for moment in moments), "arm", "sampled %", f"sampled - {BASELINE}"]
    return (
        f"## {runs.world}: gradient signal and accuracy\n\nSignal-to-noise ratio of a batch gradient over that of "
        "uniform credit, with 95 % intervals, from `lab/results/credit_gradient_*.json` ([credit](credit.md)), "
        "and the accuracy at equal learning rates. The measured estimators of cepo have lambda 1, while the trained arms start "
        "at 0.5 and divide by the standard deviation of the group.\n\n" + table(head, rows)
    )
