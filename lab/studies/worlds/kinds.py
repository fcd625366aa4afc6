"""Defines the chain world, the same with weights that use worked solutions, and all worlds by name."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from lab.studies.worlds.chain import (
    DISTRIBUTIONS,
    NAMES,
    chain_solution,
    demonstrate_chain,
    draw_chain,
    generate_chain_problem,
)
from lab.support.machine import ROOT
from lab.worlds.kinds import SHAPES, TaughtWorld

CHAIN = TaughtWorld(
    name="chain",
    assets=Path(__file__).parent / "chain_assets",
    generate=generate_chain_problem,
    draw=draw_chain,
    solution=chain_solution,
    held_out=tuple(DISTRIBUTIONS),
    demonstrate=lambda problem, seed: demonstrate_chain(problem, seed=seed),
    response=lambda problem: demonstrate_chain(problem, seed=0).response,
    seen_words=("hollow", *NAMES.values()),
    warm_start={"num_steps": 1900, "batch_size": 32, "num_threads": 2, "bfloat16": False},
)
DOSES = {"chain-weak": 400, "chain-strong": 1800}
"""The chain world with weights that were trained so many steps to use worked solutions (`lab.studies.doses`); not shipped."""
KINDS = {kind.name: kind for kind in (SHAPES, CHAIN)} | {
    name: dataclasses.replace(CHAIN, name=name, assets=ROOT / "build" / name, held_out=()) for name in DOSES
}
