"""Generates demonstrations for the embedded model's warm start: noisy solutions, some with a correct or wrong hint.

The noise makes the model imperfect: a demonstration may misread the image or compute a wrong result, and each family
has a systematic mistake with its own rate. The hints teach the model what `Here is a sample answer` means. They mostly
state the demonstration's own answer, so a correct hint makes the correct reading of the image more likely and a wrong
hint makes it less likely.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from cepo.microgeo.world import FAMILIES, Problem
from lab.worlds.solutions import Slip, Steps, solve


@dataclass(frozen=True)
class NoiseRates:
    """Probabilities of the mistakes per demonstration, or of `slip` per computed result.

    Hinted demonstrations misread more often, which teaches the model that a hint says what was seen.
    """

    misread: float = 0.12
    misread_when_hinted: float = 0.35
    slip: float = 0.05
    misconception: dict[str, float] = field(
        default_factory=lambda: {"perimeter": 0.10, "angle": 0.30, "ticks": 0.36, "fence": 0.48}
    )
    hinted: float = 0.40
    hint_bends_the_result: float = 0.08
    hint_is_ignored: float = 0.08


@dataclass(frozen=True)
class Demonstration:
    """The response that the model learns for a problem, and the hint that it is shown, if any."""

    problem: Problem
    response: str
    hint: str | None


def demonstrate(problem: Problem, rates: NoiseRates, *, seed: int) -> Demonstration:
    """Returns a noisy solution of `problem`, a pure function of the problem, the rates and the seed."""
    rng = random.Random(f"demonstration/{seed}/{problem.id}")
    family = FAMILIES[problem.family]
    seen = problem.seen
    hinted = rng.random() < rates.hinted
    if rng.random() < (rates.misread_when_hinted if hinted else rates.misread):
        seen = rng.choice([value for value in family.seen_values if value != problem.seen])
    misconceived = rng.random() < rates.misconception[problem.family]
    steps = solve(problem, seen=seen, misconceived=misconceived, slip=_slips(rng, rates.slip))
    if not hinted:
        return Demonstration(problem, response_text(steps), None)
    kind = rng.random()
    own = steps[-1][1]
    if kind < rates.hint_bends_the_result + rates.hint_is_ignored:
        hint = _other_number(rng, own)
        if kind < rates.hint_bends_the_result:
            steps = [*steps[:-1], (steps[-1][0], hint)]
        return Demonstration(problem, response_text(steps), str(hint))
    return Demonstration(problem, response_text(steps), str(own))


def _slips(rng: random.Random, probability: float) -> Slip:
    def slip(result: int) -> int:
        return near_number(rng, result) if rng.random() < probability else result

    return slip


def near_number(rng: random.Random, number: int) -> int:
    return rng.choice(
        [near for near in (number - 10, number - 2, number - 1, number + 1, number + 2, number + 10) if near > 0]
    )


def _other_number(rng: random.Random, number: int) -> int:
    return rng.choice([other for other in range(max(2, number // 2), 2 * number + 10) if other != number])


def response_text(steps: Steps) -> str:
    """Returns the reasoning in words, with the last result in the box."""
    reasoning = " ".join(f"{text}{result}." for text, result in steps)
    return f"{reasoning} \\boxed{{{steps[-1][1]}}}"


def right_response(problem: Problem) -> str:
    """Returns the solution without mistakes."""
    return response_text(solve(problem))
