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
from training_runs import REPOSITORY, TWO_TEACHERS, Train, around

from cepo.trainer.loop import Trainer

pytestmark = pytest.mark.heavy

LIMIT = 31
"""The number found (60 before this test was written); it may fall, not rise."""


def test_a_prompt_passes_few_files(train: Train) -> None:
    files: set[str] = set()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and frame.f_code.co_name != "<module>" and path.is_relative_to(REPOSITORY / "cepo"):
            files.add(str(path.relative_to(REPOSITORY / "cepo")))

    def first(_: Trainer, ask: Any, step: int) -> Any:
        sys.setprofile(note)
        return ask(step)

    def last(_: Trainer, update: Any, *arguments: Any) -> Any:
        try:
            return update(*arguments)
        finally:
            sys.setprofile(None)

    def prepare(trainer: Trainer) -> None:
        around("ask", first)(trainer)
        around("update", last)(trainer)

    train(*TWO_TEACHERS, "trainer.max_steps=1", prepare=prepare)
    assert {"data/dataset.py", "trainer/loop.py", "losses/objective.py"} <= files
    assert len(files) <= LIMIT, f"{len(files)} files: {', '.join(sorted(files))}"
