"""Draws figures of two groups of shapes, each with a caption of 16 tokens and a question that only the figure answers.

    python examples/eyes/figures.py build/eyes --seed 0

writes `train.jsonl` and `held_out.jsonl` with their images, and two controls on the held-out figures: `captions.jsonl`
has each figure's caption as text in place of its image, `blank.jsonl` a blank image. No held-out figure has the caption
of a training figure.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageDraw

IMAGE_SIDE = 64
CELL_SIDE = 16
CELLS_PER_SIDE = IMAGE_SIDE // CELL_SIDE  # each cell has at most one shape
PAPER = (250, 250, 248)
COLOURS = {"blue": (40, 90, 220), "green": (30, 150, 60), "red": (210, 40, 40), "yellow": (225, 190, 30)}
SHAPES = ("circles", "squares", "triangles")
COUNTS = range(2, 9)  # 8 shapes fill a half
NUM_TRAINING = 800
NUM_HELD_OUT = 256
QUESTION = "How many shapes are there? Answer with a short calculation."


@dataclass(frozen=True)
class Group:
    """Shapes of one kind and colour."""

    count: int
    colour: str
    shape: str

    def __str__(self) -> str:
        return f"{self.count} {self.colour} {self.shape}"


@dataclass(frozen=True)
class Figure:
    """A group in the left half and a different one in the right half."""

    left: Group
    right: Group

    @property
    def caption(self) -> str:
        return f"There are {self.left} and {self.right} in the picture.\n"

    @property
    def answer(self) -> str:
        return str(self.left.count + self.right.count)

    @property
    def solution(self) -> str:
        return f"There are {self.left.count} + {self.right.count} = {self.answer} shapes in the picture."


def all_figures() -> list[Figure]:
    """Returns the 6,972 figures that differ in their captions."""
    groups: list[Group] = []
    for count, colour, shape in itertools.product(COUNTS, COLOURS, SHAPES):
        groups.append(Group(count, colour, shape))
    figures: list[Figure] = []
    for left, right in itertools.permutations(groups, 2):
        figures.append(Figure(left, right))
    return figures


def split(seed: int) -> tuple[list[Figure], list[Figure]]:
    """Returns the figures for training, in random order, and the held-out ones."""
    figures = all_figures()
    random.Random(seed).shuffle(figures)
    return figures[NUM_HELD_OUT:], figures[:NUM_HELD_OUT]


def draw(figure: Figure, random_numbers: random.Random) -> Image.Image:
    """Draws the figure (RGB, 64 x 64) with shapes of random sizes in random cells."""
    image = Image.new("RGB", (IMAGE_SIDE, IMAGE_SIDE), PAPER)
    pen = ImageDraw.Draw(image)
    middle = CELLS_PER_SIDE // 2
    halves = ((figure.left, range(middle)), (figure.right, range(middle, CELLS_PER_SIDE)))
    for group, columns in halves:
        cells = list(itertools.product(range(CELLS_PER_SIDE), columns))
        for row, column in random_numbers.sample(cells, group.count):
            _draw_shape(pen, group, row, column, random_numbers)
    return image


def _draw_shape(pen: ImageDraw.ImageDraw, group: Group, row: int, column: int, random_numbers: random.Random) -> None:
    side = random_numbers.randint(8, 12)
    left = column * CELL_SIDE + random_numbers.randint(1, CELL_SIDE - side - 1)
    top = row * CELL_SIDE + random_numbers.randint(1, CELL_SIDE - side - 1)
    right = left + side
    bottom = top + side
    colour = COLOURS[group.colour]
    if group.shape == "circles":
        pen.ellipse((left, top, right, bottom), fill=colour)
    elif group.shape == "squares":
        pen.rectangle((left, top, right, bottom), fill=colour)
    else:
        pen.polygon([(left, bottom), (right, bottom), ((left + right) / 2, top)], fill=colour)


def write_rows(figures: Sequence[Figure], name: str, folder: Path, *, seed: int) -> None:
    """Writes `name`.jsonl and its images: a question about each figure, its answer and a worked solution."""
    random_numbers = random.Random(f"{name}/{seed}")
    (folder / name).mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, object]] = []
    for index, figure in enumerate(figures):
        image_name = f"{name}/{index}.png"
        draw(figure, random_numbers).save(folder / image_name)
        rows.append(_row(figure, question=f"<image>{QUESTION}", images=[image_name]))
    _write_lines(rows, folder / f"{name}.jsonl")


def write_controls(figures: Sequence[Figure], folder: Path) -> None:
    """Writes `captions.jsonl`, where text says what the figure shows, and `blank.jsonl`, where nothing does."""
    Image.new("RGB", (IMAGE_SIDE, IMAGE_SIDE), PAPER).save(folder / "blank.png")
    captions: list[dict[str, object]] = []
    blanks: list[dict[str, object]] = []
    for figure in figures:
        captions.append(_row(figure, question=figure.caption + QUESTION, images=[]))
        blanks.append(_row(figure, question=f"<image>{QUESTION}", images=["blank.png"]))
    _write_lines(captions, folder / "captions.jsonl")
    _write_lines(blanks, folder / "blank.jsonl")


def _row(figure: Figure, *, question: str, images: list[str]) -> dict[str, object]:
    return {"question": question, "answer": figure.answer, "solution": figure.solution, "images": images}


def _write_lines(rows: Sequence[dict[str, object]], file: Path) -> None:
    lines = [json.dumps(row) + "\n" for row in rows]
    file.write_text("".join(lines), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    training, held_out = split(arguments.seed)
    write_rows(training[:NUM_TRAINING], "train", arguments.folder, seed=arguments.seed)
    write_rows(held_out, "held_out", arguments.folder, seed=arguments.seed)
    write_controls(held_out, arguments.folder)


if __name__ == "__main__":
    main()
