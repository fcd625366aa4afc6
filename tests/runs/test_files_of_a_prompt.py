"""How many files of the package a prompt passes through, from its row to the gradient of its loss.

A file counts if one of its functions runs in the trainer's thread between the first call of `Trainer.ask` and the end of
the first update, in a step of the method of the paper with its own sampling on one device.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from training_runs import EVERY_WRONG_ROLLOUT_TEACHES, REPOSITORY, run

from cepo.trainer.loop import Trainer

pytestmark = pytest.mark.heavy

LIMIT = 45
"""The number found (60 before this test was written); it may fall, not rise."""
PACKAGE = str(REPOSITORY / "cepo")


def watch(trainer: Trainer, files: set[str]) -> None:
    """Collects the files in whose functions the step's stages before its record run."""

    def note(frame: FrameType, event: str, argument: Any) -> None:
        name = frame.f_code.co_filename
        if event == "call" and frame.f_code.co_name != "<module>" and name.startswith(PACKAGE):
            files.add(name.removeprefix(PACKAGE + "/"))

    ask, update = trainer.ask, trainer.update

    def first(step: int) -> Any:
        sys.setprofile(note)
        return ask(step)

    def last(*arguments: Any) -> Any:
        try:
            return update(*arguments)
        finally:
            sys.setprofile(None)

    trainer.ask, trainer.update = first, last  # type: ignore[method-assign]


def test_a_prompt_passes_few_files(tiny_run: list[str], tmp_path: Path) -> None:
    files: set[str] = set()
    overrides = ["algorithm.adv_estimator=cepo", EVERY_WRONG_ROLLOUT_TEACHES, "trainer.max_steps=1"]
    run(tiny_run, *overrides, folder=tmp_path / "run", prepare=lambda trainer: watch(trainer, files))
    assert {"data/dataset.py", "trainer/loop.py", "losses/objective.py"} <= files
    assert len(files) <= LIMIT, f"{len(files)} files: {', '.join(sorted(files))}"
