"""Reads what Triton compiled: the shared memory that each kernel needs, and the order of loads and barriers in PTX."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

_LOAD = re.compile(r"\bld\.global\S*\.[bfsu](?:8|16|32|64)\b")
_STORE = re.compile(r"\bst\.global\.v\d")
_BARRIER = re.compile(r"\b(?:bar|barrier(?:\.cta)?)\.sync\b")


def shared_memory() -> dict[str, int]:
    """Returns the largest shared memory in bytes of each kernel in this process's cache of compiled kernels."""
    found: dict[str, int] = {}
    folders = [Path(os.environ[name]) for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")]
    for file in (file for folder in folders for file in folder.rglob("*.json")):
        facts = json.loads(file.read_text(encoding="utf-8"))
        if isinstance(facts, dict) and {"name", "shared"} <= set(facts):
            found[facts["name"]] = max(facts["shared"], found.get(facts["name"], 0))
    return found


def loads_of_single_entries_are_safe(ptx: str) -> bool:
    """Returns whether a barrier separates the last load of a single entry from the first vector of stored logits.

    The language head's kernel reads its target and the target's logit as single entries, and overwrites the logits in
    vectors. Without a barrier between the two, a warp may overwrite the logit before another has read it.
    """
    lines = ptx.splitlines()
    stores = [number for number, line in enumerate(lines) if _STORE.search(line)]
    loads = [number for number, line in enumerate(lines) if _LOAD.search(line) and ".v" not in line]
    assert loads, "the kernel has no load of a single entry: its PTX is not what this check expects"
    if not stores:
        return True
    return any(_BARRIER.search(line) for line in lines[max(loads) + 1 : min(stores)])
