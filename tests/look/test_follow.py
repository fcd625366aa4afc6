"""`cepo look --follow`: the page of a folder that a trainer is writing into."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from run_folders import wait_for

REPOSITORY = Path(__file__).parents[2]


def step_file(folder: Path, step: int) -> None:
    """Writes a step's file as verl does: rows with input, output, score and step, the last line still incomplete."""
    rows = [
        {"input": f"Problem {number}?", "output": f"step {step}, response {place}", "score": place, "step": step}
        for number in range(4)
        for place in range(2)
    ]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / f"{step}.jsonl").write_text(text + '{"input": "Prob', encoding="utf-8")


@pytest.mark.heavy
def test_the_page_follows_a_folder_until_ctrl_c(tmp_path: Path) -> None:
    """It waits for the first file, writes a page of 8 rollouts, then one of 16, and ends with status 0."""
    folder = tmp_path / "rollouts"
    folder.mkdir()
    page = tmp_path / "look.html"
    following = subprocess.Popen(
        [sys.executable, "-m", "cepo", "look", str(folder), "--follow", "--out", str(page)],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        # A shell that starts a command in the background has it ignore Ctrl-C, which its children inherit.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        assert following.stderr is not None
        assert any(line.startswith(f"waiting: {folder} has no rollouts") for line in following.stderr)
        step_file(folder, 1)
        wait_for(page, "8 of 8 responses")
        step_file(folder, 2)
        wait_for(page, "16 of 16 responses")
        assert following.stdout is not None
        assert following.stdout.readline().startswith("verl's rollout_data_dir: 8 rollouts in 1 files")
        following.send_signal(signal.SIGINT)
        _, said = following.communicate(timeout=30)
    finally:
        following.kill()
        following.wait()
    assert following.returncode == 0
    assert said == ""
