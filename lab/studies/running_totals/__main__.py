"""Does evidence pay if it selects tokens? A study on totals that a small language model adds up step by step.

    python -m lab.studies.running_totals teach --model FOLDER|NAME --world FOLDER   # warm start and data, an hour a style
    python -m lab.studies.running_totals gates --world FOLDER --out FOLDER          # what must hold before any run
    python -m lab.studies.running_totals gradients --world FOLDER --out FOLDER
    python -m lab.studies.running_totals run --world FOLDER --out FOLDER [--most N]
    python -m lab.studies.running_totals records --out FOLDER      # records, tables and chart of the runs that have finished

`run` can be stopped and called again: it goes on with an interrupted run, and trains no recorded one. All else that it
does is in `plan.yaml`.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path

from lab.studies.running_totals.study import FOLDER, Plan, World, read_plan, run_all
from lab.support.machine import ROOT, machine_record


def teach_world(plan: Plan, world: World, model: str) -> None:
    """Writes the data and the warm-started model of a style; a plan without a warm start takes the model as it is."""
    from lab.studies.running_totals.warm_start import WarmStart, teach

    world.write_data(plan)
    if "warm_start" not in plan.written:
        shutil.copytree(model, world.model)
        return
    settings = WarmStart(**plan.written["warm_start"], style=world.style)
    teach(model, world.model, settings, progress=_show)


def _show(step: int, loss: float, seconds: float) -> None:
    if step == 1 or step % 10 == 0:
        print(f"step {step}: loss {loss:.4f}, {seconds:.0f} s", flush=True)


def measure_gates(plan: Plan, world: World, *, label: str, scratch: Path, model: str | None = None) -> None:
    """Measures the gates but for those of gradients, prints them, and adds them to the record under a label.

    `model` is another than the world's, such as that before its warm start.
    """
    from lab.studies.running_totals.gates import bounds_of, figures_of, sampled, verdicts
    from lab.studies.running_totals.responses_page import write_responses
    from lab.studies.running_totals.tables import write_gates

    gates = plan.written["gates"]
    settings = world.settings(train="gates", held_out="held_out")
    if model is not None:
        settings.append(f"worker.actor.model.model_path={model}")
    methods = world.with_models(", ".join(gates["methods"]))
    sample = sampled(settings, methods=methods, prompts=gates["prompts"], folder=scratch)
    figures = figures_of(sample, seed=1)
    passed = verdicts(figures, bounds_of(gates["bounds"]))
    record = json.loads(plan.gates_file.read_text(encoding="utf-8")) if plan.gates_file.exists() else {}
    record[label] = {"figures": figures, "passed": passed, "machine": machine_record(threads=1)}
    plan.gates_file.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    write_gates(plan, record)
    for name, value in figures.items():
        verdict = {None: "", True: "holds", False: "FAILS"}[passed.get(name)]
        print(f"{name}: {'undefined' if value is None else f'{value:.3f}'} {verdict}")
    if all(passed.values()):
        write_responses(sample, plan.responses_page, title="Contrast, oracle and gate")


def measure_gradients(plan: Plan, world: World, *, out: Path) -> int:
    """Measures the gates of gradients; returns the exit code."""
    from lab.studies.gradient.__main__ import main as measure

    gradient = plan.written["gates"]["gradient"]
    plugins = ",".join(str(ROOT / plugin) for plugin in gradient["plugins"])
    methods = world.with_models(", ".join(gradient["methods"]))
    return measure(
        [
            *world.settings(train="gates", held_out="held_out"),
            f"trainer.plugins=[{plugins}]",
            f"batches={gradient['batches']}",
            f"data.rollout_batch_size={gradient['prompts']}",
            f"worker.actor.global_batch_size={gradient['prompts']}",
            f"methods={methods}",
            f"out={out}",
        ]
    )


def main(argv: list[str] | None = None) -> int:
    """Runs one of the commands."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("teach", "gates", "gradients", "run", "records"))
    parser.add_argument("--world", type=Path, help="folder of data and models; outside the repository")
    parser.add_argument("--out", type=Path, help="folder of the runs; outside the repository")
    parser.add_argument(
        "--model", help="model folder or hub name that teach begins with, or that gates are measured of"
    )
    parser.add_argument("--style", choices=("free", "fixed"), default="free")
    parser.add_argument("--label", default="after", help="name of the measured gates in their record")
    parser.add_argument("--most", type=int, default=sys.maxsize, help="stop after so many runs")
    parser.add_argument("--plan", type=Path, default=FOLDER / "plan.yaml")
    options = parser.parse_args(argv)
    plan = read_plan(options.plan)
    world = World(folder=options.world.absolute(), style=options.style, config=plan.config) if options.world else None
    out: Path | None = options.out.absolute() if options.out else None
    if options.command == "records":
        from lab.studies.running_totals.tables import write_records

        if out is None:
            parser.error("records needs --out")
        write_records(plan, out)
        return 0
    if world is None:
        parser.error(f"{options.command} needs --world")
    if options.command == "teach":
        if options.model is None:
            parser.error("teach needs --model")
        teach_world(plan, world, options.model)
        return 0
    if out is None:
        parser.error(f"{options.command} needs --out")
    if options.command == "gates":
        measure_gates(plan, world, label=options.label, scratch=out, model=options.model)
        return 0
    if options.command == "gradients":
        return measure_gradients(plan, world, out=out)
    return run_all(plan, out, world.folder, most=options.most)


if __name__ == "__main__":
    sys.exit(main())
