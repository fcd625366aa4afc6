"""Writes the results of a benchmark: a JSON file and the same figures as Markdown tables."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lab.support.machine import ROOT
from lab.support.paired import Record, Summary, mean_of, median_of, summary

RESULTS = ROOT / "lab" / "results"


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def spread(found: Summary, digits: int = 3) -> str:
    """Formats a summary as `median (lower quartile-upper quartile)`."""
    return f"{found.median:.{digits}f} ({found.lower_quartile:.{digits}f}-{found.upper_quartile:.{digits}f})"


def side_summary(records: Sequence[Record]) -> dict[str, Any]:
    """Returns the medians of one side's times and the means of its counts."""
    return {
        "seconds": summary([record["seconds"] for record in records]).record,
        "processor_seconds": summary([record["processor_seconds"] for record in records]).record,
        "stage_seconds": median_of(records, "stages"),
        "tokens": mean_of(records, "tokens"),
        "flops": mean_of(records, "flops"),
        "counts": mean_of(records, "counts"),
    }


def stage_rows(sides: dict[str, dict[str, Any]]) -> list[list[str]]:
    """Returns one row per side and stage: seconds, tokens, GFLOP."""
    rows = []
    for name, side in sides.items():
        for stage in dict.fromkeys([*side["stage_seconds"], *side["tokens"]]):
            seconds, tokens, flops = (side[key].get(stage) for key in ("stage_seconds", "tokens", "flops"))
            counted = ["" if tokens is None else f"{tokens:,.0f}", "" if flops is None else f"{flops / 1e9:,.2f}"]
            rows.append([name, stage, "" if seconds is None else f"{seconds:.3f}", *counted])
    return rows


def save(record: dict[str, Any], tables: Sequence[str], out: Path) -> None:
    """Writes `out` (JSON) and prints the tables."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    print("\n\n".join(tables))
