"""The bytes that ranks send to each other."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from cepo.runtime import ray_backend
from lab.ranks import ROOT, counted, disagreements, trained
from lab.support.counting_rank import CountingRank


def test_2_ranks_send_each_other_what_arithmetic_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # where the counting workers' own module is found
    monkeypatch.setattr(ray_backend, "RankProcess", CountingRank)  # which `trained` sets, and this test sets back
    options = argparse.Namespace(method="cepo", prompts=4, group_size=2, steps=2, overrides=[])
    trained(options, "adapters", 2, tmp_path)
    row = counted("adapters", 2, tmp_path)
    assert disagreements([row]) == []
    assert all(bytes_sent > 0 for bytes_sent in row["to_other_ranks"]["counted"].values())
