"""Makes the problems of `running_totals`, their worked solutions, and the demonstrations of the warm start.

A problem is a sum of five numbers. A response states the four running totals one by one, each in one of 36 phrasings, and
then the answer:

    Add step by step: 26 + 34 + 41 + 29 + 38.
    So we have 60 in all. Next it is 101 now. Then that makes 130 so far. So we have 168 now. Answer: 168

Four or five numbers of a response decide whether it is right; most of its words are a free choice.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

OPENERS = ("So", "Now", "Then", "Next")
VERBS = ("we have", "that makes", "it is")
ENDINGS = ("so far", "now", "in all")
NUM_ADDENDS = 5
SMALLEST, LARGEST = 3, 69
USE = 0.98
"""The probability with which a demonstration takes a total of the solution in view."""
KINDS = ("right", "wrong", "other")
SHARES = (0.4, 0.35, 0.25)
"""Which solution a demonstration has in view: the problem's own, right or wrong, or that of another problem."""
_MISTAKES = (-10, -2, -1, 1, 2, 10)

Style = Literal["free", "fixed"]
"""Whether each total has one of all phrasings, or always the first."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Numbers to add."""

    addends: tuple[int, ...]

    @property
    def question(self) -> str:
        """The user's text."""
        return f"Add step by step: {' + '.join(map(str, self.addends))}."

    @property
    def totals(self) -> list[int]:
        """The running totals, from that of the first two numbers to that of all."""
        running = self.addends[0]
        totals: list[int] = []
        for addend in self.addends[1:]:
            running += addend
            totals.append(running)
        return totals

    @property
    def answer(self) -> int:
        """The sum of all numbers."""
        return sum(self.addends)


@dataclass(frozen=True, kw_only=True)
class Demonstration:
    """A problem, the solution that its prompt has in view (None for none), and the response to imitate."""

    problem: Problem
    shown: str | None
    response: str


def draw_problem(draw: random.Random) -> Problem:
    """Returns a random problem."""
    return Problem(addends=tuple(draw.randint(SMALLEST, LARGEST) for _ in range(NUM_ADDENDS)))


def problems(count: int, *, seed: int) -> list[Problem]:
    """Returns `count` different problems, a function of the seed."""
    draw = random.Random(f"running totals/{seed}")
    distinct: dict[Problem, None] = {}
    while len(distinct) < count:
        distinct[draw_problem(draw)] = None
    return list(distinct)


def stated(totals: Sequence[int], draw: random.Random, *, style: Style = "free") -> str:
    """Returns the response that states these totals, and the last of them as the answer."""
    sentences: list[str] = []
    for total in totals:
        parts = [OPENERS[0], VERBS[0], ENDINGS[0]]
        if style == "free":
            parts = [draw.choice(OPENERS), draw.choice(VERBS), draw.choice(ENDINGS)]
        opener, verb, ending = parts
        sentences.append(f"{opener} {verb} {total} {ending}.")
    sentences.append(f"Answer: {totals[-1]}")
    return " ".join(sentences)


def solution(problem: Problem, *, style: Style = "free") -> str:
    """Returns the worked solution that the data set has of a problem, always the same."""
    draw = random.Random(f"solution/{problem.addends}")
    return stated(problem.totals, draw, style=style)


def careless_totals(problem: Problem, draw: random.Random) -> list[int]:
    """Returns totals of which one is wrong; those after it add on to it, so that they are wrong too."""
    wrong_step = draw.randrange(len(problem.addends) - 1)
    running = problem.addends[0]
    totals: list[int] = []
    for step, addend in enumerate(problem.addends[1:]):
        running += addend
        if step == wrong_step:
            possible = [running + mistake for mistake in _MISTAKES if running + mistake > 0]
            running = draw.choice(possible)
        totals.append(running)
    return totals


def forgetful_totals(problem: Problem, draw: random.Random, *, forgotten_carries: float) -> list[int]:
    """Returns totals that forget the carry of their units, and are ten less, with this probability each.

    Those after a forgotten carry add on to it. With probability 0 they are the problem's own.
    """
    running = problem.addends[0]
    totals: list[int] = []
    for addend in problem.addends[1:]:
        carries = running % 10 + addend % 10 >= 10
        running += addend
        if carries and draw.random() < forgotten_carries:
            running -= 10
        totals.append(running)
    return totals


def following_totals(problem: Problem, shown: Sequence[int], draw: random.Random) -> list[int]:
    """Returns totals that take each of those shown with probability `USE`, while both agree on the total before it.

    All others are right additions to the total before.
    """
    running = problem.addends[0]
    shown_before = problem.addends[0]
    totals: list[int] = []
    for addend, shown_total in zip(problem.addends[1:], shown, strict=True):
        agrees = running == shown_before
        running += addend
        if agrees and draw.random() < USE:
            running = shown_total
        shown_before = shown_total
        totals.append(running)
    return totals


def demonstration(index: int, *, seed: int, style: Style = "free", forgotten_carries: float = 0.0) -> Demonstration:
    """Returns the demonstration of this number, a function of the arguments. Every second one has a solution in view.

    Without the problem's own solution in view, its totals forget carries with this probability.
    """
    draw = random.Random(f"demonstration/{seed}/{index}")
    draw_of_carries = random.Random(f"carries/{seed}/{index}")
    problem = draw_problem(draw)
    if index % 2 == 0:
        totals = forgetful_totals(problem, draw_of_carries, forgotten_carries=forgotten_carries)
        return Demonstration(problem=problem, shown=None, response=stated(totals, draw, style=style))
    (kind,) = draw.choices(KINDS, SHARES)
    if kind == "other":
        shown = stated(draw_problem(draw).totals, draw, style=style)
        totals = forgetful_totals(problem, draw_of_carries, forgotten_carries=forgotten_carries)
        return Demonstration(problem=problem, shown=shown, response=stated(totals, draw, style=style))
    shown_totals = problem.totals if kind == "right" else careless_totals(problem, draw)
    shown = stated(shown_totals, draw, style=style)
    totals = following_totals(problem, shown_totals, draw)
    return Demonstration(problem=problem, shown=shown, response=stated(totals, draw, style=style))


def with_other_solutions(chosen: Sequence[Problem], *, seed: int) -> list[Problem]:
    """Returns for each problem another one, whose answer differs, for controls that read its solution."""
    draw = random.Random(f"other solutions/{seed}")
    others: list[Problem] = []
    for problem in chosen:
        other = draw_problem(draw)
        while other.answer == problem.answer:
            other = draw_problem(draw)
        others.append(other)
    return others


def write_problems(
    file: Path, chosen: Sequence[Problem], *, solved: Sequence[Problem] | None = None, style: Style = "free"
) -> None:
    """Writes problems as rows that `cepo train` reads, with the solutions of `solved`, by default their own."""
    lines: list[str] = []
    for problem, solved_problem in zip(chosen, solved or chosen, strict=True):
        row = {
            "question": problem.question,
            "answer": str(problem.answer),
            "solution": solution(solved_problem, style=style),
        }
        lines.append(json.dumps(row) + "\n")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(lines), encoding="utf-8")
