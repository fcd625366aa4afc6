"""Generates geometry problems whose answer needs a quantity that only the image shows.

A problem is a pure function of (seed, stream, index). The numbers in the text are independent of the quantity in the
image, so the text alone does not reveal it.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

Numbers = tuple[int, ...]


@dataclass(frozen=True)
class Family:
    """A kind of problem; `answer` computes it from the quantity in the image and the numbers in the text."""

    seen_values: tuple[str, ...]
    draw_numbers: Callable[[random.Random], Numbers]
    question: Callable[[Numbers], str]
    answer: Callable[[str, Numbers], int]


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
        return str(FAMILIES[self.family].answer(self.seen, self.numbers))

    @property
    def id(self) -> str:
        return f"{self.stream}-{self.seed}-{self.index}"


def _remaining_angle(seen: str, numbers: Numbers) -> int:
    count = int(seen)
    return (180 * (count - 2) - sum(numbers)) // (count - 2)


def _two_different_lengths(rng: random.Random) -> Numbers:
    width = rng.randint(11, 29)
    return width, rng.choice([height for height in range(11, 30) if abs(height - width) >= 2])


FAMILIES: dict[str, Family] = {
    "perimeter": Family(
        ("3", "4", "5", "6"),
        lambda rng: (rng.randint(3, 15),),
        lambda numbers: f"Each side is {numbers[0]}. What is the perimeter?",
        lambda seen, numbers: int(seen) * numbers[0],
    ),
    "angle": Family(
        ("3", "4", "5"),
        lambda rng: (6 * rng.randint(5, 14), 6 * rng.randint(5, 14)),
        lambda numbers: f"Two angles are {numbers[0]} and {numbers[1]}, the others equal. How large is one of them?",
        _remaining_angle,
    ),
    "ticks": Family(
        ("2", "3", "4", "5", "6"),
        lambda rng: (rng.randint(3, 15),),
        lambda numbers: f"Each part is {numbers[0]}. How long is the bar?",
        lambda seen, numbers: int(seen) * numbers[0],
    ),
    "fence": Family(
        ("width", "height"),
        _two_different_lengths,
        lambda numbers: f"The yard is {numbers[0]} wide and {numbers[1]} high. How long is the fence?",
        lambda seen, numbers: 2 * sum(numbers) - numbers[0 if seen == "width" else 1],
    ),
}


def generate_problem(seed: int, index: int, *, stream: str = "train") -> Problem:
    """Returns problem number `index` of a stream; families alternate."""
    rng = random.Random(f"{stream}/{seed}/{index}")
    name, family = list(FAMILIES.items())[index % len(FAMILIES)]
    return Problem(name, rng.choice(family.seen_values), family.draw_numbers(rng), seed, stream, index)
