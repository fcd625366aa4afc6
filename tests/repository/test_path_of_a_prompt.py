"""The stations that docs/architecture.md gives for a prompt are functions that exist in the files it names."""

from __future__ import annotations

import ast
import re
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
STATION = re.compile(r"^(\d+)\. `(cepo/[\w/]+\.py)`: `([\w.]+)` ", re.MULTILINE)


def functions_of(source: str) -> set[str]:
    """Names of functions, those of methods behind their class and a dot."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    body = ast.parse(source).body
    found = {node.name for node in body if isinstance(node, kinds)}
    for node in body:
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{each.name}" for each in node.body if isinstance(each, kinds)}
    return found


def test_a_prompts_stations_are_functions_that_exist() -> None:
    page = (REPOSITORY / "docs" / "architecture.md").read_text(encoding="utf-8")
    section = page.split("## The path of one prompt\n")[1].split("\n## ")[0]
    stations = STATION.findall(section)
    assert [int(number) for number, _, _ in stations] == list(range(1, 13))
    assert len(stations) == len(re.findall(r"^\d+\. ", section, re.MULTILINE))
    missing = [
        f"{file}: {name}"
        for _, file, name in stations
        if name not in functions_of((REPOSITORY / file).read_text(encoding="utf-8"))
    ]
    assert not missing, "\n".join(missing)
