"""The study's plan, its runs and their records."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml

from lab.studies.running_totals.problems import Style, problems, with_other_solutions, write_problems
from lab.studies.support.compared_runs import Record, figures_of
from lab.studies.support.seeded_runs import is_done, train_once
from lab.support.machine import ROOT, machine_record

FOLDER = Path(__file__).parent
CONFIG = FOLDER / "base.yaml"
OTHER_SOLUTIONS = "other_solutions"
"""The name of the file of training problems with the solutions of other problems."""


@dataclass(frozen=True, kw_only=True)
class Arm:
    """A method with settings of `algorithm`, under its name in tables, and the arm that it is compared with."""

    name: str
    estimator: str
    seeds: Sequence[int]
    baseline: str
    style: Style = "free"
    plugin: str | None = None
    data: str = "train"
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is measured and trained, as `plan.yaml` has it."""

    steps: int
    learning_rate: float
    arms: Mapping[str, Arm]
    order: Sequence[Sequence[str]]
    """Blocks of arms, trained block after block, and within a block seed by seed."""
    problems: Mapping[str, Mapping[str, int]]
    """By name, how many problems of which seed; those of `train` are trained on, those of `held_out` validate."""
    written: Mapping[str, Any]
    """The plan as it is written, for the record."""
    results_folder: Path = ROOT / "lab" / "studies" / "results"
    charts_folder: Path = ROOT / "docs" / "images"

    @property
    def val_freq(self) -> int:
        """After how many steps a run validates; half of the steps if the plan does not say."""
        return self.written.get("val_freq", self.steps // 2)

    @property
    def config(self) -> Path:
        """The configuration of the world; the plan names it if it is not that of `running_totals`."""
        return ROOT / self.written.get("config", CONFIG)

    @property
    def program(self) -> str:
        """The name of the tables that the page has of this plan."""
        return f"lab.studies.{self.written['name']}"

    @property
    def results(self) -> Path:
        """The file of the runs' records."""
        return self.results_folder / f"{self.written['name']}.json"

    @property
    def gates_file(self) -> Path:
        """The file of the gates' records."""
        return self.results.with_name(f"{self.written['name']}_gates.json")

    @property
    def responses_page(self) -> Path:
        """The page of ten responses with their contrast."""
        return self.results.with_name(f"{self.written['name']}_responses.html")

    @property
    def chart(self) -> Path:
        """The chart of the runs."""
        return self.charts_folder / f"{self.written['name']}_study.png"


def read_plan(file: Path = FOLDER / "plan.yaml") -> Plan:
    """Returns the plan of a file."""
    written = yaml.safe_load(file.read_text(encoding="utf-8"))
    return Plan(
        steps=written["steps"],
        learning_rate=written["learning_rate"],
        arms={
            name: Arm(**{"name": name, "baseline": written["baseline"], **entry})
            for name, entry in written["arms"].items()
        },
        order=written["order"],
        problems=written["problems"],
        written=written,
    )


@dataclass(frozen=True, kw_only=True)
class World:
    """A folder with the data and the warm-started model of a style."""

    folder: Path
    style: Style
    config: Path = CONFIG

    @property
    def model(self) -> Path:
        """The folder of the model."""
        return self.folder / self.style / "model"

    @property
    def teacher(self) -> Path:
        """The folder of the frozen model that teaches, where a plan has one."""
        return self.folder / self.style / "teacher"

    def with_models(self, text: str) -> str:
        """Returns the text with the folders that `{model}` and `{teacher}` stand for."""
        return text.replace("{model}", str(self.model)).replace("{teacher}", str(self.teacher))

    def data(self, name: str) -> Path:
        """Returns the file of these problems."""
        return self.folder / self.style / f"{name}.jsonl"

    def write_data(self, plan: Plan) -> None:
        """Writes all problems of the plan, and those of training with the solutions of others."""
        for name, drawn in plan.problems.items():
            chosen = problems(drawn["count"], seed=drawn["seed"])
            write_problems(self.data(name), chosen, style=self.style)
            if name == "train":
                others = with_other_solutions(chosen, seed=drawn["seed"])
                write_problems(self.data(OTHER_SOLUTIONS), chosen, solved=others, style=self.style)

    def settings(self, *, train: str, held_out: str) -> list[str]:
        """Returns the settings of `cepo` for this world."""
        return [
            f"config={self.config}",
            f"data.train_files={self.data(train)}",
            f"data.val_files={self.data(held_out)}",
            f"data.image_dir={self.folder / self.style}",
            f"worker.actor.model.model_path={self.model}",
            f"worker.reward.reward_function={FOLDER}/reward.py:compute_score",
            f"worker.reward.answer_function={FOLDER}/reward.py:final_answer",
        ]


@dataclass(frozen=True, kw_only=True)
class Run:
    """A training run of the study."""

    arm: Arm
    seed: int

    def folder(self, out: Path) -> Path:
        """Returns the run's folder within that of the study's runs."""
        name = self.arm.name.replace(",", "").replace(" ", "-")
        return out / f"{name}-s{self.seed}"

    def settings(self, plan: Plan, world: Path) -> list[str]:
        """Returns the settings of `cepo train` but for the seed and the folder."""
        of_style = World(folder=world, style=self.arm.style, config=plan.config)
        settings = of_style.settings(train=self.arm.data, held_out="held_out")
        settings += [
            f"algorithm.adv_estimator={self.arm.estimator}",
            f"worker.actor.optim.lr={plan.learning_rate}",
            f"trainer.max_steps={plan.steps}",
            f"trainer.val_freq={plan.val_freq}",
            "trainer.val_before_train=false",
            f"trainer.save_freq={plan.steps // 4}",
            "trainer.save_limit=1",
        ]
        if self.arm.plugin is not None:
            settings.append(f"trainer.plugins=[{ROOT / self.arm.plugin}]")
        for key, value in self.arm.settings.items():
            settings.append(of_style.with_models(f"algorithm.{key}={value}"))
        return settings


def planned(plan: Plan) -> Iterator[Run]:
    """Yields all runs in the plan's order."""
    for block in plan.order:
        arms = [plan.arms[name] for name in block]
        seeds = sorted({seed for arm in arms for seed in arm.seeds})
        for seed in seeds:
            for arm in arms:
                if seed in arm.seeds:
                    yield Run(arm=arm, seed=seed)


def recorded(results: Path) -> dict[tuple[str, int], Record]:
    """Returns the records of a results file by arm and seed; none if there is no file."""
    if not results.exists():
        return {}
    records = json.loads(results.read_text(encoding="utf-8"))["runs"]
    return {(record["arm"], record["seed"]): record for record in records}


def run_all(plan: Plan, out: Path, world: Path, *, most: int) -> int:
    """Trains up to `most` runs that are neither finished nor recorded, and goes on with one that was interrupted.

    Returns the exit code of the first that failed, else 0.
    """
    known = recorded(plan.results)
    missing = [run for run in planned(plan) if (run.arm.name, run.seed) not in known]
    unfinished = [run for run in missing if not is_done(run.folder(out))]
    for run in unfinished[:most]:
        exit_code = train_once(run.settings(plan, world), seed=run.seed, folder=run.folder(out))
        if exit_code != 0:
            print(f"{run.folder(out)} ended with exit code {exit_code}")
            return exit_code
    print(f"{max(0, len(unfinished) - most)} runs are left")
    return 0


def record_of(run: Run, plan: Plan, out: Path) -> Record | None:
    """Returns a finished run's figures; None if it is not finished."""
    folder = run.folder(out)
    if not is_done(folder):
        return None
    figures = figures_of(folder, trained="reward/accuracy")
    num_steps = len(figures["trained"])
    assert num_steps == plan.steps, f"{folder} is marked as finished and has {num_steps} steps"
    return {"arm": run.arm.name, "seed": run.seed} | figures | {"machine": machine_record(torch.get_num_threads())}


def all_records(plan: Plan, out: Path) -> list[Record]:
    """Returns the records of the results file and those of the runs that have finished in `out`, in the plan's order."""
    known = recorded(plan.results)
    records: list[Record] = []
    for run in planned(plan):
        record = known.get((run.arm.name, run.seed)) or record_of(run, plan, out)
        if record is not None:
            records.append(record)
    return records
