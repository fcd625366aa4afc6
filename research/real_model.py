"""Trains the arms of the study on a pretrained model that are not trained yet; writes records, tables and a chart.

    python -m research.real_model run --out FOLDER --model FOLDER [--most N]
    python -m research.real_model records --out FOLDER

The plan is `research/real_model.yaml`. `run` trains seed by seed, so that every finished seed has all arms; it can be
stopped and called again, and resumes an interrupted run. `records` adds the finished runs of a folder to
`research/results/real_model.json`, and writes the tables and the chart of `docs/real-model.md`. A recorded run is not
trained again, so that the study can be spread over several machines.
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

from cepo.report.drawing import save_figure
from lab.support.machine import ROOT, machine_record
from research.support.compared_runs import Record, by_name_and_seed, differences_table, figures_of, work_table
from research.support.comparison_charts import comparison_charts
from research.support.marked_tables import with_table
from research.support.seeded_runs import is_done, train_once

PLAN: Mapping[str, Any] = yaml.safe_load((ROOT / "research" / "real_model.yaml").read_text(encoding="utf-8"))
RESULTS = ROOT / "research" / "results" / "real_model.json"
PAGE = ROOT / "docs" / "real-model.md"
CHART = ROOT / "docs" / "images" / "real_model_study.png"
PROGRAM = "research.real_model"
"""The name in the marks of the tables' place in the page."""


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


def run_all(out: Path, model: str, *, seeds: Sequence[int], arms: Sequence[str], most: int, results: Path) -> int:
    """Trains up to `most` runs of these seeds and arms that are neither finished nor recorded.

    Returns the exit code of the first that failed, else 0.
    """
    known = recorded(results)
    chosen = [run for run in planned() if run.seed in seeds and run.arm.name in arms]
    missing = [run for run in chosen if (run.arm.name, run.seed) not in known]
    unfinished = [run for run in missing if not is_done(run.folder(out))]
    for run in unfinished[:most]:
        exit_code = train_once(run.settings(model), seed=run.seed, folder=run.folder(out))
        if exit_code != 0:
            print(f"{run.folder(out)} ended with exit code {exit_code}")
            return exit_code
    print(f"{max(0, len(unfinished) - most)} runs are left")
    return 0


def record_of(run: Run, out: Path) -> Record | None:
    """Returns a finished run's figures; None if it is not finished."""
    folder = run.folder(out)
    if not is_done(folder):
        return None
    figures = figures_of(folder, trained="reward/accuracy")
    num_steps = len(figures["trained"])
    assert num_steps == PLAN["steps"], f"{folder} is marked as finished and has {num_steps} steps"
    machine = machine_record(torch.get_num_threads())
    return {"arm": run.arm.name, "seed": run.seed} | figures | {"machine": machine}


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


def tables_of(records: Sequence[Record]) -> str:
    """Returns the tables of all arms of the plan: accuracies with their differences, and work and time."""
    by_arm = by_name_and_seed(records, kind="arm", names=list(ARMS))
    baseline = PLAN["baseline"]
    accuracies = differences_table(by_arm, kind="arm", baseline=baseline, num_planned=len(PLAN["seeds"]))
    work = work_table(by_arm, kind="arm")
    return f"{accuracies}\n\n{work}"


def write_records(out: Path, results: Path, page: Path, chart: Path) -> None:
    """Writes the records of all finished runs, the page's tables, and its chart."""
    records = all_records(out, results)
    results.write_text(json.dumps({"plan": PLAN, "runs": records}, indent=1) + "\n", encoding="utf-8")
    text = page.read_text(encoding="utf-8")
    page.write_text(with_table(text, tables_of(records), program=PROGRAM), encoding="utf-8")
    by_arm = by_name_and_seed(records, kind="arm", names=list(ARMS))
    save_figure(comparison_charts(by_arm, PLAN["baseline"]), chart)


def main(argv: list[str] | None = None) -> int:
    """Runs one of the two commands."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("run", "records"))
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs, outside the repository")
    parser.add_argument("--model", help="model folder or hub name; required by run")
    parser.add_argument("--seeds", type=int, nargs="+", default=PLAN["seeds"], help="those that this process trains")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), help="those that this process trains")
    parser.add_argument("--most", type=int, default=sys.maxsize, help="stop after so many runs")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args(argv)
    out: Path = options.out.absolute()
    if options.command == "run":
        if options.model is None:
            parser.error("run needs --model")
        return run_all(
            out,
            options.model,
            seeds=options.seeds,
            arms=options.arms,
            most=options.most,
            results=options.results,
        )
    write_records(out, options.results, PAGE, CHART)
    return 0


if __name__ == "__main__":
    sys.exit(main())
