"""Generates geometry problems whose answer needs a quantity that only the image shows.

A problem is a pure function of (seed, stream, index). The numbers in the text are independent of the quantity in the
image, so the text alone does not reveal it.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

Numbers = tuple[int, ...]
Slip = Callable[[int], int]
Steps = list[tuple[str, int]]


@dataclass(frozen=True)
class Family:
    """A kind of problem.

    `solve(seen, numbers, misconceived, slip)` returns the reasoning as steps `(text up to the result, result)`. The
    last result is the answer. It applies `slip` to every computed result. `misconceived` makes the family's typical
    systematic mistake.
    """

    name: str
    seen_values: tuple[str, ...]
    draw_numbers: Callable[[random.Random], Numbers]
    question: Callable[[Numbers], str]
    solve: Callable[[str, Numbers, bool, Slip], Steps]


@dataclass(frozen=True)
class Problem:
    """A problem without its image: `seen` is the quantity in the image, `numbers` are those in the text."""

    family: str
    seen: str
    numbers: Numbers
    seed: int
    stream: str
    index: int

    @property
    def question(self) -> str:
        return FAMILIES[self.family].question(self.numbers)

    @property
    def answer(self) -> str:
        return str(FAMILIES[self.family].solve(self.seen, self.numbers, False, no_slip)[-1][1])

    @property
    def id(self) -> str:
        return f"{self.stream}-{self.seed}-{self.index}"


def no_slip(result: int) -> int:
    return result


def _solve_perimeter(seen: str, numbers: Numbers, misconceived: bool, slip: Slip) -> Steps:
    count, side = int(seen), numbers[0]
    if misconceived:
        return [(f"{count} sides. {count}+{side}=", slip(count + side))]
    return [(f"{count} sides. {count}*{side}=", slip(count * side))]


def _solve_angle(seen: str, numbers: Numbers, misconceived: bool, slip: Slip) -> Steps:
    count, (first, second) = int(seen), numbers
    total = 180 * (count - 1 if misconceived else count - 2)
    known = slip(first + second)
    rest = slip(total - known)
    steps = [(f"{count} corners. {first}+{second}=", known), (f"{total}-{known}=", rest)]
    if count > 3:
        steps.append((f"{rest}/{count - 2}=", slip(rest // (count - 2))))
    return steps


def _solve_ticks(seen: str, numbers: Numbers, misconceived: bool, slip: Slip) -> Steps:
    count, part = int(seen), numbers[0]
    factor = count + 1 if misconceived else count
    return [(f"{count} parts. {factor}*{part}=", slip(factor * part))]


def _solve_fence(seen: str, numbers: Numbers, misconceived: bool, slip: Slip) -> Steps:
    width, height = numbers
    single, double = (width, height) if seen == "width" else (height, width)
    if misconceived:
        return [(f"{seen} open. {single}+{double}=", slip(single + double))]
    doubled = slip(2 * double)
    return [(f"{seen} open. 2*{double}=", doubled), (f"{doubled}+{single}=", slip(doubled + single))]


def _two_different_lengths(rng: random.Random) -> Numbers:
    width = rng.randint(11, 29)
    return width, rng.choice([height for height in range(11, 30) if abs(height - width) >= 2])


FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        Family(
            "perimeter",
            ("3", "4", "5", "6"),
            lambda rng: (rng.randint(3, 15),),
            lambda numbers: f"Each side is {numbers[0]}. What is the perimeter?",
            _solve_perimeter,
        ),
        Family(
            "angle",
            ("3", "4", "5"),
            lambda rng: (6 * rng.randint(5, 14), 6 * rng.randint(5, 14)),
            lambda numbers: (
                f"Two angles are {numbers[0]} and {numbers[1]}, the others equal. How large is one of them?"
            ),
            _solve_angle,
        ),
        Family(
            "ticks",
            ("2", "3", "4", "5", "6"),
            lambda rng: (rng.randint(3, 15),),
            lambda numbers: f"Each part is {numbers[0]}. How long is the bar?",
            _solve_ticks,
        ),
        Family(
            "fence",
            ("width", "height"),
            _two_different_lengths,
            lambda numbers: f"The yard is {numbers[0]} wide and {numbers[1]} high. How long is the fence?",
            _solve_fence,
        ),
    )
}


def generate_problem(seed: int, index: int, *, stream: str = "train") -> Problem:
    """Returns problem number `index` of a stream; families alternate."""
    rng = random.Random(f"{stream}/{seed}/{index}")
    family = tuple(FAMILIES.values())[index % len(FAMILIES)]
    return Problem(family.name, rng.choice(family.seen_values), family.draw_numbers(rng), seed, stream, index)
