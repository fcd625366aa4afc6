"""A run takes the threads that other programs leave free, and a resumed one as many as before."""

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
    """8 idle processors, torch not yet loaded, and no limit set; its files can be rewritten."""
    monkeypatch.setenv("OMP_NUM_THREADS", "")  # so that it is restored
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)), raising=False)
    monkeypatch.setattr(devices, "_LOAD", tmp_path / "loadavg")
    monkeypatch.setattr(devices, "_CPU_QUOTA", tmp_path / "cpu.max")
    (tmp_path / "loadavg").write_text("0.10 0.20 0.30 1/200 4711\n")
    return tmp_path


@pytest.mark.parametrize(
    ("load", "quota", "recorded", "expected"),
    [
        ("0.10 0.20 0.30 1/200 4711", "max 100000", None, None),
        ("5.90 0.20 0.30 7/200 4711", "max 100000", None, "threads: 2, as other programs keep about 6 of 8 processors busy"),
        ("40.0 0.20 0.30 41/200 4711", "max 100000", None, "threads: 1, as other programs keep about 40 of 8"),
        ("5.90 0.20 0.30 1/200 4711", "max 100000", None, None),  # they have just ended
        ("0.10 0.20 0.30 1/200 4711", "300000 100000", None, "threads: 3, as this process may use 3 of 8 processors"),
        ("0.10 0.20 0.30 1/200 4711", "50000 100000", None, "threads: 1, as this process may use 1 of 8 processors"),
        ("0.10 0.20 0.30 1/200 4711", "max 100000", 4, "threads: 4, as many as when the run began"),
        ("40.0 0.20 0.30 41/200 4711", "max 100000", 8, None),
    ],
)  # fmt: skip
def test_threads_are_as_many_as_processors_are_free(
    machine: Path, load: str, quota: str, recorded: int | None, expected: str | None
) -> None:
    (machine / "loadavg").write_text(f"{load}\n")
    (machine / "cpu.max").write_text(f"{quota}\n")
    said = devices.limit_threads(recorded)
    assert (said or "").startswith(expected or "")
    assert (said is None) == (expected is None)
    assert os.environ.get("OMP_NUM_THREADS") == (None if expected is None else expected.split()[1].rstrip(","))


def test_a_resumed_run_keeps_its_threads(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run under Ray shares the processors among its workers; another run folder has no number."""
    run = ["config=configs/microgeo/base.yaml", f"trainer.save_checkpoint_path={machine}"]
    (machine / "environment.json").write_text(json.dumps([{"threads": {"torch": 3}}]))
    assert limited_threads(load_config([*run, "trainer.launcher=ray"]).trainer) is None
    assert limited_threads(load_config([*run, "trainer.find_last_checkpoint=false"]).trainer) is None
    assert (limited_threads(load_config(run).trainer) or "").startswith("threads: 3, as many as when the run began")


def test_a_limit_of_the_user_stays(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (machine / "loadavg").write_text("9.00 0.20 0.30 10/200 4711\n")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert devices.limit_threads() is None
    assert os.environ["OMP_NUM_THREADS"] == "7"
