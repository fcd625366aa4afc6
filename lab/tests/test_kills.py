"""A command that is killed with -9 and given again, or stopped and continued, ends as if nothing had happened."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

pytest.importorskip("ray")  # the module also injects faults under Ray
from lab.faults import arguments_of, differences, killed_runs
from lab.support.kills import Command

REWARD_SECONDS = 2.0


@pytest.mark.heavy
def test_three_kills_change_no_bit_and_leave_nothing(tmp_path: Path) -> None:
    """The main process alone, its whole group, and the main process again; 13 steps with teachers."""
    found = killed_runs(tmp_path, "local", [], num_kills=3)
    assert found["differences"] == []
    assert (found["faults"], found["planned"], found["steps_recorded"]) == (3, 3, 13)


def rows(command: Command) -> int:
    file = command.run_folder / "metrics.jsonl"
    return len(file.read_text().splitlines()) if file.is_file() else 0


def paused(command: Command) -> list[int]:
    """Runs the command, stops it and all its processes at five moments, each time for longer than a reward may take."""
    process = command.start()
    tree, stopped = psutil.Process(process.pid), []
    moments: list[Callable[[], object]] = [
        lambda: tree.children(recursive=True),  # the first process of its own has started
        command.starts_recorded,
        *((lambda number=number: rows(command) >= number) for number in (1, 3)),
        lambda: list(command.run_folder.glob("global_step_4*")),  # a checkpoint has begun
    ]
    for reached in moments:
        while process.poll() is None and not reached():
            time.sleep(0.01)
        everything = [tree, *tree.children(recursive=True)]
        for each in everything:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.send_signal(signal.SIGSTOP)
        stopped.append(len(everything))
        time.sleep(2 * REWARD_SECONDS)
        for each in everything:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.send_signal(signal.SIGCONT)
    assert process.wait() == 0, (command.run_folder.parent / "command.log").read_text()[-3000:]
    return stopped


@pytest.mark.heavy
def test_five_pauses_change_no_bit_of_a_run(tmp_path: Path) -> None:
    """At the start, when the records are opened, in two steps and at a checkpoint; as of a closed laptop, or Ctrl-Z."""
    commands: dict[str, Command] = {}
    for name in ("undisturbed", "paused"):
        folder = tmp_path / name
        folder.mkdir()
        settings = [
            "trainer.n_gpus_per_node=1",
            "trainer.max_steps=6",
            f"worker.reward.timeout_seconds={REWARD_SECONDS}",
        ]
        commands[name] = Command(folder, [*arguments_of(folder, []), *settings])
    commands["undisturbed"].run_to_its_end()
    assert min(paused(commands["paused"])) >= 2
    assert differences(tmp_path / "paused", tmp_path / "undisturbed", 6) == []
