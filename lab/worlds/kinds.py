"""Defines both worlds with what the making of their weights needs: demonstrations and the settings of the warm start."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cepo.microgeo import world
from cepo.microgeo.world import WorldKind
from lab.support.machine import ROOT
from lab.worlds.chain import DISTRIBUTIONS, NAMES, chain_solution, demonstrate_chain, draw_chain, generate_chain_problem
from lab.worlds.demonstrations import Demonstration, NoiseRates, demonstrate, right_response


@dataclass(frozen=True, kw_only=True)
class TaughtWorld(WorldKind):
    """A world whose weights are made here.

    Attributes:
        response: returns a response for the tokenizer's training; together they have all of the world's words.
        seen_words: the response's words that state what is seen; if empty, its first token does.
        warm_start: settings of the warm start.
    """

    demonstrate: Callable[[Any, int], Demonstration]
    response: Callable[[Any], str]
    seen_words: tuple[str, ...]
    warm_start: Mapping[str, Any]


SHAPES = TaughtWorld(
    **vars(world.SHAPES),
    demonstrate=lambda problem, seed: demonstrate(problem, NoiseRates(), seed=seed),
    response=right_response,
    seen_words=(),
    warm_start={},
)
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
"""The chain world with weights that were trained so many steps to use worked solutions (`lab.doses`); not shipped."""
KINDS = {kind.name: kind for kind in (SHAPES, CHAIN)} | {
    name: dataclasses.replace(CHAIN, name=name, assets=ROOT / "build" / name, held_out=()) for name in DOSES
}
