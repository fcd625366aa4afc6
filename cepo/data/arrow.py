"""The library pyarrow as `pyarrow`, of type Any: it has no type annotations."""

from __future__ import annotations

import importlib
from typing import Any

pyarrow: Any = importlib.import_module("pyarrow")
for _name in ("ipc", "parquet", "types"):  # importing them makes them attributes of it
    importlib.import_module(f"pyarrow.{_name}")
