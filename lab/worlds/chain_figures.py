"""Draws the chain world's images, with one figure in each cell of 32x32 pixels, so that a cell is one image token.

Colours, sizes, positions and rotations within a cell are random and have no meaning, like the specks of the split
`distractors`.
"""

from __future__ import annotations

import math
import random

from PIL import Image, ImageDraw

from cepo.microgeo.world import FILLS, INKS, MERGE_SIZE, PAPERS, PATCH_SIZE, Point
from lab.worlds.chain import COLUMNS, DISTRIBUTIONS, ROWS, ChainProblem, Distribution

CELL = PATCH_SIZE * MERGE_SIZE
_OVERSAMPLING = 2
_CORNERS = {"t": (3, -math.pi / 2), "s": (4, math.pi / 4), "d": (4, 0.0)}


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
