"""Generates the chain world's demonstrations: walks with mistakes, corrections, varied wording, and hints."""

from __future__ import annotations

import random
from dataclasses import dataclass

from lab.worlds.chain import NAMES, RULER, ChainProblem, Naming, answer_text, name_of, step
from lab.worlds.demonstrations import Demonstration, near_number

CONNECTIVES = ("Then", "Now", "Next", "So", "And", "Here")


@dataclass(frozen=True)
class ChainNoise:
    """Probabilities per step, except `hinted`, and of hinted ones `bends` and `ignores`, which are per demonstration.

    `circle`, `diamond` and `hollow` are those of the typical mistakes. `corrects` is the probability of correcting a
    wrong step, `doubts` that of repeating a correct one. `connective` is the share of steps and row ends that begin
    with a word without meaning. Misread figures, slips and doubts have probability 0 by default: a rare mistake has a
    gradient many times as large as a frequent one, and a model that makes rare mistakes anywhere learns mainly their
    noise, whatever its credit.
    """

    misread: float = 0.0
    slip: float = 0.0
    circle: float = 0.57
    diamond: float = 0.2
    hollow: float = 0.2
    corrects: float = 0.1
    doubts: float = 0.0
    connective: float = 0.8
    hinted: float = 0.60
    bends: float = 0.40
    ignores: float = 0.03


def demonstrate_chain(problem: ChainProblem, *, seed: int, rates: ChainNoise | None = None) -> Demonstration:
    """Returns a noisy solution of `problem`, a pure function of the problem, the rates and the seed.

    A hint usually states the demonstration's own answer. A hint that bends the results has random positions, and the
    last figure of each row is made to lead to them. An ignored hint is wrong and changes nothing.
    """
    rates = rates or ChainNoise()
    rng = random.Random(f"chain demonstration/{seed}/{problem.id}")
    hinted, kind = rng.random() < rates.hinted, rng.random()
    anywhere = [rng.randint(0, RULER) for _ in problem.rows]
    if isinstance(problem, Naming):
        return _names(problem, anywhere if hinted else None)
    response, ends = _walk(problem, rng, rates, anywhere if hinted and kind < rates.bends else None)
    if not hinted:
        return Demonstration(problem, response, None)
    if rates.bends <= kind < rates.bends + rates.ignores:
        row = rng.randrange(len(ends))
        ends[row] = rng.choice([place for place in range(RULER + 1) if place != ends[row]])
    return Demonstration(problem, response, answer_text(ends))


def _names(problem: Naming, ends: list[int] | None) -> Demonstration:
    """Names the figures and repeats a hint's positions at their rows' ends, which teaches the model to read it."""
    parts = list[str]()
    for label, figure, ended_row in problem.cells():
        parts.append(f"{label} {name_of(figure)}")
        if ended_row and ends:
            parts.append(f"Row {ended_row} {ends[ended_row - 1]}.")
    return Demonstration(problem, " ".join(parts), answer_text(ends) if ends else None)


def _walk(
    problem: ChainProblem, rng: random.Random, rates: ChainNoise, bent: list[int] | None
) -> tuple[str, list[int]]:
    """Returns a response and its positions after the rows, which are `bent` if that is given."""
    parts, ends, place = list[str](), list[int](), problem.numbers[0]
    for label, figure, ended_row in problem.cells():
        right = step(figure, place, problem.numbers)
        text, result = noisy_step(problem, figure, place, rng, rates)
        if ended_row and bent:
            result = bent[len(ends)]
            right = text, result
        parts.append(f"{connective(rng, rates)}{label} {text}{result}.")
        if rng.random() < (rates.doubts if (text, result) == right else rates.corrects):
            text, result = right
            parts.append(f"No, {label} {text}{result}.")
        place = result
        if ended_row:
            parts.append(f"{connective(rng, rates)}Row {ended_row} {place}.")
            ends.append(place)
    return f"{' '.join(parts)} \\boxed{{{answer_text(ends)}}}", ends


def connective(rng: random.Random, rates: ChainNoise) -> str:
    """Returns a word without meaning and a space, or nothing."""
    return f"{rng.choice(CONNECTIVES)} " if rng.random() < rates.connective else ""


def noisy_step(
    problem: ChainProblem, figure: str, place: int, rng: random.Random, rates: ChainNoise
) -> tuple[str, int]:
    """Returns a step's text up to its result, and the result, with the mistakes of `rates`."""

    def slip(result: int) -> int:
        return min(near_number(rng, result), RULER) if rng.random() < rates.slip else result

    if rng.random() < rates.misread:
        figure = rng.choice([other for letter in NAMES for other in (letter, letter.upper()) if other != figure])
    rate = rates.hollow if figure.islower() else {"C": rates.circle, "D": rates.diamond}.get(figure, 0.0)
    return step(figure, place, problem.numbers, misconceived=rng.random() < rate, slip=slip)
