"""Generates the problems of the chain world: a beetle's walk along a ruler, in 7 to 12 steps that depend on each other.

The image shows rows of figures. Each figure moves the beetle, and the answer is its position after each row:

- A filled triangle moves it right, a filled square left, by lengths that the text states. The ruler's ends stop it.
- A filled circle reflects its position about the middle of the ruler.
- A filled diamond returns it to its start.
- A hollow figure is a distractor without effect.

A mistake affects all later steps. At the end of its row it is fatal, because the row's position is part of the answer.
Before that, a correction, a diamond or an end of the ruler can repair it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from string import ascii_uppercase

from cepo.microgeo.world import Numbers, Problem
from lab.worlds.solutions import Slip, no_slip

RULER = 20
COLUMNS = 3
ROWS = 4
NAMES = {"t": "triangle", "s": "square", "c": "circle", "d": "diamond"}
"""Figures as letters in `Problem.seen`: upper case for filled, lower case for hollow; `/` ends a row."""
_SHARES = {"t": 0.3, "s": 0.3, "c": 0.2, "d": 0.2}


@dataclass(frozen=True)
class Distribution:
    """The distribution of a split's problems. `held_out_starts`: starts are multiples of 7, as in no other split."""

    num_figures: tuple[int, int] = (7, 10)
    hollow: float = 0.25
    held_out_starts: bool = False
    unseen_shapes: bool = False  # figures are smaller and rotated further than any in training
    specks: bool = False


DISTRIBUTIONS = {
    "numbers": Distribution(held_out_starts=True),
    "shapes": Distribution(unseen_shapes=True),
    "longer": Distribution(num_figures=(11, 12)),
    "distractors": Distribution(hollow=0.5, specks=True),
}
"""The distributions of the held-out splits by stream; all other streams have the training distribution."""
WARM_START, NUM_NAMINGS = "warmstart", 12800
"""The number of first warm-start images whose figures are only named: walks alone teach the model to see much later."""


@dataclass(frozen=True)
class ChainProblem(Problem):
    """A walk: `seen` has the figures by row, `numbers` the start and the lengths to the right and to the left."""

    @property
    def question(self) -> str:
        start, right, left = self.numbers
        return f"Start at {start}. Triangles go {right} right, squares {left} left. Where is it after each row?"

    @property
    def answer(self) -> str:
        return answer_text([places[-1] for places in self.places()])

    @property
    def rows(self) -> list[str]:
        return self.seen.split("/")

    def places(self) -> list[list[int]]:
        """Returns the correct position after each figure, by row."""
        place, found = self.numbers[0], list[list[int]]()
        for row in self.rows:
            found.append([])
            for figure in row:
                place = step(figure, place, self.numbers)[1]
                found[-1].append(place)
        return found

    def cells(self) -> Iterator[tuple[str, str, int | None]]:
        """Yields each figure's label (A to L by its cell in the image), its letter, and the row that it ends if any."""
        for number, row in enumerate(self.rows):
            for column, figure in enumerate(row):
                label = ascii_uppercase[number * COLUMNS + column]
                yield label, figure, number + 1 if column == len(row) - 1 else None


class Naming(ChainProblem):
    """An image whose figures are to be named; used in the warm start only."""

    @property
    def question(self) -> str:
        return "Name the figures."


def generate_chain_problem(seed: int, index: int, *, stream: str = "train") -> ChainProblem:
    """Returns problem number `index` of a stream, a pure function of the arguments."""
    rng = random.Random(f"chain/{stream}/{seed}/{index}")
    kind = DISTRIBUTIONS.get(stream, Distribution())
    start = rng.choice([start for start in range(3, 18) if (start % 7 == 0) == kind.held_out_starts])
    numbers = start, rng.randint(2, 5), rng.randint(2, 5)
    count = rng.randint(*kind.num_figures)
    figures = [
        letter if rng.random() < kind.hollow else letter.upper()
        for letter in rng.choices(list(_SHARES), list(_SHARES.values()), k=count)
    ]
    taken = iter(figures)
    rows = ["".join(next(taken) for _ in range(length)) for length in _row_lengths(rng, count)]
    world = Naming if stream == WARM_START and index < NUM_NAMINGS else ChainProblem
    return world("chain", "/".join(rows), numbers, seed, stream, index)


def step(
    figure: str, place: int, numbers: Numbers, *, misconceived: bool = False, slip: Slip = no_slip
) -> tuple[str, int]:
    """Returns a step's text up to its result, and the result: the position after `figure` for a beetle at `place`.

    `misconceived` makes the typical mistake of figures that have one: a circle doubles the position, a diamond leads to
    0, a hollow figure counts. `slip` is applied to computed results.
    """
    start, right, left = numbers
    name, doubles, kind = name_of(figure), figure == "C" and misconceived, figure.upper()
    if figure.islower() and not misconceived:
        return f"{name} stays ", place
    if kind == "D":
        return f"{name} back to ", 0 if figure == "D" and misconceived else start
    if kind == "C" and not doubles:
        return f"{name} {RULER}-{place}=", slip(RULER - place)
    change = {"T": right, "S": -left, "C": place}[kind]
    moved, sum_text = place + change, f"{name} {place}{'-' if kind == 'S' else '+'}{abs(change)}"
    if not 0 <= moved <= RULER:
        return f"{sum_text}, stop ", 0 if moved < 0 else RULER
    return f"{sum_text}=", slip(moved)


def name_of(figure: str) -> str:
    """Returns `triangle` for T and `hollow triangle` for t."""
    return NAMES[figure.lower()] if figure.isupper() else f"hollow {NAMES[figure]}"


def answer_text(places: list[int]) -> str:
    """Returns the positions after the rows in the format of the box."""
    return f"({','.join(map(str, places))})"


def chain_solution(problem: ChainProblem) -> str:
    """Returns the correct response in its plainest wording."""
    parts, place, ends = list[str](), problem.numbers[0], list[int]()
    for label, figure, ended_row in problem.cells():
        text, place = step(figure, place, problem.numbers)
        parts.append(f"{label} {text}{place}.")
        if ended_row:
            parts.append(f"Row {ended_row} {place}.")
            ends.append(place)
    return f"{' '.join(parts)} \\boxed{{{answer_text(ends)}}}"


def _row_lengths(rng: random.Random, count: int) -> list[int]:
    """Cuts `count` figures into at most 4 rows of 1 to 3."""
    while True:
        lengths = list[int]()
        while sum(lengths) < count:
            lengths.append(min(rng.randint(1, COLUMNS), count - sum(lengths)))
        if len(lengths) <= ROWS:
            return lengths
