"""The problems, images and demonstrations of the chain world: a beetle's walk along a ruler.

A walk has 7 to 12 steps that depend on each other.

The image shows rows of figures. Each figure moves the beetle, and the answer is its position after each row:

- A filled triangle moves it right, a filled square left, by lengths that the text states. The ruler's ends stop it.
- A filled circle reflects its position about the middle of the ruler.
- A filled diamond returns it to its start.
- A hollow figure is a distractor without effect.

A mistake affects all later steps. At the end of its row it is fatal, because the row's position is part of the answer.
Before that, a correction, a diamond or an end of the ruler can repair it.

A cell of the image has 32x32 pixels, so that it is one image token. Colours, sizes, positions and rotations within a cell
are random and have no meaning, like the specks of the split `distractors`.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from string import ascii_uppercase

from PIL import Image, ImageDraw

from cepo.microgeo.figures import FILLS, INKS, MERGE_SIZE, PAPERS, PATCH_SIZE, Point
from cepo.microgeo.problems import Numbers, ToyProblem
from lab.worlds.demonstrations import WARM_START, Demonstration, Slip, near_number, no_slip

RULER = 20
COLUMNS = 3
ROWS = 4
NAMES = {"t": "triangle", "s": "square", "c": "circle", "d": "diamond"}
"""Figures as letters in `ToyProblem.seen`: upper case for filled, lower case for hollow; `/` ends a row."""
_SHARES = {"t": 0.3, "s": 0.3, "c": 0.2, "d": 0.2}
CELL = PATCH_SIZE * MERGE_SIZE
_OVERSAMPLING = 2
_CORNERS = {"t": (3, -math.pi / 2), "s": (4, math.pi / 4), "d": (4, 0.0)}
CONNECTIVES = ("Then", "Now", "Next", "So", "And", "Here")


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
NUM_NAMINGS = 12800
"""The number of first warm-start images whose figures are only named: walks alone teach the model to see much later."""


@dataclass(frozen=True)
class ChainProblem(ToyProblem):
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


def draw_chain(problem: ChainProblem) -> Image.Image:
    """Draws the image of a problem (RGB, 96x128), a pure function of the problem."""
    rng = random.Random(f"chain figure/{problem.stream}/{problem.seed}/{problem.index}")
    kind = DISTRIBUTIONS.get(problem.stream, Distribution())
    size = COLUMNS * CELL * _OVERSAMPLING, ROWS * CELL * _OVERSAMPLING
    paper = rng.choice(PAPERS)
    image = Image.new("RGB", size, paper)
    draw = ImageDraw.Draw(image)
    if kind.specks:
        for _ in range(24):
            x, y = rng.uniform(0, size[0]), rng.uniform(0, size[1])
            draw.ellipse((x - 2, y - 2, x + 2, y + 2), fill=rng.choice(FILLS))
    for y, row in enumerate(problem.rows):
        for x, figure in enumerate(row):
            _draw_figure(draw, rng, figure, (x + 0.5, y + 0.5), paper, unseen=kind.unseen_shapes)
    return image.reduce(_OVERSAMPLING)


def _draw_figure(
    draw: ImageDraw.ImageDraw,
    rng: random.Random,
    figure: str,
    cell: Point,
    paper: tuple[int, int, int],
    *,
    unseen: bool,
) -> None:
    """Draws a figure near the centre of its cell, given in cells; a hollow figure has the paper's colour inside."""
    scale = CELL * _OVERSAMPLING
    x, y = (scale * middle + _OVERSAMPLING * rng.uniform(-1.5, 1.5) for middle in cell)
    radius = _OVERSAMPLING * (rng.uniform(9, 10) if unseen else rng.uniform(11.5, 13))
    turn = rng.choice((-1, 1)) * rng.uniform(0.2, 0.3) if unseen else rng.uniform(-0.12, 0.12)
    colour = rng.choice(INKS)
    for size, fill in ((radius, colour), (0.58 * radius, paper))[: 1 if figure.isupper() else 2]:
        if figure in "cC":
            draw.ellipse((x - size, y - size, x + size, y + size), fill=fill)
        else:
            count, first = _CORNERS[figure.lower()]
            angles = (turn + first + 2 * math.pi * corner / count for corner in range(count))
            draw.polygon([(x + size * math.cos(angle), y + size * math.sin(angle)) for angle in angles], fill=fill)


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
