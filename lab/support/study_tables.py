"""Builds the table of the study's page that compares arms by accuracy on held-out problems."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lab.support.study_plan import BASELINE
from lab.support.study_records import Record, final
from lab.support.study_statistics import BySeed, adjusted_cells, cell, paired, untrained
from lab.support.tables import table


def arm_table(runs: Callable[[str], BySeed], arms: Sequence[str], seeds: Sequence[int]) -> str:
    """Returns final accuracies of the arms and their differences from the baseline's; `runs(arm)` returns runs by seed."""
    base = runs(BASELINE)
    found = {arm: runs(arm) for arm in arms}
    differences = {arm: paired(base, own) for arm, own in found.items() if arm != BASELINE}
    adjusted = adjusted_cells(differences)
    begun = [("sampled", untrained), ("greedy", lambda record: record["greedy"]["0"])]
    rows = [["untrained", len(base), "", *(cell([m(r) for r in base.values()]) for _, m in begun), "", "", ""]]
    for arm, own in found.items():
        rate = next((f"{record['rate']:g}" for record in own.values()), "")
        ends = [cell([measure(record) for record in own.values()]) for measure in (final, _greedy)]
        if not own:
            rows.append([arm, f"0 of {len(seeds)}", "", "not run", "not run", "", "", ""])
            continue
        compared = [
            "" if arm == BASELINE else cell(differences[arm], signed=True),
            adjusted.get(arm, ""),
            "" if arm == BASELINE else cell(paired(base, own, _greedy), signed=True),
        ]
        rows.append([arm, f"{len(own)} of {len(seeds)}", rate, *ends, *compared])
    head = ["arm", "runs", "rate", "sampled %", "greedy %", f"sampled - {BASELINE}", "p, Holm", f"greedy - {BASELINE}"]
    return table(head, rows)


def _greedy(record: Record) -> float:
    return final(record, "greedy")
