"""JSON files and JSON lines that a test reads or changes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from cepo.files.trees import nested
from cepo.sections.reader import merged_trees


def read(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text(encoding="utf-8"))


def write(file: Path, tree: object) -> None:
    file.write_text(json.dumps(tree), encoding="utf-8")


def merge(file: Path, entries: Mapping[str, Any]) -> None:
    """Sets entries of a file, which need not exist, by their dotted keys."""
    tree = read(file) if file.exists() else {}
    write(file, merged_trees(tree, nested(entries)))


def read_lines(file: Path) -> list[Any]:
    """The rows of a file of JSON lines."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def write_lines(file: Path, rows: Iterable[Any]) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file
