"""A whole run on a terminal: what happens before the first step, the numbers, and nothing left behind."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from terminals import plain, run_on_terminal

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.mark.heavy
def test_a_terminal_shows_phases_stages_and_numbers(tiny_run: list[str], tmp_path: Path) -> None:
    changes = [f"trainer.save_checkpoint_path={tmp_path}", "trainer.max_steps=2", "trainer.logger=[console,file]"]
    code, seen = run_on_terminal(
        [sys.executable, "-m", "cepo.train", *tiny_run, *changes],
        folder=REPOSITORY,
        environment={name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")},
        timeout=300,
    )
    shown = plain(seen)
    assert code == 0, shown[-3000:]
    # What lasts half a second is drawn; the stages of a tiny step may be shorter.
    assert "loading libraries and the tokenizer  " in shown
    last = [line.rstrip() for line in shown.splitlines() if "step 2/2" in line][-1]
    assert last.endswith("0 s left")
    assert "reward" in shown.rpartition("step 2/2")[2]
    assert "sample after step 2, " in shown
    assert "Traceback" not in shown
    assert seen.rfind("\x1b[?25h") > seen.rfind("\x1b[?25l") >= 0, "the cursor stays hidden"
