"""A run takes as many threads as it may use processors, and a resumed one as many as before."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from cepo import hardware as devices
from cepo.config import load_config
from cepo.preflight import limited_threads


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """8 processors, torch not yet loaded, and no limit set; its files can be rewritten."""
    monkeypatch.setenv("OMP_NUM_THREADS", "")  # so that it is restored
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)), raising=False)
    monkeypatch.setattr(devices, "_CPU_QUOTA", tmp_path / "cpu.max")
    return tmp_path


@pytest.mark.parametrize(
    ("quota", "recorded", "expected"),
    [
        ("max 100000", None, None),
        ("300000 100000", None, "threads: 3, as this process may use 3 of 8 processors"),
        ("50000 100000", None, "threads: 1, as this process may use 1 of 8 processors"),
        ("max 100000", 4, "threads: 4, as many as when the run began"),
        ("max 100000", 8, None),
    ],
)
def test_threads_are_as_many_as_processors_may_be_used(
    machine: Path, quota: str, recorded: int | None, expected: str | None
) -> None:
    (machine / "cpu.max").write_text(f"{quota}\n")
    if recorded is not None:
        (machine / "environment.json").write_text(json.dumps([{"threads": {"torch": recorded}}]))
    run = ["config=configs/microgeo/base.yaml", f"trainer.save_checkpoint_path={machine}"]
    said = limited_threads(load_config(run).trainer)
    assert (said or "").startswith(expected or "")
    assert (said is None) == (expected is None)
    assert os.environ.get("OMP_NUM_THREADS") == (None if expected is None else expected.split()[1].rstrip(","))


def test_a_resumed_run_keeps_its_threads(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run under Ray shares the processors among its workers; another run folder has no number; a user's limit stays."""
    run = ["config=configs/microgeo/base.yaml", f"trainer.save_checkpoint_path={machine}"]
    (machine / "environment.json").write_text(json.dumps([{"threads": {"torch": 3}}]))
    assert limited_threads(load_config([*run, "trainer.launcher=ray"]).trainer) is None
    assert limited_threads(load_config([*run, "trainer.find_last_checkpoint=false"]).trainer) is None
    assert (limited_threads(load_config(run).trainer) or "").startswith("threads: 3, as many as when the run began")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert limited_threads(load_config(run).trainer) is None
    assert os.environ["OMP_NUM_THREADS"] == "7"
