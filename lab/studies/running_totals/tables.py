"""Writes the records of the study, and from them its tables, its test and its chart."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cepo.report.drawing import save_figure
from lab.studies.running_totals.gates import bounds_of, verdicts
from lab.studies.running_totals.study import Plan, all_records
from lab.studies.support.compared_runs import Record, by_name_and_seed, rollout_accuracy, seed_table, work_table
from lab.studies.support.comparison_charts import comparison_charts
from lab.studies.support.marked_tables import write_table
from lab.studies.support.paired_test import compared
from lab.studies.support.study_statistics import BySeed, cell, paired
from lab.support.machine import ROOT
from lab.support.tables import table

PAGE = ROOT / "lab" / "notes" / "running-totals.md"
Measure = Callable[[Record], float]
ByArm = Mapping[str, BySeed]


def held_out_after(step: int) -> Measure:
    """Returns the measure of accuracy on held-out problems after this step."""

    def measure(record: Record) -> float:
        return record["held_out"][str(step)]

    return measure


def measures(plan: Plan) -> dict[str, Measure]:
    """Returns the plan's measures by their titles: of the rollouts, and of held-out problems after each validation."""
    first, *later = range(plan.val_freq, plan.steps + 1, plan.val_freq)
    held_out = {f"held out after {first} %": held_out_after(first)}
    held_out |= {f"after {step} %": held_out_after(step) for step in later}
    return {"rollouts %": rollout_accuracy, **held_out}


def accuracy_table(plan: Plan, by_arm: ByArm) -> str:
    """Returns a Markdown table of each arm's measures, and their paired differences from its baseline in points."""
    head = ["arm", "seeds"]
    for title in measures(plan):
        head += [title, "minus baseline"]
    rows: list[list[str]] = []
    for name, arm in plan.arms.items():
        of_seeds = by_arm[name]
        row = [name, f"{len(of_seeds)} of {len(arm.seeds)}"]
        for measure in measures(plan).values():
            row.append(cell([measure(record) for record in of_seeds.values()]))
            differences = paired(by_arm[arm.baseline], of_seeds, measure)
            row.append("" if name == arm.baseline else cell(differences, signed=True))
        rows.append(row)
    return table(head, rows)


def interaction(first: Sequence[float], second: Sequence[float]) -> tuple[float, float] | None:
    """Returns the mean of the first differences minus that of the second, and its standard error, in points."""
    if len(first) < 2 or len(second) < 2:
        return None
    difference = statistics.fmean(first) - statistics.fmean(second)
    variance = statistics.variance(first) / len(first) + statistics.variance(second) / len(second)
    return 100 * difference, 100 * math.sqrt(variance)


def lines_of_the_test(plan: Plan, by_arm: ByArm) -> list[str]:
    """Returns the plan's tests and its other measures, as lines of a list.

    A plan with tests of several arms names them as `tested`.
    """
    lines: list[str] = []
    for name in plan.written.get("tested", [plan.written["primary"]]):
        tested = plan.arms[name]
        for title, measure in measures(plan).items():
            found = compared(paired(by_arm[tested.baseline], by_arm[name], measure))
            text = "not run" if found is None else found.text
            lines.append(f"- {name} minus {tested.baseline}, {title.removesuffix(' %')}: {text}")
    if plan.written["without_style"] is None:
        return lines
    chosen = plan.arms[plan.written["primary"]]
    fixed = plan.arms[plan.written["without_style"]]
    both = interaction(
        paired(by_arm[chosen.baseline], by_arm[chosen.name], rollout_accuracy),
        paired(by_arm[fixed.baseline], by_arm[fixed.name], rollout_accuracy),
    )
    if both is not None:
        lines.append(f"- with free phrasings minus with one phrasing, rollouts: {both[0]:+.1f} ± {both[1]:.1f} points")
    return lines


def tables_of(plan: Plan, records: Sequence[Record]) -> str:
    """Returns all tables of the page."""
    by_arm = by_name_and_seed(records, kind="arm", names=list(plan.arms))
    seeds = sorted({seed for arm in plan.arms.values() for seed in arm.seeds})
    parts = [
        "\n".join(lines_of_the_test(plan, by_arm)),
        accuracy_table(plan, by_arm),
        seed_table(by_arm, rollout_accuracy, kind="arm", seeds=seeds),
        work_table({name: of_seeds for name, of_seeds in by_arm.items() if of_seeds}, kind="arm"),
    ]
    return "\n\n".join(parts)


def gates_table(plan: Plan, record: Mapping[str, Any]) -> str:
    """Returns a Markdown table of the figures that gates are about, by the labels of the record; in bold what fails."""
    bounds = plan.written["gates"]["bounds"]
    rows: list[list[str]] = []
    for label, measured in record.items():
        passed = verdicts(measured["figures"], bounds_of(bounds))
        row = [label]
        for name in bounds:
            value = measured["figures"][name]
            text = "undefined" if value is None else f"{value:.2f}"
            row.append(text if passed[name] else f"**{text}**")
        rows.append(row)
    wanted = [" ".join(_limit_text(*limit) for limit in bound.items()) for bound in bounds.values()]
    return table(["model and problems", *[name.replace("_", " ") for name in bounds]], [["asked for", *wanted], *rows])


def _limit_text(name: str, value: float) -> str:
    return f"{'≥' if name == 'least' else '≤'} {value:g}"


def write_gates(plan: Plan, record: Mapping[str, Any], *, page: Path = PAGE) -> None:
    """Writes the table of gates into the page."""
    write_table(page, gates_table(plan, record), program=f"{plan.program}.gates")


def write_records(plan: Plan, out: Path, *, page: Path = PAGE) -> None:
    """Writes the records of all finished runs, the page's tables, and its chart."""
    records = all_records(plan, out)
    plan.results.write_text(json.dumps({"plan": plan.written, "runs": records}, indent=1) + "\n", encoding="utf-8")
    write_table(page, tables_of(plan, records), program=plan.program)
    free = [name for name, arm in plan.arms.items() if arm.style == "free"]
    by_arm = by_name_and_seed(records, kind="arm", names=list(plan.arms))
    drawn = {name: by_arm[name] for name in free if by_arm[name]}
    if drawn:
        save_figure(comparison_charts(drawn, plan.written["baseline"]), plan.chart)
