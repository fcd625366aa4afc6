"""Implements `cepo microgeo` (also `python3 -m cepo.microgeo`): builds the embedded world."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from cepo.errors import CepoError
from cepo.microgeo.world import World, build_world
from cepo.terminal import SafeConsole


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns 0, or 2 if the arguments or folders cannot be used."""
    parser = argparse.ArgumentParser(
        prog="cepo microgeo", description="Builds the embedded world microgeo: problems and its shipped model."
    )
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)  # the earlier name of --out
    parser.add_argument(
        "--out",
        dest="folder",
        type=Path,
        metavar="FOLDER",
        help="folder to build it in (default: the user's cache folder)",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the problems (default: 0)")
    parser.add_argument("--num-train", type=int, default=4096, help="number of training problems (default: 4096)")
    parser.add_argument("--num-validation", type=int, default=512, help="number of validation problems (default: 512)")
    options = parser.parse_args(arguments)
    console = SafeConsole()
    try:
        world = _build(options, console)
    except CepoError as error:
        SafeConsole(stderr=True).print(str(error), style="red", markup=False, soft_wrap=True)
        return 2
    console.print(
        f"model      {world.model_path}\ntrain      {world.train_file}\nvalidation {world.validation_file}",
        markup=False,
    )
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
            seed=options.seed,
            num_train=options.num_train,
            num_validation=options.num_validation,
            progress=advance,
        )


if __name__ == "__main__":
    sys.exit(main())
