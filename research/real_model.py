"""Trains the arms of the study on a pretrained model that are not trained yet, and writes their records and table.

    python -m research.real_model run --out FOLDER --model FOLDER [--most N]
    python -m research.real_model records --out FOLDER

The plan is `research/real_model.yaml`. `run` trains seed by seed, so that every finished seed has all arms; it can be
stopped and called again, and resumes an interrupted run. `records` adds the finished runs of a folder to
`research/results/real_model.json` and prints the table of differences. A recorded run is not trained again, so that the
study can be spread over several machines.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml

from cepo.report.recorded_run import load_run
from lab.support.machine import ROOT, machine_record
from lab.support.tables import table
from research.support.seeded_runs import is_done, train_once
from research.support.study_statistics import adjusted_cells, cell, paired

PLAN: Mapping[str, Any] = yaml.safe_load((ROOT / "research" / "real_model.yaml").read_text(encoding="utf-8"))
RESULTS = ROOT / "research" / "results" / "real_model.json"
Record = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Arm:
    """A method with settings of `algorithm`, under its name in tables."""

    name: str
    estimator: str
    plugin: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])


ARMS = {name: Arm(name=name, **entry) for name, entry in PLAN["arms"].items()}


@dataclass(frozen=True, kw_only=True)
class Run:
    """A training run of the plan."""

    arm: Arm
    seed: int

    def folder(self, out: Path) -> Path:
        """Returns the run's folder within the study's."""
        return out / f"{self.arm.name}-s{self.seed}"

    def settings(self, model: str) -> list[str]:
        """Returns the settings of `cepo train` but for the seed and the folder."""
        settings = [
            f"config={ROOT}/configs/real_model/base.yaml",
            f"worker.actor.model.model_path={model}",
            f"algorithm.adv_estimator={self.arm.estimator}",
            f"trainer.max_steps={PLAN['steps']}",
            f"trainer.val_freq={PLAN['steps'] // 2}",
            f"trainer.save_freq={PLAN['steps'] // 4}",
            "trainer.save_limit=1",
        ]
        if self.arm.plugin is not None:
            settings.append(f"trainer.plugins=[{ROOT / self.arm.plugin}]")
        for key, value in self.arm.settings.items():
            settings.append(f"algorithm.{key}={value}")
        return settings


def planned() -> Iterator[Run]:
    """Yields all runs, seed by seed."""
    for seed in PLAN["seeds"]:
        for arm in ARMS.values():
            yield Run(arm=arm, seed=seed)


def recorded(results: Path) -> dict[tuple[str, int], Record]:
    """Returns the records of a results file by arm and seed; none if there is no file."""
    if not results.exists():
        return {}
    records = json.loads(results.read_text(encoding="utf-8"))["runs"]
    return {(record["arm"], record["seed"]): record for record in records}


def run_all(out: Path, model: str, *, seeds: Sequence[int], most: int, results: Path) -> int:
    """Trains up to `most` runs of these seeds that are neither finished nor recorded.

    Returns the exit code of the first that failed, else 0.
    """
    known = recorded(results)
    missing = [run for run in planned() if run.seed in seeds and (run.arm.name, run.seed) not in known]
    unfinished = [run for run in missing if not is_done(run.folder(out))]
    for run in unfinished[:most]:
        exit_code = train_once(run.settings(model), seed=run.seed, folder=run.folder(out))
        if exit_code != 0:
            print(f"{run.folder(out)} ended with exit code {exit_code}")
            return exit_code
    print(f"{max(0, len(unfinished) - most)} runs are left")
    return 0


def record_of(run: Run, out: Path) -> Record | None:
    """Returns a finished run's accuracies by step; None if it is not finished."""
    folder = run.folder(out)
    if not is_done(folder):
        return None
    data = load_run(folder)
    assert data.last_step == PLAN["steps"], f"{folder} is marked as finished and has {data.last_step} steps"
    validations = data.values_by_step("val/accuracy")
    return {
        "arm": run.arm.name,
        "seed": run.seed,
        "trained": [round(value, 5) for value in data.series("reward/accuracy")[1]],
        "held_out": {str(step): round(value, 5) for step, value in validations.items()},
        "step_seconds": [round(value, 2) for value in data.series("timing_s/step")[1]],
        "machine": machine_record(torch.get_num_threads()),
    }


def all_records(out: Path, results: Path) -> list[Record]:
    """Returns the records of the results file and those of the runs that have finished in `out`, in the plan's order."""
    known = recorded(results)
    for run in planned():
        key = (run.arm.name, run.seed)
        if key not in known:
            record = record_of(run, out)
            if record is not None:
                known[key] = record
    keys = [(run.arm.name, run.seed) for run in planned()]
    return [known[key] for key in keys if key in known]


def rollout_accuracy(record: Record) -> float:
    """Returns the share of correct rollouts over all steps of a run: the study's measure."""
    return sum(record["trained"]) / len(record["trained"])


def held_out_accuracy(record: Record) -> float:
    """Returns the held-out accuracy after the last step."""
    return record["held_out"][str(PLAN["steps"])]


def differences_table(records: Sequence[Record]) -> str:
    """Returns the table of all arms: both measures, and their paired differences from the baseline with Holm's p."""
    by_arm: dict[str, dict[int, Record]] = {}
    for record in records:
        by_arm.setdefault(record["arm"], {})[record["seed"]] = record
    baseline = by_arm.get(PLAN["baseline"], {})
    measures = (rollout_accuracy, held_out_accuracy)
    p_values: list[Mapping[str, str]] = []
    for measure in measures:
        others = {name: paired(baseline, by_arm.get(name, {}), measure) for name in ARMS if name != PLAN["baseline"]}
        p_values.append(adjusted_cells(others))
    rows: list[list[str]] = []
    for name in ARMS:
        own_records = by_arm.get(name, {})
        row = [name, f"{len(own_records)} of {len(PLAN['seeds'])}"]
        for measure, p_of_arm in zip(measures, p_values, strict=True):
            row.append(cell([measure(record) for record in own_records.values()]))
            is_baseline = name == PLAN["baseline"]
            row.append("" if is_baseline else cell(paired(baseline, own_records, measure), signed=True))
            row.append("" if is_baseline else p_of_arm[name])
        rows.append(row)
    head = ["arm", "seeds"]
    for title in ("rollouts %", "held out %"):
        head += [title, f"minus {PLAN['baseline']}", "p, Holm"]
    return table(head, rows)


def main(argv: list[str] | None = None) -> int:
    """Runs one of the two commands."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("run", "records"))
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs, outside the repository")
    parser.add_argument("--model", help="model folder or hub name; required by run")
    parser.add_argument("--seeds", type=int, nargs="+", default=PLAN["seeds"], help="those that this process trains")
    parser.add_argument("--most", type=int, default=sys.maxsize, help="stop after so many runs")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args(argv)
    out: Path = options.out.absolute()
    if options.command == "run":
        if options.model is None:
            parser.error("run needs --model")
        return run_all(out, options.model, seeds=options.seeds, most=options.most, results=options.results)
    records = all_records(out, options.results)
    whole = {"plan": PLAN, "runs": records}
    options.results.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    print(differences_table(records))
    return 0


if __name__ == "__main__":
    sys.exit(main())
