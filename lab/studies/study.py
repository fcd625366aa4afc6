"""Trains the study's arms that are not trained yet, all from the same start, and writes lab/notes/study.md.

    python -m lab.studies.study run --profile small --out checkpoints/study-small
    python -m lab.studies.study page --profile small --out checkpoints/study-small

Several processes of `run` can work at the same time: each takes runs that no other has. Interrupted runs are resumed.
`page` writes the records to lab/studies/results/study.json, and from them the page and its charts. Without the runs'
folder it writes the page again from the existing records.
"""

from __future__ import annotations

import argparse
import dataclasses
import fcntl
import itertools
import json
import os
import sys
from contextlib import ExitStack
from pathlib import Path

from cepo.microgeo.world import build_world
from cepo.report.recorded_run import load_run
from cepo.terminal.interrupts import EXIT_CODES
from cepo.train import main as train
from lab.studies.support.study_plan import METHODS, PLAN, PROFILES, Profile, Run, arguments, first_runs, own_rate_runs
from lab.studies.support.study_statistics import DONE, chosen_rates
from lab.studies.worlds.kinds import KINDS
from lab.support.machine import ROOT


def main(argv: list[str] | None = None) -> int:
    """Runs one of the two commands; returns 1 if a run failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("run", "page"))
    parser.add_argument("--profile", choices=PROFILES, default="small")
    parser.add_argument("--worlds", nargs="+", choices=KINDS, help="by default those of the profile")
    parser.add_argument("--arms", nargs="+", choices=METHODS, help="run these alone; the page has all")
    parser.add_argument("--out", type=Path, help="folder of the runs; by default checkpoints/study-<profile>")
    parser.add_argument("--most", type=int, default=sys.maxsize, help="stop after so many runs")
    parser.add_argument("--results", type=Path, default=ROOT / "lab" / "studies" / "results" / "study.json")
    parser.add_argument("--page", type=Path, default=ROOT / "lab" / "notes" / "study.md")
    options = parser.parse_args(argv)
    profile = PROFILES[options.profile]
    profile = dataclasses.replace(profile, worlds=tuple(options.worlds or profile.worlds))
    out: Path = (options.out or ROOT / "checkpoints" / f"study-{profile.name}").absolute()
    if options.command == "run":
        return run_all(dataclasses.replace(profile, arms=options.arms or profile.arms), out, options.most)
    from lab.studies.support.study_page import write_study

    write_study(profile, out, options.results, options.page)
    return 0


def planned(profile: Profile, out: Path) -> list[Run]:
    """Returns the runs of the plan so far, each once; those at chosen learning rates follow when the sweep is done."""
    own = (own_rate_runs(profile, world, chosen_rates(profile, out, world)) for world in profile.worlds)
    return [*dict.fromkeys(itertools.chain(first_runs(profile), *own))]


def run_all(profile: Profile, out: Path, most: int = sys.maxsize) -> int:
    """Trains up to `most` runs that are not done, in the plan's order; returns 1 if one failed, 130 if interrupted."""
    begun: dict[str, int] = {}
    _build_worlds(profile, out)
    while len(begun) < most:
        left = [run for run in planned(profile, out) if run.folder not in begun]
        with ExitStack() as stack:
            run = next((run for run in left if _is_taken(out / run.folder, stack)), None)
            if run is None:
                print("nothing is left to start")
                break
            print(run.folder, flush=True)
            begun[run.folder] = run_one(profile, run, out)
            if begun[run.folder] in EXIT_CODES:
                return begun[run.folder]
    failed = [folder for folder, code in begun.items() if code]
    print(f"failed: {', '.join(failed) or 'none'}")
    return int(bool(failed))


def _is_taken(folder: Path, stack: ExitStack) -> bool:
    """Takes the run for this process until `stack` closes; False if another process has it or if it is done."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = stack.enter_context((folder.parent / f"{folder.name}.lock").open("w"))
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return not (folder / DONE).is_file()


def run_one(profile: Profile, run: Run, out: Path) -> int:
    """Trains, evaluates the held-out sets, and marks the run as done; returns the exit code of `cepo train`.

    The processor time is that of this process and its finished children; interrupted sessions are not counted.
    """
    world, folder, begin = world_folder(out, run.world, tuning=run.tuning), out / run.folder, _processor_seconds()
    settings = arguments(profile, run, world, folder)
    code = train(settings)
    measured = {} if run.tuning else {split: folder / f"held-out-{split}" for split in KINDS[run.world].held_out}
    for split, own in measured.items():
        code = code or train(
            [
                *settings,
                f"data.val_files={world}/{split}.parquet",
                f"trainer.load_checkpoint_path={folder}/global_step_{run.steps}",
                "trainer.val_only=true",
                f"trainer.save_checkpoint_path={own}",
            ]
        )
    if not code:
        held_out = {split: _accuracies(own) for split, own in measured.items()}
        extra = {"processor_seconds": _processor_seconds() - begin, "held_out": held_out}
        (folder / DONE).write_text(json.dumps(extra) + "\n", encoding="utf-8")
    return code


def _accuracies(folder: Path) -> dict[str, float]:
    values = load_run(folder).rows[-1].values
    return {"sampled": values["val/accuracy"], "greedy": values["val/greedy_accuracy"]}


def _processor_seconds() -> float:
    return sum(os.times()[:4])


def world_folder(out: Path, world: str, *, tuning: bool) -> Path:
    return out / "worlds" / f"{world}-{_world_seed(tuning=tuning)}"


def _world_seed(*, tuning: bool) -> int:
    return PLAN["world_seeds"]["tuning" if tuning else "reported"]


def _build_worlds(profile: Profile, out: Path) -> None:
    for world, tuning in itertools.product(profile.worlds, (False, True)):
        build_world(
            world_folder(out, world, tuning=tuning),
            kind=KINDS[world],
            seed=_world_seed(tuning=tuning),
            num_train=profile.problems[world][0],
            num_validation=profile.problems[world][1],
        )


if __name__ == "__main__":
    sys.exit(main())
