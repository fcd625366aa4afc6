"""Defines the embedded worlds by name: their problems, images and demonstrations, and the place of their weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cepo.microgeo.chain import DISTRIBUTIONS, NAMES, chain_solution, generate_chain_problem
from cepo.microgeo.chain_demonstrations import demonstrate_chain
from cepo.microgeo.chain_figures import draw_chain
from cepo.microgeo.demonstrations import Demonstration, NoiseRates, demonstrate
from cepo.microgeo.figures import draw_figure
from cepo.microgeo.problems import Problem, generate_problem, right_response

if TYPE_CHECKING:
    from PIL import Image


@dataclass(frozen=True)
class WorldKind:
    """The definition of an embedded world. Its problems are `ChainProblem` or `Problem`, hence `Any`.

    Attributes:
        name: the argument of `cepo microgeo --world`.
        prefix: of its parts' names: `microgeo:` + prefix + `train`, `validation`, `model` or a held-out split.
        generate: `generate(seed, index, stream=...)` returns a problem.
        response: returns a response for the tokenizer's training; together they have all of the world's words.
        solution: returns the correct response for the column `solution` of the data set; None without that column.
        seen_words: the response's words that state what is seen; if empty, its first token does.
        held_out: further splits, each with its own distribution.
        warm_start: settings of the warm start.
    """

    name: str
    prefix: str
    assets: Path
    generate: Callable[..., Any]
    draw: Callable[[Any], Image.Image]
    demonstrate: Callable[[Any, int], Demonstration]
    response: Callable[[Any], str]
    solution: Callable[[Any], str] | None
    seen_words: tuple[str, ...]
    held_out: tuple[str, ...]
    warm_start: Mapping[str, Any]

    @property
    def splits(self) -> tuple[str, ...]:
        return "train", "validation", *self.held_out


def _shapes_demonstration(problem: Problem, seed: int) -> Demonstration:
    return demonstrate(problem, NoiseRates(), seed=seed)


_PACKAGE = Path(__file__).parent
SHAPES = WorldKind(
    name="shapes",
    prefix="",
    assets=_PACKAGE / "assets",
    generate=generate_problem,
    draw=draw_figure,
    demonstrate=_shapes_demonstration,
    response=right_response,
    solution=None,
    seen_words=(),
    held_out=(),
    warm_start={},
)
CHAIN = WorldKind(
    name="chain",
    prefix="chain-",
    assets=_PACKAGE / "chain_assets",
    generate=generate_chain_problem,
    draw=draw_chain,
    demonstrate=lambda problem, seed: demonstrate_chain(problem, seed=seed),
    response=lambda problem: demonstrate_chain(problem, seed=0).response,
    solution=chain_solution,
    seen_words=("hollow", *NAMES.values()),
    held_out=tuple(DISTRIBUTIONS),
    warm_start={"num_steps": 1900, "batch_size": 32, "num_threads": 2, "bfloat16": False},
)
KINDS = {kind.name: kind for kind in (SHAPES, CHAIN)}
