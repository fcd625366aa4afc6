"""A run that somebody watches: a live view on a terminal, plain lines elsewhere, a line a minute in a log; texts stay texts."""

from __future__ import annotations

import io
import logging
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from terminals import INTERRUPT, plain, run_on_terminal

from cepo.run_folder.sinks.base import RunDescription
from cepo.run_folder.sinks.tracker import build_sink
from cepo.terminal import progress
from cepo.terminal.progress import Progress, shown

REPOSITORY = Path(__file__).resolve().parents[2]
HOSTILE = "\x1b]0;title\x07\x1b[31mred [bold]x[/bold] \udc80 \u202eevil\x9b2J\nnext"
HARMLESS = "�]0;title�[31mred [bold]x[/bold] ? �evil�2J next"
RUN = f"""
import logging, sys, time
from pathlib import Path
from cepo.terminal import interrupts
from cepo.terminal.progress import live_view, phase, shown
from cepo.run_folder.sinks.base import RunDescription
from cepo.run_folder.sinks.tracker import build_sink
sys.path.insert(0, {str(REPOSITORY / "tests")!r})
from run_folders import group, rollout

def train():
    with interrupts.handled(), live_view():
        logging.basicConfig(level=logging.INFO, format="%(message)s")
        with phase("loading the model"):
            time.sleep(1.1)
        run = RunDescription(folder=Path("none"), config_text="", max_steps=4, experiment="geo3k-[red]cepo")
        sink = build_sink("console", run)
        for step in (1, 2, 3):
            for _ in shown(range(10), "sampling responses"):
                time.sleep(0.07)
            sink.log_rollouts([group(step, [rollout(right=True, tokens=[{HOSTILE!r}])])])
            sink.log_metrics(step, {{"reward/mean": 0.25 * step, "actor/grad_norm": 1 / step, "timing_s/step": 0.7}})
        sink.log_metrics(3, {{"val/accuracy": 0.5, "val/num_samples": 100}})
        sink.log_generations(3, [{{"response": {HOSTILE!r}, "accuracy": 1.0}}])
        logging.getLogger("cepo").info("checkpoint written")
        print("a library prints")

try:
    train()
except KeyboardInterrupt:
    interrupts.exit_process(130)
"""
LINES = [
    "loading the model",
    "loading the model: done after 1 s",
    "step 1/4  reward 0.250  grad 1  0.70 s  ETA 2 s",
    "step 2/4  reward 0.500  grad 0.5  0.70 s  ETA 1 s",
    "step 3/4  reward 0.750  grad 0.333  0.70 s  ETA 1 s",
    "step 3/4  validation accuracy 0.500 (0.404 to 0.596, n 100)",
    f"  accuracy 1: {HARMLESS}",
    "checkpoint written",
    "a library prints",
]
COMMAND = [sys.executable, "-c", RUN]
INHERITED = {name: value for name, value in os.environ.items() if name not in ("FORCE_COLOR", "COLUMNS", "LINES")}
PATHS = os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
ENVIRONMENT = {**INHERITED, "PYTHONPATH": PATHS, "PYTHONUNBUFFERED": "1"}


def assert_cursor_is_back(seen: str) -> None:
    assert seen.rfind("\x1b[?25h") > seen.rfind("\x1b[?25l") >= 0


@pytest.mark.heavy
def test_a_pipe_gets_one_plain_line_per_step(tmp_path: Path) -> None:
    with (tmp_path / "lines").open("w") as file:
        subprocess.run(COMMAND, cwd=tmp_path, env=ENVIRONMENT, stdout=file, stderr=file, timeout=60, check=True)
    assert (tmp_path / "lines").read_text().splitlines() == LINES


@pytest.mark.heavy
def test_a_terminal_gets_a_live_view(tmp_path: Path) -> None:
    """It has the phase and the work while they last, and every line above them."""
    code, seen = run_on_terminal(COMMAND, folder=tmp_path, environment=ENVIRONMENT)
    assert code == 0
    assert re.search("[6-9]0%", plain(seen))
    assert {line.strip() for line in LINES[1:]} <= {line.strip() for line in plain(seen).splitlines()}
    assert "\x1b]" not in seen
    assert "\x07" not in seen
    assert_cursor_is_back(seen)


@pytest.mark.heavy
def test_a_file_gets_its_lines_while_a_terminal_watches(tmp_path: Path) -> None:
    """`cepo train > lines` on a terminal: steps in the file, work and log on the terminal."""
    with (tmp_path / "lines").open("w") as file:
        code, seen = run_on_terminal(COMMAND, folder=tmp_path, environment=ENVIRONMENT, stdout=file)
    assert code == 0
    on_terminal = {"loading the model", "loading the model: done after 1 s", "checkpoint written"}
    assert (tmp_path / "lines").read_text().splitlines() == [line for line in LINES if line not in on_terminal]
    assert "sampling responses" in plain(seen)
    assert "checkpoint written" in plain(seen)


@pytest.mark.heavy
def test_ctrl_c_gives_the_cursor_back(tmp_path: Path) -> None:
    pressed = ("sampling", INTERRUPT)
    code, seen = run_on_terminal(COMMAND, folder=tmp_path, environment=ENVIRONMENT, press_after=pressed)
    assert code == 130
    assert_cursor_is_back(seen)


@pytest.mark.parametrize(("encoding", "expected"), [("utf-8", HARMLESS), ("ascii", HARMLESS.replace("�", "?"))])
def test_a_sample_is_one_line_without_what_a_terminal_obeys(
    encoding: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr("sys.stdout", output)
    sink = build_sink("console", RunDescription(folder=Path("none"), config_text="", max_steps=4))
    sink.log_generations(1, [{"response": HOSTILE}, {"response": "a" * 100_000}])
    output.seek(0)
    assert output.read().splitlines() == [f"  sample: {expected}", f"  sample: {'a' * 97}..."]


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_log_has_lines_after_5_and_15_s_and_each_minute(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Items of 25 s: lines at 25 s, past 5 and 15, then past each full minute. Work of less than 5 s says nothing."""
    now = 0.0
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(progress, "_start_watcher", lambda: None)
    with caplog.at_level(logging.INFO, logger="cepo"):
        for seconds in (25, 4, 0.4):
            for _ in shown(range(10), "scoring"):
                now += seconds
    assert caplog.messages == [
        "scoring: 1 of 10 after 25 s (0.04 per second), about 225 s left",
        "scoring: 3 of 10 after 75 s (0.04 per second), about 175 s left",
        "scoring: 5 of 10 after 125 s (0.04 per second), about 125 s left",
        "scoring: 8 of 10 after 200 s (0.04 per second), about 50 s left",
        "scoring: 10 of 10 after 250 s (0.04 per second), about 0 s left",
        "scoring: 2 of 10 after 8 s (0.25 per second), about 32 s left",
        "scoring: 4 of 10 after 16 s (0.25 per second), about 24 s left",
    ]


def test_work_that_finishes_nothing_is_not_silent(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The thread writes the line; the innermost task is named after the one that has been silent for too long."""
    monkeypatch.setattr(progress, "FIRST_LINES_SECONDS", (0.2, 0.4))
    monkeypatch.setattr(progress, "_SECONDS_BETWEEN_LOOKS", 0.05)
    monkeypatch.setattr(progress, "_watcher", None)
    with caplog.at_level(logging.INFO, logger="cepo"), Progress("validate", None):
        time.sleep(0.15)
        with Progress("sampling responses", 512):
            time.sleep(0.15)
    assert caplog.messages == ["validate (0 s): sampling responses: 0 of 512 after 0 s"]


def test_a_line_says_how_far_work_is_of_which_nothing_has_ended() -> None:
    task = Progress("sampling responses", 256)
    task.reach(0, "361 steps of vLLM")
    assert task.line(task._start + 5) == "sampling responses: 0 of 256 after 5 s, 361 steps of vLLM"
    task.reach(64, "400 steps of vLLM")
    line = "sampling responses: 64 of 256 after 8 s, 400 steps of vLLM"
    assert task.line(task._start + 8) == f"{line} (8 per second), about 24 s left"
    # On an H200 the last 253 of 256 responses, which were predicted to take 407 s more, took one.
    uneven = Progress("sampling responses", 256, is_even=False)
    uneven.reach(64, "400 steps of vLLM")
    assert uneven.line(uneven._start + 8) == line


@pytest.mark.heavy
@pytest.mark.parametrize(("seconds", "draws", "drawn"), [(1.5, True, True), (0.0, True, False), (1.5, False, False)])
def test_a_terminal_gets_a_bar_after_half_a_second(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, seconds: float, draws: bool, drawn: bool
) -> None:
    terminal = _Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with Progress("updating", 1, draws=draws) as bar:
        time.sleep(seconds)
        bar.update()
    assert ("updating" in terminal.getvalue()) == drawn
    assert caplog.messages == []
