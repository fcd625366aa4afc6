"""`cepo report RUN --watch` in a process of its own, beside a run that goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from run_folders import validated, write_run

from cepo.tracking.run_folder import encode_line

REPOSITORY = Path(__file__).resolve().parents[2]


def wait_for(page: Path, text: str) -> None:
    deadline = time.monotonic() + 60
    while not (page.is_file() and text in page.read_text("utf-8")):
        assert time.monotonic() < deadline, f"{page} never had {text}"
        time.sleep(0.1)


@pytest.mark.heavy
def test_the_page_follows_the_run_until_ctrl_c(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", validated(0.25, 0.5))
    watch = subprocess.Popen(
        [sys.executable, "-m", "cepo", "report", str(run), "--watch"],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "COLUMNS": "200", "PYTHONUNBUFFERED": "1"},
        # A shell that starts a command in the background has it ignore Ctrl-C, which its children inherit.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        wait_for(run / "report.html", 'data-value="0.5"')
        with (run / "metrics.jsonl").open("ab") as file:
            file.write(encode_line({"step": 2, "reward/mean": 0.8125}) + b'{"step": 3, "rewa')
        wait_for(run / "report.html", 'data-value="0.8125"')
        assert watch.stdout is not None
        # The page is there before its line is printed, which Ctrl-C must not precede.
        assert any(line == f"page after step 2: {run / 'report.html'}\n" for line in watch.stdout)
        watch.send_signal(signal.SIGINT)
        watch.communicate(timeout=30)
    finally:
        watch.kill()
        watch.wait()
    assert watch.returncode == 0
