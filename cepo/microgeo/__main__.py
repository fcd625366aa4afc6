"""Implements `cepo microgeo` (also `python3 -m cepo.microgeo`): builds an embedded world, and can ship its model."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from cepo.errors import CepoError
from cepo.microgeo.kinds import KINDS
from cepo.microgeo.world import World, build_world


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns 0, or 2 if the arguments or folders cannot be used."""
    parser = argparse.ArgumentParser(
        prog="cepo microgeo", description="Builds the embedded world microgeo: problems and a small model."
    )
    parser.add_argument("--world", choices=list(KINDS), default="shapes", help="world to build (default: shapes)")
    parser.add_argument("--folder", type=Path, help="folder to build it in (default: the user's cache folder)")
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the problems, and with --retrain of the weights (default: 0)"
    )
    parser.add_argument("--num-train", type=int, default=4096, help="number of training problems (default: 4096)")
    parser.add_argument(
        "--num-validation",
        type=int,
        default=512,
        help="number of problems for validation and for each held-out split (default: 512)",
    )
    parser.add_argument("--retrain", action="store_true", help="train the weights on this machine (minutes on 2 cores)")
    parser.add_argument("--ship", action="store_true", help="copy the model into this package as the shipped weights")
    options = parser.parse_args(arguments)
    console = Console()
    try:
        world = _build(options, console)
    except CepoError as error:
        Console(stderr=True).print(str(error), style="red", markup=False, soft_wrap=True)
        return 2
    console.print(
        f"model      {world.model_path}\ntrain      {world.train_file}\nvalidation {world.validation_file}",
        markup=False,
    )
    kind = KINDS[options.world]
    for split in kind.held_out:
        console.print(f"{split:<10} {world.split_file(split)}", markup=False)
    if options.ship:
        shutil.copytree(world.model_path, kind.assets, dirs_exist_ok=True)
        console.print(f"shipped    {kind.assets}", markup=False, soft_wrap=True)
    return 0


def _build(options: argparse.Namespace, console: Console) -> World:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as bar:
        tasks: dict[str, TaskID] = {}

        def advance(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bar.add_task(stage, total=total)
            bar.update(tasks[stage], completed=done)

        return build_world(
            options.folder,
            kind=KINDS[options.world],
            seed=options.seed,
            num_train=options.num_train,
            num_validation=options.num_validation,
            retrain=options.retrain,
            progress=advance,
        )


if __name__ == "__main__":
    sys.exit(main())
