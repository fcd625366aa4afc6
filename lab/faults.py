"""Injects faults into training and checks that every run ends as if nothing had happened.

    python3 -m lab.faults [--only NAME] [--kills 20] [config=FILE] [a.b.c=value ...]

One run under Ray is undisturbed. Others with the same settings have faults: workers killed at random points of every
stage, damaged checkpoints, full disks, slow or dying reward processes, stopped ranks. Two more runs, one in a single
process and one under Ray, are killed with SIGKILL at 20 random moments each (the main process or the whole process
group) and restarted.

Each run must finish with every step recorded once, and with weights, optimizer state and metrics bitwise equal to those
of the undisturbed run. A killed run must leave no process, shared memory, socket or temporary file behind; nothing else
may create shared memory during the runs. The exit code is 1 if any run fails this. All runs take about half an hour.
`--only` selects runs; the record keeps the last outcome of each.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import logging
import os
import random
import resource
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cepo.config import check_config, load_config
from cepo.runtime.network import prepare_own_cluster
from cepo.train import train
from cepo.trainer.loop import Trainer
from lab.support.kills import Command, kill_and_restart
from lab.support.machine import ROOT, machine_record
from lab.support.tables import RESULTS, save

prepare_own_cluster()  # before the next lines import Ray
import cepo.runtime.ray_backend as ray_backend  # noqa: E402
from cepo.runtime.ray_backend import Ranks  # noqa: E402

NUM_STEPS = 5
STAGES = {
    "sampling": "generate",
    "scoring": "score",
    "update": "update",
    "weight sync": "synchronise_rollout",
    "end of step": "finish_step",
    "checkpoint": "save",
}
FULL_DISK_BYTES = 50_000
REWARD = """
import os, pathlib, time
from cepo.rewards.math import compute_score as plain
HERE = pathlib.Path(__file__).parent

def compute_score(samples):
    slow, dead = HERE / "slow", HERE / "dead"
    if slow.exists():
        slow.unlink(missing_ok=True)
        time.sleep(4)
    if dead.exists():
        dead.unlink(missing_ok=True)
        os._exit(1)
    return plain(samples)
"""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault; `part` is its moment in the stage, as a share of the stage's shortest time in the undisturbed run."""

    kind: str
    step: int
    stage: str
    rank: int = 0
    part: float = 0.0


@dataclass
class Injector:
    """The pending faults, and the facts about the undisturbed run.

    `struck` are the faults that took place: a process that ended before its moment was not killed.
    """

    folder: Path
    waiting: list[Fault] = field(default_factory=list)
    struck: list[Fault] = field(default_factory=list)
    is_undisturbed: bool = False
    step: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    visited: set[tuple[int, str]] = field(default_factory=set)

    def before(self, ranks: Ranks, method: str) -> None:
        """Injects the faults that are due when the ranks begin `method`, and records that the run reached it."""
        self.visited.add((self.step, method))
        for fault in list(self.waiting):
            if fault.step == self.step and STAGES.get(fault.stage, fault.stage) == method:
                self.waiting.remove(fault)
                print(f"  step {fault.step}, {fault.stage}: {fault.kind}, rank {fault.rank}", flush=True)
                self._strike(fault, ranks, method)

    def _strike(self, fault: Fault, ranks: Ranks, method: str) -> None:
        process = ranks.locations[fault.rank].process
        delay = fault.part * self.seconds.get(method, 0.1)
        if fault.kind in ("slow reward", "reward process dies"):
            (self.folder / ("slow" if fault.kind == "slow reward" else "dead")).touch()
            self.struck.append(fault)
        elif fault.kind == "full disk":
            for location in ranks.locations:
                resource.prlimit(location.process, resource.RLIMIT_FSIZE, (FULL_DISK_BYTES, resource.RLIM_INFINITY))
            self.struck.append(fault)
        else:
            if fault.kind == "damaged checkpoint, worker killed":
                damage_last_checkpoint(self.folder)
            number = signal.SIGSTOP if fault.kind == "worker stopped" else signal.SIGKILL
            threading.Timer(delay, self._signal, (fault, process, number)).start()

    def _signal(self, fault: Fault, process: int, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, number)
            self.struck.append(fault)

    def after(self, ranks: Ranks, method: str, seconds: float) -> None:
        """Removes the limit of the disk, and records the stage's shortest time in the undisturbed run."""
        if self.is_undisturbed:
            self.seconds[method] = min(seconds, self.seconds.get(method, seconds))
        if method == "save":
            for location in ranks.locations:
                limits = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
                with contextlib.suppress(ProcessLookupError):
                    resource.prlimit(location.process, resource.RLIMIT_FSIZE, limits)


INJECTOR = Injector(Path())


class FaultyRanks(Ranks):
    """The ranks of a run, whose calls the injector intercepts."""

    def build(self, content: bytes) -> list[Any]:
        INJECTOR.before(self, "build")
        return super().build(content)

    def call(self, method: str, messages: Sequence[bytes], **options: Any) -> list[Any]:
        INJECTOR.before(self, method)
        start = time.monotonic()
        try:
            return super().call(method, messages, **options)
        finally:
            INJECTOR.after(self, method, time.monotonic() - start)


def damage_last_checkpoint(folder: Path) -> None:
    """Flips a bit in the middle of the last checkpoint's largest file."""
    last = max(folder.glob("run/global_step_*"), key=lambda path: int(path.name.rpartition("_")[2]))
    largest = max((path for path in last.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)


def planned_runs(visited: set[tuple[int, str]]) -> dict[str, list[Fault]]:
    """Returns a run per stage with a kill in each step from the second on, and runs with the other faults.

    `visited` are the steps and methods of the undisturbed run: a step in which all groups agree is not scored.
    """
    chance = random.Random(1)

    def fault(kind: str, step: int, stage: str) -> Fault:
        return Fault(kind=kind, step=step, stage=stage, rank=chance.randrange(2), part=chance.random())

    runs = {
        f"worker killed: {stage}": [
            fault("worker killed", step, stage) for step in range(2, NUM_STEPS + 1) if (step, method) in visited
        ]
        for stage, method in STAGES.items()
    }
    runs["worker killed: loading"] = [
        fault("worker killed", 0, "build"),
        fault("worker killed", 2, "update"),
        fault("worker killed", 2, "build"),
    ]
    runs["hung rank"] = [fault("worker stopped", 2, "update"), fault("worker stopped", 4, "sampling")]
    runs["damaged checkpoint"] = [
        fault("damaged checkpoint, worker killed", step, "update") for step in range(3, NUM_STEPS + 1, 2)
    ]
    runs["full disk"] = [fault("full disk", step, "checkpoint") for step in (1, 3, 4)]
    runs["reward"] = [
        fault(kind, step, "sampling") for step, kind in enumerate(["slow reward", "reward process dies"] * 2, start=1)
    ]
    return runs


def arguments_of(folder: Path, given: Sequence[str]) -> list[str]:
    """Returns settings of tiny batches on two workers, in float32, with teachers and the deterministic generator."""
    config = next((each for each in given if each.startswith("config=")), f"config={ROOT}/configs/microgeo/cepo.yaml")
    reward = folder / "reward.py"
    reward.write_text(REWARD, encoding="utf-8")
    return [
        config,
        "data.val_files=null",
        "data.max_response_length=24",
        "data.rollout_batch_size=4",
        "worker.actor.global_batch_size=4",
        "worker.rollout.name=transformers",
        "worker.rollout.n=4",
        f"worker.reward.reward_function={reward}:compute_score",
        "trainer.val_before_train=false",
        "trainer.logger=[file]",
        f"trainer.max_steps={NUM_STEPS}",
        "trainer.save_freq=1",
        "trainer.save_limit=3",
        "trainer.n_gpus_per_node=2",
        "trainer.max_restarts=20",
        "trainer.stage_timeout_seconds=30",
        *(each for each in given if not each.startswith("config=")),
        f"trainer.save_checkpoint_path={folder / 'run'}",
    ]


def tensors_of(checkpoint: Path) -> dict[str, Any]:
    """Returns all tensors of the actor's state by name: weights, optimizer, teacher weights."""
    import torch

    from cepo.workers.checkpoint import Shards

    shards = Shards(checkpoint / "actor" / "distributed")
    tensors = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in shards.shapes.items()}
    shards.fill(tensors)
    return tensors


def differences(folder: Path, undisturbed: Path, num_steps: int) -> list[str]:
    """Returns the metrics and tensors that differ from the undisturbed run, and wrongly recorded steps."""
    import torch

    rows, expected = (
        [json.loads(line) for line in (each / "run" / "metrics.jsonl").read_text().splitlines()]
        for each in (folder, undisturbed)
    )
    found = [] if [row["step"] for row in rows] == list(range(1, num_steps + 1)) else ["steps recorded"]
    for row, other in zip(rows, expected, strict=False):
        names = {
            name for name in {*row, *other} if not name.startswith(("timing_s/", "perf/", "work/bytes", "faults/"))
        }
        found += [f"{name} in step {row['step']}" for name in sorted(names) if row.get(name) != other.get(name)]
    one, two = (tensors_of(each / "run" / f"global_step_{num_steps}") for each in (folder, undisturbed))
    return found + [name for name in sorted({*one, *two}) if not torch.equal(one[name], two[name])]


def disturbed_run(folder: Path, faults: list[Fault], given: Sequence[str]) -> None:
    global INJECTOR
    INJECTOR = Injector(folder, waiting=list(faults), seconds=INJECTOR.seconds, is_undisturbed=not faults)
    config = load_config(arguments_of(folder, given))
    check_config(config)
    train(config)
    assert config.trainer.run_folder.is_dir()


def killed_runs(scratch: Path, launcher: str, given: Sequence[str], *, num_kills: int) -> dict[str, Any]:
    """Compares an undisturbed run of the command with one that is killed repeatedly, and returns the outcome."""
    steps = num_kills + 10
    devices = ["trainer.n_gpus_per_node=1"] if launcher == "local" else []
    commands: dict[str, Command] = {}
    for name in ("undisturbed", "killed"):
        folder = scratch / f"{launcher}-{name}"
        folder.mkdir()
        commands[name] = Command(folder, [*arguments_of(folder, [*given, *devices]), f"trainer.max_steps={steps}"])
    pace = commands["undisturbed"].run_to_its_end()
    start = time.monotonic()
    kills = kill_and_restart(commands["killed"], pace, num_kills=num_kills, seed=1)
    seconds, left = time.monotonic() - start, commands["killed"].left_behind()
    killed, undisturbed = (commands[name].run_folder.parent for name in ("killed", "undisturbed"))
    found = outcome(f"kill -9: {launcher}", kills, num_kills, killed, undisturbed, seconds, num_steps=steps)
    return found | {"differences": [*found["differences"], *(f"left behind: {each}" for each in left)]}


def injected_runs(scratch: Path, only: str, given: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yields the outcomes of the runs with injected faults whose name contains `only`."""
    ray_backend.Ranks = FaultyRanks
    plain_step = Trainer.train_step

    def train_step(self: Trainer, step: int) -> None:
        INJECTOR.step = step + 1
        plain_step(self, step)

    Trainer.train_step = train_step
    undisturbed = scratch / "undisturbed"
    undisturbed.mkdir()
    disturbed_run(undisturbed, [], given)
    for name, faults in planned_runs(INJECTOR.visited).items():
        if only in name:
            print(name, flush=True)
            folder = scratch / name.replace(":", "").replace(" ", "-")
            folder.mkdir()
            start = time.monotonic()
            disturbed_run(folder, faults, given)
            seconds = time.monotonic() - start
            yield outcome(name, len(INJECTOR.struck), len(faults), folder, undisturbed, seconds)


def main() -> int:
    """Performs the runs and writes the record after each; returns 1 if one differs or a fault did not take location."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS / "faults.json")
    parser.add_argument("--only", default="", help="runs whose name contains this; `kill -9` for the killed commands")
    parser.add_argument("--kills", type=int, default=20, help="of each killed run")
    parser.add_argument("settings", nargs="*", help="config=FILE and a.b.c=value")
    options = parser.parse_args()
    logging.basicConfig(level=logging.ERROR)
    earlier = json.loads(options.out.read_text())["runs"] if options.out.is_file() else []
    outcomes = {each["run"]: each for each in earlier}
    made: list[str] = []
    with tempfile.TemporaryDirectory(prefix="faults-of-cepo-") as scratch:
        killed = (
            killed_runs(Path(scratch), launcher, options.settings, num_kills=options.kills)
            for launcher in ("local", "ray")
            if options.only in f"kill -9: {launcher}"
        )
        injected = () if "kill -9" in options.only else injected_runs(Path(scratch), options.only, options.settings)
        for each in itertools.chain(killed, injected):
            record = machine_record(1)
            outcomes[each["run"]] = each | {"date": record["date"]}
            made.append(each["run"])
            save(record | {"runs": list(outcomes.values())}, [], options.out)
    print(table(list(outcomes.values())))
    return int(
        any(outcomes[name]["differences"] or outcomes[name]["faults"] != outcomes[name]["planned"] for name in made)
    )


def outcome(
    name: str, faults: int, planned: int, folder: Path, undisturbed: Path, seconds: float, *, num_steps: int = NUM_STEPS
) -> dict[str, Any]:
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    found = differences(folder, undisturbed, num_steps)
    restarts = int(max(row.get("faults/restarts", 0) for row in rows))
    print(f"  {faults} faults, {restarts} restarts, {len(found)} differences, {seconds:.0f} s", flush=True)
    return {
        "run": name,
        "faults": faults,
        "planned": planned,
        "restarts": restarts,
        "steps_recorded": len(rows),
        "differences": found,
        "seconds": round(seconds, 1),
    }


def table(outcomes: Sequence[dict[str, Any]]) -> str:
    lines = [
        "| run | faults | restarts of the workers | steps recorded | differs from the undisturbed run in |",
        "| --- | --- | --- | --- | --- |",
    ]
    for each in outcomes:
        differs = ", ".join(each["differences"][:3]) or "nothing"
        lines.append(
            f"| {each['run']} | {each['faults']} | {each['restarts']} | {each['steps_recorded']} | {differs} |"
        )
    total = sum(each["faults"] for each in outcomes)
    lines.append(f"| all | {total} | {sum(each['restarts'] for each in outcomes)} | | |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
