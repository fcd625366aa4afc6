"""Makes the figures of the world `eyes`, whose shapes a response adds up, and the demonstrations of its warm start.

A figure is one of `examples/eyes`, with a group of shapes in each half. A response states the running totals of
`running_totals` for 0, the shapes on the left and those on the right, in the same phrasings:

    So we have 6 so far. Then that makes 14 in all. Answer: 14
"""

from __future__ import annotations

import json
import random
import runpy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.studies.running_totals.problems import (
    KINDS,
    SHARES,
    Problem,
    careless_totals,
    following_totals,
    solution,
    stated,
)
from lab.support.machine import ROOT

figures: Any = runpy.run_path(str(ROOT / "examples" / "eyes" / "figures.py"))
"""The names of the example's programme."""
QUESTION = "<image>Add up the shapes step by step."


@dataclass(frozen=True, kw_only=True)
class Demonstration:
    """A figure, the solution that its prompt has in view (None for none), and the response to imitate."""

    figure: Any
    shown: str | None
    response: str


def counted(figure: Any) -> Problem:
    """Returns the sum that a figure poses."""
    return Problem(addends=(0, figure.left.count, figure.right.count))


def drawn(count: int, *, first: int) -> list[Any]:
    """Returns `count` figures from this place of the example's order, whose captions differ.

    Those before the first are `held_out` ones of the example, on which its tower is not trained.
    """
    training, held_out = figures["split"](0)
    return [*held_out, *training][first : first + count]


def miscounted_totals(problem: Problem, draw: random.Random, *, miscounted: float) -> list[int]:
    """Returns totals that count each group one shape short with this probability; those after it add on to it."""
    running = 0
    totals: list[int] = []
    for addend in problem.addends[1:]:
        running += addend - (draw.random() < miscounted)
        totals.append(running)
    return totals


def demonstration(index: int, chosen: Sequence[Any], *, seed: int, miscounted: float) -> Demonstration:
    """Returns the demonstration of this number, of one of the chosen figures. Every second one has a solution in view.

    Without the figure's own solution in view, its totals miscount each group with this probability.
    """
    draw = random.Random(f"figures/{seed}/{index}")
    figure = draw.choice(chosen)
    problem = counted(figure)
    kind = draw.choices(KINDS, SHARES)[0] if index % 2 else "none"
    if kind in ("none", "other"):
        other = counted(draw.choice(chosen))
        response = stated(miscounted_totals(problem, draw, miscounted=miscounted), draw)
        return Demonstration(
            figure=figure, shown=stated(other.totals, draw) if kind == "other" else None, response=response
        )
    totals = problem.totals if kind == "right" else careless_totals(problem, draw)
    shown = stated(totals, draw)
    return Demonstration(figure=figure, shown=shown, response=stated(following_totals(problem, totals, draw), draw))


def write_figures(folder: Path, name: str, chosen: Sequence[Any]) -> None:
    """Writes the rows `name`.jsonl that `cepo train` reads, and their images in the folder `name`."""
    draw = random.Random(name)
    (folder / name).mkdir(parents=True, exist_ok=True)
    lines: list[str] = []
    for index, figure in enumerate(chosen):
        image = f"{name}/{index}.png"
        figures["draw"](figure, draw).save(folder / image)
        row = {"question": QUESTION, "answer": figure.answer, "solution": solution(counted(figure)), "images": [image]}
        lines.append(json.dumps(row) + "\n")
    (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
