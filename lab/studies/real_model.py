"""Trains the arms of a study on a pretrained model that are not trained yet; writes records, tables and a chart.

    python -m lab.studies.real_model run --out FOLDER --model FOLDER [--most N] [--plan NAME]
    python -m lab.studies.real_model records --out FOLDER [--plan NAME]

A plan is a file of this folder, by default `real_model.yaml`. `run` trains seed by seed, so that every finished seed has
all arms; it can be stopped and called again, and resumes an interrupted run. `records` adds the finished runs of a folder
to `lab/studies/results/NAME.json`, and writes the plan's tables in `lab/notes/real-model.md` and its chart. A recorded run is not
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
from lab.studies.support.compared_runs import (
    Record,
    by_name_and_seed,
    differences_table,
    figures_of,
    held_out_accuracy,
    rollout_accuracy,
    seed_table,
    work_table,
)
from lab.studies.support.comparison_charts import comparison_charts
from lab.studies.support.marked_tables import write_table
from lab.studies.support.paired_test import compared
from lab.studies.support.seeded_runs import is_done, train_once
from lab.studies.support.study_statistics import BySeed, paired
from lab.support.machine import ROOT, machine_record

PAGE = ROOT / "lab" / "notes" / "real-model.md"
PLANS = ("real_model", "real_model_repeated", "real_model_third")
"""The names of the plans."""


@dataclass(frozen=True, kw_only=True)
class Arm:
    """A method with settings of `algorithm`, under its name in tables."""

    name: str
    estimator: str
    plugin: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, kw_only=True)
class Study:
    """A plan, and where its results are kept."""

    name: str
    baseline: str
    steps: int
    seeds: Sequence[int]
    arms: Mapping[str, Arm]
    plan: Mapping[str, Any]
    """The plan as it is written, for the record."""

    @property
    def results(self) -> Path:
        """The file of its records."""
        return ROOT / "lab" / "studies" / "results" / f"{self.name}.json"

    @property
    def chart(self) -> Path:
        """The picture in the page."""
        return ROOT / "docs" / "images" / f"{self.name}_study.png"

    @property
    def program(self) -> str:
        """The name in the marks around its tables in the page."""
        return f"lab.studies.{self.name}"


def read_study(name: str) -> Study:
    """Returns the study of the plan `lab/studies/<name>.yaml`."""
    plan = yaml.safe_load((ROOT / "lab" / "studies" / f"{name}.yaml").read_text(encoding="utf-8"))
    return Study(
        name=name,
        baseline=plan["baseline"],
        steps=plan["steps"],
        seeds=plan["seeds"],
        arms={arm: Arm(name=arm, **entry) for arm, entry in plan["arms"].items()},
        plan=plan,
    )


@dataclass(frozen=True, kw_only=True)
class Run:
    """A training run of a study."""

    study: Study
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
            f"trainer.max_steps={self.study.steps}",
            "trainer.val_freq=12",
            "trainer.save_freq=6",
            "trainer.save_limit=1",
        ]
        if self.arm.plugin is not None:
            settings.append(f"trainer.plugins=[{ROOT / self.arm.plugin}]")
        for key, value in self.arm.settings.items():
            settings.append(f"algorithm.{key}={value}")
        return settings


def planned(study: Study) -> Iterator[Run]:
    """Yields all runs, seed by seed."""
    for seed in study.seeds:
        for arm in study.arms.values():
            yield Run(study=study, arm=arm, seed=seed)


def recorded(results: Path) -> dict[tuple[str, int], Record]:
    """Returns the records of a results file by arm and seed; none if there is no file."""
    if not results.exists():
        return {}
    records = json.loads(results.read_text(encoding="utf-8"))["runs"]
    return {(record["arm"], record["seed"]): record for record in records}


def run_all(
    study: Study,
    out: Path,
    model: str,
    *,
    seeds: Sequence[int],
    arms: Sequence[str],
    most: int,
    results: Path,
) -> int:
    """Trains up to `most` runs of these seeds and arms that are neither finished nor recorded.

    Returns the exit code of the first that failed, else 0.
    """
    known = recorded(results)
    chosen = [run for run in planned(study) if run.seed in seeds and run.arm.name in arms]
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
    assert num_steps == run.study.steps, f"{folder} is marked as finished and has {num_steps} steps"
    machine = machine_record(torch.get_num_threads())
    return {"arm": run.arm.name, "seed": run.seed} | figures | {"machine": machine}


def all_records(study: Study, out: Path, results: Path) -> list[Record]:
    """Returns the records of the results file and those of the runs that have finished in `out`, in the plan's order."""
    known = recorded(results)
    for run in planned(study):
        key = (run.arm.name, run.seed)
        if key not in known:
            record = record_of(run, out)
            if record is not None:
                known[key] = record
    keys = [(run.arm.name, run.seed) for run in planned(study)]
    return [known[key] for key in keys if key in known]


def tables_of(study: Study, records: Sequence[Record]) -> str:
    """Returns the tables of all arms of the plan: accuracies with their differences, those of every seed, and work and time.

    Of a plan with one comparison, its test comes first.
    """
    by_arm = by_name_and_seed(records, kind="arm", names=list(study.arms))
    accuracies = differences_table(by_arm, kind="arm", baseline=study.baseline, num_planned=len(study.seeds))
    held_out = seed_table(by_arm, held_out_accuracy, kind="held out %", seeds=study.seeds)
    parts = [accuracies, held_out, work_table(by_arm, kind="arm")]
    others = [arm for arm in study.arms if arm != study.baseline]
    if len(others) == 1:
        parts.insert(
            0, line_of_the_test(by_arm[study.baseline], by_arm[others[0]], f"{others[0]} minus {study.baseline}")
        )
    return "\n\n".join(parts)


def line_of_the_test(baseline: BySeed, chosen: BySeed, title: str) -> str:
    """Returns the differences of both measures, as lines of a list."""
    lines: list[str] = []
    for name, measure in (("all rollouts", rollout_accuracy), ("held out", held_out_accuracy)):
        found = compared(paired(baseline, chosen, measure))
        lines.append(f"- {title}, {name}: {'not run' if found is None else found.text}")
    return "\n".join(lines)


def write_records(study: Study, out: Path, results: Path, page: Path, chart: Path) -> None:
    """Writes the records of all finished runs, the page's tables, and its chart."""
    records = all_records(study, out, results)
    results.write_text(json.dumps({"plan": study.plan, "runs": records}, indent=1) + "\n", encoding="utf-8")
    write_table(page, tables_of(study, records), program=study.program)
    by_arm = by_name_and_seed(records, kind="arm", names=list(study.arms))
    save_figure(comparison_charts(by_arm, study.baseline), chart)


def main(argv: list[str] | None = None) -> int:
    """Runs one of the two commands."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("run", "records"))
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs, outside the repository")
    parser.add_argument("--model", help="model folder or hub name; required by run")
    parser.add_argument("--plan", choices=PLANS, default=PLANS[0])
    parser.add_argument("--seeds", type=int, nargs="+", help="those that this process trains; default: all")
    parser.add_argument("--arms", nargs="+", help="those that this process trains; default: all")
    parser.add_argument("--most", type=int, default=sys.maxsize, help="stop after so many runs")
    parser.add_argument("--results", type=Path, help="default: lab/studies/results/<plan>.json")
    options = parser.parse_args(argv)
    study = read_study(options.plan)
    arms: list[str] = options.arms or list(study.arms)
    unknown = [arm for arm in arms if arm not in study.arms]
    if unknown:
        parser.error(f"the plan {study.name} has no arm {unknown[0]}; its arms are {', '.join(study.arms)}")
    out: Path = options.out.absolute()
    results: Path = options.results or study.results
    if options.command == "run":
        if options.model is None:
            parser.error("run needs --model")
        return run_all(
            study,
            out,
            options.model,
            seeds=options.seeds or study.seeds,
            arms=arms,
            most=options.most,
            results=results,
        )
    write_records(study, out, results, PAGE, study.chart)
    return 0


if __name__ == "__main__":
    sys.exit(main())
