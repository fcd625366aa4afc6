"""The library pyarrow as `pyarrow`, of type Any: it has no type annotations."""

from __future__ import annotations

from typing import Any

import pyarrow as untyped  # pyright: ignore[reportMissingTypeStubs]
import pyarrow.ipc  # pyright: ignore[reportMissingTypeStubs, reportUnusedImport]  # importing these makes them attributes of it
import pyarrow.parquet  # pyright: ignore[reportMissingTypeStubs, reportUnusedImport]
import pyarrow.types  # pyright: ignore[reportMissingTypeStubs, reportUnusedImport]

pyarrow: Any = untyped
