"""Defines what makes an embedded world: its problems, images and held-out splits, and the place of its weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cepo.microgeo.figures import draw_figure
from cepo.microgeo.problems import Problem, generate_problem

if TYPE_CHECKING:
    from PIL import Image


@dataclass(frozen=True, kw_only=True)
class WorldKind:
    """The definition of an embedded world.

    Attributes:
        assets: folder of the shipped weights. The code beside it belongs to the world's fingerprint.
        generate: `generate(seed, index, stream=...)` returns a problem.
        solution: returns the correct response for the column `solution` of the data set; None without that column.
        held_out: splits besides `train` and `validation`, each with its own distribution.
    """

    name: str
    assets: Path
    generate: Callable[..., Problem]
    draw: Callable[[Any], Image.Image]
    solution: Callable[[Any], str] | None = None
    held_out: tuple[str, ...] = ()

    @property
    def splits(self) -> tuple[str, ...]:
        return "train", "validation", *self.held_out


SHAPES = WorldKind(name="shapes", assets=Path(__file__).parent / "assets", generate=generate_problem, draw=draw_figure)
