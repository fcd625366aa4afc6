"""Tests of one process do not notice each other, whatever they or the code under test change in it."""

from __future__ import annotations

import logging
import os
import signal
import sys
from pathlib import Path

import pytest
import torch

from cepo.algorithms import Estimator, available_estimators, register_estimator


def state() -> dict[str, object]:
    return {
        "environment": os.environ.get("CEPO_TEST_TURN"),
        "folder": Path.cwd(),
        "log levels": [logging.getLogger(name).level for name in ("", "cepo", "cepo.trainer.loop")],
        "handler": signal.getsignal(signal.SIGTERM),
        "threads": torch.get_num_threads(),
        "methods": available_estimators(),
        "import path": list(sys.path),
    }


_found: list[dict[str, object]] = []


@pytest.mark.parametrize("turn", ["first", "second"])
def test_each_test_finds_the_process_as_the_first_did(turn: str, tmp_path: Path) -> None:
    _found.append(state())
    assert _found[-1] == _found[0]
    os.environ["CEPO_TEST_TURN"] = turn
    os.chdir(tmp_path)
    logging.getLogger("cepo").setLevel(logging.DEBUG)  # programs set INFO; what a fixture of a module set stays
    signal.signal(signal.SIGTERM, lambda *_: None)
    torch.set_num_threads(torch.get_num_threads() + 1)
    register_estimator("left_behind")(type("LeftBehind", (Estimator,), {"signal": lambda *_, **__: None}))
    sys.path.append("left behind")
    assert [name for name, value in state().items() if value == _found[0][name]] == []
