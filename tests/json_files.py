"""JSON files of a folder that a test changes."""

from __future__ import annotations

import json
from collections.abc import Mapping
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
