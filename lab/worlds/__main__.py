"""Builds a world's problems with its checkpoint, or makes its weights anew.

python3 -m lab.worlds --make --out build/made           # minutes on 2 cores
python3 -m lab.worlds --make --ship --out build/made    # the same, and copies them over the shipped weights
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from cepo.microgeo.world import build_world
from lab.support.machine import ROOT
from lab.worlds.kinds import SHAPES, TaughtWorld
from lab.worlds.model import build_untrained_model
from lab.worlds.warmstart import warm_start


def main(
    arguments: Sequence[str] | None = None,
    *,
    kinds: Mapping[str, TaughtWorld] = {SHAPES.name: SHAPES},
    default: str = SHAPES.name,
    program: str = "python3 -m lab.worlds",
) -> int:
    """Runs the command for one of `kinds`, worlds by name, and returns its exit code."""
    parser = argparse.ArgumentParser(prog=program, description=__doc__.partition("\n")[0])
    parser.add_argument("--world", choices=list(kinds), default=default)
    parser.add_argument("--out", type=Path, help="by default build/WORLD of this checkout")
    parser.add_argument("--seed", type=int, default=0, help="of the problems, or of the weights that are made")
    parser.add_argument("--num-train", type=int, default=4096)
    parser.add_argument("--num-validation", type=int, default=512, help="of validation and of each held-out split")
    parser.add_argument("--make", action="store_true", help="write only the weights, trained here")
    parser.add_argument("--ship", action="store_true", help="with --make, copy them over the shipped weights")
    options = parser.parse_args(arguments)
    kind = kinds[options.world]
    out = options.out or ROOT / "build" / kind.name
    if options.make:
        make_weights(out, kind, seed=options.seed, ship=options.ship)
    else:
        build_world(
            out, kind=kind, seed=options.seed, num_train=options.num_train, num_validation=options.num_validation
        )
    print(out)
    return 0


def make_weights(folder: Path, kind: TaughtWorld, *, seed: int = 0, ship: bool = False) -> None:
    """Trains the world's weights in `folder`; `ship` copies the folder over the world's shipped one."""
    build_untrained_model(folder, kind=kind, seed=seed)
    warm_start(folder, kind=kind, seed=seed, progress=_show)
    if ship:
        shutil.copytree(folder, kind.assets, dirs_exist_ok=True)


def _show(stage: str, done: int, total: int) -> None:
    if done % 50 == 0 or done == total:
        print(f"{stage}: {done} of {total}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
