"""The record of the spoilt runs: each has its own fault named first, and the sound ones none."""

from __future__ import annotations

import json

import pytest

from lab.spoilt_runs import RUNS
from lab.support.tables import RESULTS

RECORD = json.loads((RESULTS / "spoilt_runs.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", RUNS)
def test_a_runs_own_fault_is_named_first(name: str) -> None:
    first = RUNS[name].first
    assert RECORD["runs"][name]["named"][:1] == ([] if first is None else [first])
