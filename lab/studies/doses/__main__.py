"""Measures how much a teacher's knowledge of worked solutions is worth in the chain world, and writes lab/notes/doses.md.

    python3 -m lab.studies.doses teach     # build/chain-weak and build/chain-strong: 6 and 26 minutes on a quiet core
    python3 -m lab.studies.doses measure   # knowledge and gradients on the tuning world
    python3 -m lab.studies.study run --profile doses --out checkpoints/doses
    python3 -m lab.studies.doses page

`page` collects the finished runs and measurements in lab/studies/results/doses.json; without them it writes the page
from that file.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from cepo.commands.cli import main as cepo
from cepo.microgeo.world import build_world
from lab.studies.doses.page import GRADIENTS, KNOWLEDGE, MEASUREMENTS, write_page
from lab.studies.gradient.__main__ import main as measure_gradients
from lab.studies.support.study_plan import PLAN
from lab.studies.worlds.kinds import DOSES, KINDS
from lab.support.machine import ROOT


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    parser = argparse.ArgumentParser(prog="python3 -m lab.studies.doses", description=__doc__.partition("\n")[0])
    parser.add_argument("command", choices=("teach", "measure", "page"))
    parser.add_argument("--batches", type=int, default=30, help="of the gradients")
    parser.add_argument("--study", type=Path, default=ROOT / "checkpoints" / "doses", help="folder of the runs")
    options = parser.parse_args(arguments)
    if options.command == "page":
        write_page(options.study)
    for world in ("chain", *DOSES) if options.command != "page" else ():
        if options.command == "measure":
            measure(world, options.batches)
        elif world in DOSES and not KINDS[world].assets.exists():
            make(world)
    return 0


def make(world: str) -> None:
    """Writes a dose's weights to the folder from which its world takes them."""
    from lab.studies.doses.training import SETTINGS, teach

    with tempfile.TemporaryDirectory() as scratch:
        made = Path(scratch) / "model"
        teach(made, settings=replace(SETTINGS, num_steps=DOSES[world]), progress=_show)
        shutil.copytree(made, KINDS[world].assets)


def measure(world: str, batches: int) -> None:
    """Measures what the teachers of a world know, and their gradients, on the tuning world's problems."""
    folder = MEASUREMENTS / world
    build_world(
        folder / "world", kind=KINDS[world], seed=PLAN["world_seeds"]["tuning"], num_train=512, num_validation=8
    )
    settings = [
        f"config={ROOT}/lab/studies/chain.yaml",
        f"data.train_files={folder}/world/train.parquet",
        f"data.val_files={folder}/world/validation.parquet",
        f"worker.actor.model.model_path={folder}/world/model",
        "worker.rollout.name=transformers",
        "data.max_prompt_length=512",
    ]
    plugins = ",".join(
        str(ROOT / "lab" / "studies" / "support" / name) for name in ("chain_oracle.py", "belief_credit.py")
    )
    told = ["credit", *settings, "data.rollout_batch_size=24", "continuations=0", f"methods={KNOWLEDGE}"]
    if cepo([*told, f"out={folder}/knowledge"]):
        raise SystemExit(f"the knowledge of {world} was not measured")
    told = [*settings, f"trainer.plugins=[{plugins}]", f"batches={batches}", f"methods={GRADIENTS}"]
    if measure_gradients([*told, f"out={folder}/gradient"]):
        raise SystemExit(f"the gradients of {world} were not measured")


def _show(step: int, loss: float, divergence: float) -> None:
    if step % 50 == 0:
        print(f"step {step}: loss {loss:.4f}, divergence from the shipped weights {divergence:.5f}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
