"""Generates the problems of the built-in toy task: geometry whose answer needs a quantity that only the image shows.

A problem is a pure function of (seed, stream, index). The numbers in the text are independent of the quantity in the
image, so the text alone does not reveal it.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

Numbers = tuple[int, ...]


@dataclass(frozen=True)
class ProblemFamily:
    """A kind of problem; `answer` computes it from the quantity in the image and the numbers in the text."""

    seen_values: tuple[str, ...]
    draw_numbers: Callable[[random.Random], Numbers]
    question: Callable[[Numbers], str]
    answer: Callable[[str, Numbers], int]


@dataclass(frozen=True)
class ToyProblem:
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


def _one_length(rng: random.Random) -> Numbers:
    return (rng.randint(3, 15),)


def _two_angles(rng: random.Random) -> Numbers:
    """Draws multiples of 6 degrees, so that the remaining angles are whole numbers."""
    return (6 * rng.randint(5, 14), 6 * rng.randint(5, 14))


def _length_times_seen(seen: str, numbers: Numbers) -> int:
    return int(seen) * numbers[0]


def _remaining_angle(seen: str, numbers: Numbers) -> int:
    """Returns each of the equal angles of a polygon, whose angles sum up to 180 degrees times its corners less 2."""
    num_corners = int(seen)
    sum_of_angles = 180 * (num_corners - 2)
    num_equal = num_corners - 2
    return (sum_of_angles - sum(numbers)) // num_equal


def _length_of_three_sides(seen: str, numbers: Numbers) -> int:
    width, height = numbers
    open_side = width if seen == "width" else height
    return 2 * (width + height) - open_side


def _two_different_lengths(rng: random.Random) -> Numbers:
    width = rng.randint(11, 29)
    heights = [height for height in range(11, 30) if abs(height - width) >= 2]
    return width, rng.choice(heights)


FAMILIES: dict[str, ProblemFamily] = {
    "perimeter": ProblemFamily(
        seen_values=("3", "4", "5", "6"),  # corners
        draw_numbers=_one_length,
        question=lambda numbers: f"Each side is {numbers[0]}. What is the perimeter?",
        answer=_length_times_seen,
    ),
    "angle": ProblemFamily(
        seen_values=("3", "4", "5"),  # corners
        draw_numbers=_two_angles,
        question=lambda numbers: (
            f"Two angles are {numbers[0]} and {numbers[1]}, the others equal. How large is one of them?"
        ),
        answer=_remaining_angle,
    ),
    "ticks": ProblemFamily(
        seen_values=("2", "3", "4", "5", "6"),  # parts of the bar
        draw_numbers=_one_length,
        question=lambda numbers: f"Each part is {numbers[0]}. How long is the bar?",
        answer=_length_times_seen,
    ),
    "fence": ProblemFamily(
        seen_values=("width", "height"),  # of the side without a fence
        draw_numbers=_two_different_lengths,
        question=lambda numbers: f"The yard is {numbers[0]} wide and {numbers[1]} high. How long is the fence?",
        answer=_length_of_three_sides,
    ),
}


def generate_problem(seed: int, index: int, *, stream: str = "train") -> ToyProblem:
    """Returns problem number `index` of a stream; families alternate."""
    rng = random.Random(f"{stream}/{seed}/{index}")
    name, family = list(FAMILIES.items())[index % len(FAMILIES)]
    seen = rng.choice(family.seen_values)
    numbers = family.draw_numbers(rng)
    return ToyProblem(name, seen, numbers, seed, stream, index)
