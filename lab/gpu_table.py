"""Prints what `scripts/gpu_check.sh` has found so far as one table: python -m lab.gpu_table FOLDER."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from lab.support.tables import table

NOT_MEASURED = "not measured"


def lines_of_steps(found: dict[str, Any]) -> list[tuple[str, str]]:
    """Returns the start, and each stage's seconds in the first and in the last step."""
    first, last = found["steps"][0], found["steps"][-1]
    lines = [("training: start and end, s", f"{found['start_seconds']:.0f}")]
    for name in sorted(key for key in last if key.startswith("timing_s/")):
        lines.append((f"training: {name}, first and last step", f"{first.get(name, 0.0):.2f}, {last[name]:.2f}"))
    for name in (
        "actor/grad_norm",
        "perf/max_memory_allocated_gb",
        "perf/max_memory_reserved_gb",
        "work/tokens_computed",
    ):
        if name in last:
            lines.append((f"training: {name}", f"{last[name]:,.1f}"))
    return lines


def lines_of_levers(found: list[dict[str, Any]]) -> list[tuple[str, str]]:
    lines: list[tuple[str, str]] = []
    for variant in found:
        words = variant.get("failed", "")
        if not words:
            score, update = variant["score"], variant["update"]
            words = (
                f"update {update['tokens_per_second']:,.0f} tokens/s in {variant['passes']} passes, "
                f"{update['gigabytes']:.1f} GB; score {score['tokens_per_second']:,.0f} tokens/s; "
                f"first update {variant['first_update_seconds']:.1f} s"
            )
        lines.append((f"levers: {variant['name']}", words))
    return lines


def lines(folder: Path) -> list[tuple[str, str]]:
    """Returns what the folder's files say; a part that left none is said to be unmeasured."""
    found: list[tuple[str, str]] = []
    for name, of_part in (("steps.json", lines_of_steps), ("levers.json", lines_of_levers)):
        file = folder / name
        if not file.is_file():
            found.append((name.removesuffix(".json"), NOT_MEASURED))
            continue
        found += of_part(json.loads(file.read_text(encoding="utf-8")))  # type: ignore[operator]
    return found


if __name__ == "__main__":
    print(table(["what", "found"], lines(Path(sys.argv[1]))))
