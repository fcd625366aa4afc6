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


def state() -> tuple[object, ...]:
    return (
        os.environ.get("CEPO_TEST_TURN"),
        Path.cwd(),
        [logging.getLogger(name).level for name in ("", "cepo", "cepo.trainer.loop")],
        signal.getsignal(signal.SIGTERM),
        torch.get_num_threads(),
        available_estimators(),
        list(sys.path),
    )


_found: list[tuple[object, ...]] = []


@pytest.mark.parametrize("turn", ["first", "second"])
def test_each_test_finds_the_process_as_the_first_did(turn: str, tmp_path: Path) -> None:
    """The second finds nothing of what the first has left behind."""
    _found.append(state())
    assert _found[-1] == _found[0]
    os.environ["CEPO_TEST_TURN"] = turn
    os.chdir(tmp_path)
    logging.getLogger("cepo").setLevel(logging.INFO)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    torch.set_num_threads(torch.get_num_threads() + 1)
    register_estimator("left_behind")(type("LeftBehind", (Estimator,), {}))
    sys.path.append("left behind")
    assert all(one != other for one, other in zip(state(), _found[0], strict=True))
