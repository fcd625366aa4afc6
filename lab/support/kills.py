"""Kills a training command with SIGKILL at random moments, restarts it each time, and looks for what it left behind."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from lab.support.machine import ROOT

MARK = "CEPO_FAULTS_MARK"
SHARED_MEMORY, TEMPORARY = Path("/dev/shm"), Path("/tmp")
GRACE_SECONDS = 15.0
STEPS_PER_LIFE = 2.0
"""The longest time from the first step after a start to the kill, in undisturbed steps."""
EARLY_SHARE = 0.25
"""The share of kills before the first step after a start."""


@dataclass(frozen=True, kw_only=True)
class Pace:
    """The seconds that the undisturbed run took until its records were open, and per step."""

    start: float
    step: float


class Command:
    """A training command in its own process group, which can be killed and restarted.

    Its processes have a mark in their environment. Its temporary files are below `folder`, except those of Ray, whose
    sockets must have short names.
    """

    def __init__(self, folder: Path, arguments: Sequence[str]) -> None:
        self.run_folder, self._temporary = folder / "run", folder / "tmp"
        self._log, self._arguments, self._mark = folder / "command.log", arguments, uuid.uuid4().hex
        self._temporary.mkdir()
        self._before = set(_names())

    def start(self) -> subprocess.Popen[bytes]:
        paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
        own = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "TMPDIR": str(self._temporary), MARK: self._mark}
        with self._log.open("a") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "cepo.train", *self._arguments],
                env=os.environ | own,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def run_to_its_end(self) -> Pace:
        """Runs the command to its end and returns its pace; the records are opened when the first step begins."""
        begin = time.monotonic()
        process = self.start()
        self.wait_for_records(process, 0)
        start = time.monotonic() - begin
        if process.wait() != 0:
            raise RuntimeError(f"the command failed; see {self._log}:\n{self._log.read_text()[-2000:]}")
        num_steps = len((self.run_folder / "metrics.jsonl").read_text().splitlines())
        return Pace(start=start, step=(time.monotonic() - begin - start) / num_steps)

    def starts_recorded(self) -> int:
        """Returns when the environment of the last start was recorded, in nanoseconds; 0 before the first."""
        file = self.run_folder / "environment.json"
        return file.stat().st_mtime_ns if file.is_file() else 0

    def wait_for_records(self, process: subprocess.Popen[bytes], recorded: int) -> None:
        """Waits until the process has opened its records, or has ended."""
        while process.poll() is None and self.starts_recorded() == recorded:
            time.sleep(0.02)

    def left_behind(self) -> list[str]:
        """Returns what remains of the ended command: processes, shared memory, sockets, temporary, unfinished files."""
        deadline = time.monotonic() + GRACE_SECONDS
        while (processes := list(self._processes())) and time.monotonic() < deadline:
            time.sleep(0.5)
        # torch keeps compiled code there for later processes of the user.
        files = [path for path in self._temporary.iterdir() if not path.name.startswith("torchinductor_")]
        files += self.run_folder.glob(".*")
        return [*processes, *sorted(set(_names()) - self._before), *map(str, files)]

    def _processes(self) -> Iterator[str]:
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get(MARK) == self._mark and process.status() != psutil.STATUS_ZOMBIE:
                    yield f"process {process.pid} ({process.name()})"


def _names() -> Iterator[str]:
    yield from map(str, SHARED_MEMORY.iterdir())
    for folder in TEMPORARY.glob("cepo-*-*-*"):  # those of living processes belong to other runs
        if not Path(f"/proc/{folder.name.rsplit('-', maxsplit=2)[1]}").exists():
            yield str(folder)


def kill_and_restart(command: Command, pace: Pace, *, num_kills: int, seed: int) -> int:
    """Kills the command `num_kills` times, alternately its main process alone and its whole process group.

    A quarter of the kills are before the first step after a start, the others within its first two steps or their
    checkpoints. After the last kill the command runs to its end.

    Returns:
        The number of kills that hit a running process.
    """
    chance, kills = random.Random(seed), 0
    for number in range(num_kills):
        recorded, process = command.starts_recorded(), command.start()
        if chance.random() < EARLY_SHARE:
            delay = chance.uniform(0, pace.start)
        else:
            command.wait_for_records(process, recorded)
            delay = chance.uniform(0, STEPS_PER_LIFE * pace.step)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(delay)
        kills += process.poll() is None
        with contextlib.suppress(ProcessLookupError):
            (os.killpg if number % 2 else os.kill)(process.pid, signal.SIGKILL)
        process.wait()
    command.run_to_its_end()
    return kills
