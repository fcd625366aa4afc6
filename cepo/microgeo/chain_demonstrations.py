"""Makes the chain world's demonstrations: walks with mistakes, corrections, varied wording, and hints."""

from __future__ import annotations

import random
from dataclasses import dataclass

from cepo.microgeo.chain import NAMES, RULER, ChainProblem, Naming, answer_text, name_of, step
from cepo.microgeo.demonstrations import Demonstration, near_number

_CONNECTIVES = ("Then", "Now", "Next", "So")


@dataclass(frozen=True)
class ChainNoise:
    """Probabilities per step, except `hinted`, `bends` and `ignores`, which are per demonstration.

    `corrects` is that of taking back a wrong step, `doubts` that of repeating a right one. `connective` is the share of
    steps that begin with a word without meaning.
    """

    misread: float = 0.015
    slip: float = 0.02
    circle: float = 0.57
    diamond: float = 0.30
    hollow_square: float = 0.53
    corrects: float = 0.25
    doubts: float = 0.015
    connective: float = 0.5
    hinted: float = 0.40
    bends: float = 0.08
    ignores: float = 0.08


def demonstrate_chain(problem: ChainProblem, *, seed: int, rates: ChainNoise | None = None) -> Demonstration:
    """Returns a noisy solution of `problem`, a pure function of the problem, the rates and the seed.

    A hint states the demonstration's own answer. A hint that bends the result has another place for one row, which the
    last figure of that row is made to lead to; an ignored one changes nothing.
    """
    if isinstance(problem, Naming):
        names = (f"{label} {name_of(figure)}" for label, figure, _ in problem.cells())
        return Demonstration(problem, " ".join(names), None)
    rates = rates or ChainNoise()
    rng = random.Random(f"chain demonstration/{seed}/{problem.id}")
    hinted, kind = rng.random() < rates.hinted, rng.random()
    bent = {rng.randrange(len(problem.rows)): rng.randint(0, RULER)} if hinted and kind < rates.bends else {}
    response, ends = _walk(problem, rng, rates, bent)
    if not hinted:
        return Demonstration(problem, response, None)
    if rates.bends <= kind < rates.bends + rates.ignores:
        row = rng.randrange(len(ends))
        ends[row] = rng.choice([place for place in range(RULER + 1) if place != ends[row]])
    return Demonstration(problem, response, answer_text(ends))


def _walk(problem: ChainProblem, rng: random.Random, rates: ChainNoise, bent: dict[int, int]) -> tuple[str, list[int]]:
    """Returns a response and its places after the rows; row r ends at `bent[r]` if that is given."""
    parts, ends, place = list[str](), list[int](), problem.numbers[0]
    for label, figure, ended_row in problem.cells():
        right = step(figure, place, problem.numbers)
        text, result = _noisy_step(problem, figure, place, rng, rates)
        if ended_row and len(ends) in bent:
            result = bent[len(ends)]
            right = text, result
        connective = f"{rng.choice(_CONNECTIVES)} " if rng.random() < rates.connective else ""
        parts.append(f"{connective}{label} {text}{result}.")
        if rng.random() < (rates.doubts if (text, result) == right else rates.corrects):
            text, result = right
            parts.append(f"No, {label} {text}{result}.")
        place = result
        if ended_row:
            parts.append(f"Row {ended_row} {place}.")
            ends.append(place)
    return f"{' '.join(parts)} \\boxed{{{answer_text(ends)}}}", ends


def _noisy_step(
    problem: ChainProblem, figure: str, place: int, rng: random.Random, rates: ChainNoise
) -> tuple[str, int]:
    def slip(result: int) -> int:
        return min(near_number(rng, result), RULER) if rng.random() < rates.slip else result

    if rng.random() < rates.misread:
        figure = rng.choice([other for letter in NAMES for other in (letter, letter.upper()) if other != figure])
    rate = {"C": rates.circle, "D": rates.diamond, "s": rates.hollow_square}.get(figure, 0.0)
    return step(figure, place, problem.numbers, misconceived=rng.random() < rate, slip=slip)
