"""The tables of units and signs, in TOML files beside this module."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any


def _table(name: str) -> dict[str, Any]:
    text = (Path(__file__).parent / name).read_text(encoding="utf-8")
    return tomllib.loads(text)


UNITS = _table("units.toml")
SIGNS = _table("signs.toml")
