"""What trackers with runs of their own share: which of these a resumed run goes on with, and the settings as a tree."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from cepo.tracking.base import RunDescription
from cepo.tracking.records import TRACKERS_FILE, write_atomically


def earlier_run(run: RunDescription, tracker: str) -> str | None:
    """The tracker's identifier of the run that `run` resumes; None for a run from the start or one it never saw."""
    return _known(run).get(tracker) if run.resumed_step is not None else None


def remember_run(run: RunDescription, tracker: str, identifier: str) -> None:
    """Notes the tracker's identifier in the run folder, where a resumed run finds it."""
    run.folder.mkdir(parents=True, exist_ok=True)
    known = _known(run) | {tracker: identifier}
    write_atomically(run.folder / TRACKERS_FILE, json.dumps(known, indent=2) + "\n")


def config_tree(run: RunDescription) -> dict[str, Any]:
    """The resolved configuration as nested mappings."""
    return yaml.safe_load(run.config_text) or {}


def flat_settings(tree: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, str]]:
    """Dotted names and values of a nested configuration."""
    for key, value in tree.items():
        name = f"{path}{key}"
        if isinstance(value, Mapping):
            yield from flat_settings(value, f"{name}.")
        else:
            yield name, str(value)


def finite_or_nan(value: float) -> float:
    """NaN in place of an infinity, which some trackers store as the largest float."""
    return float(value) if math.isfinite(value) else math.nan


def _known(run: RunDescription) -> dict[str, str]:
    path = run.folder / TRACKERS_FILE
    return json.loads(path.read_text("utf-8")) if path.exists() else {}
