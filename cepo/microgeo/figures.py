"""Draws the images of the built-in toy task."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from PIL import Image, ImageDraw

from cepo.microgeo.problems import ToyProblem

IMAGE_SIDE = 64
PATCH_SIZE = 16
MERGE_SIZE = 2
_OVERSAMPLING = 2
_MAX_TURN_RADIANS = 0.25
Colour = tuple[int, int, int]
INKS: tuple[Colour, ...] = ((20, 20, 60), (70, 10, 10), (10, 60, 20), (50, 20, 70), (25, 25, 25))
FILLS: tuple[Colour, ...] = ((120, 160, 235), (235, 150, 120), (130, 210, 140), (215, 170, 230), (225, 205, 110))
PAPERS: tuple[Colour, ...] = ((255, 255, 255), (246, 246, 240), (240, 246, 255))

Point = tuple[float, float]
"""In pixels of the finished image, from the top left corner."""


def draw_figure(problem: ToyProblem) -> Image.Image:
    """Draws the image of a problem (RGB, 64x64), a pure function of the problem."""
    rng = random.Random(f"figure/{problem.stream}/{problem.seed}/{problem.index}")
    side = IMAGE_SIDE * _OVERSAMPLING
    image = Image.new("RGB", (side, side), rng.choice(PAPERS))
    ink = rng.choice(INKS)
    fill = rng.choice(FILLS)
    pen = _Pen(ImageDraw.Draw(image), ink, fill)
    if problem.family in ("perimeter", "angle"):
        _draw_polygon(pen, rng, num_corners=int(problem.seen))
    elif problem.family == "ticks":
        _draw_ticked_bar(pen, rng, num_parts=int(problem.seen))
    else:
        _draw_open_fence(pen, rng, open_dimension=problem.seen)
    return image.reduce(_OVERSAMPLING)


@dataclass(frozen=True)
class _Pen:
    """Draws on an oversampled image, with points in pixels of the finished one."""

    canvas: ImageDraw.ImageDraw
    ink: Colour
    fill: Colour

    def filled_polygon(self, corners: list[Point]) -> None:
        self.canvas.polygon([_oversampled(corner) for corner in corners], fill=self.fill)

    def filled_rectangle(self, top_left: Point, bottom_right: Point) -> None:
        self.canvas.rectangle([_oversampled(top_left), _oversampled(bottom_right)], fill=self.fill)

    def ink_rectangle(self, top_left: Point, bottom_right: Point) -> None:
        self.canvas.rectangle([_oversampled(top_left), _oversampled(bottom_right)], fill=self.ink)

    def dot(self, centre: Point, *, radius: float) -> None:
        x, y = _oversampled(centre)
        distance = radius * _OVERSAMPLING
        self.canvas.ellipse((x - distance, y - distance, x + distance, y + distance), fill=self.ink)

    def line(self, start: Point, end: Point, *, width: int) -> None:
        self.canvas.line([_oversampled(start), _oversampled(end)], fill=self.ink, width=width * _OVERSAMPLING)


def _oversampled(point: Point) -> Point:
    x, y = point
    return x * _OVERSAMPLING, y * _OVERSAMPLING


def _draw_polygon(pen: _Pen, rng: random.Random, *, num_corners: int) -> None:
    """Draws a regular polygon, turned a little, with a dot at every corner."""
    centre_x = 32 + rng.uniform(-2, 2)
    centre_y = 32 + rng.uniform(-2, 2)
    radius = rng.uniform(23, 26)
    first_angle = rng.uniform(-_MAX_TURN_RADIANS, _MAX_TURN_RADIANS) - math.pi / 2
    corners: list[Point] = []
    for number in range(num_corners):
        angle = first_angle + 2 * math.pi * number / num_corners
        x = centre_x + radius * math.cos(angle)
        y = centre_y + radius * math.sin(angle)
        corners.append((x, y))
    pen.filled_polygon(corners)
    for corner in corners:
        pen.dot(corner, radius=4.0)


def _draw_ticked_bar(pen: _Pen, rng: random.Random, *, num_parts: int) -> None:
    """Draws a horizontal bar cut into equal parts, with a tick at every cut and at both ends."""
    bar_left = rng.uniform(4, 6)
    bar_right = 64 - rng.uniform(4, 6)
    middle = 32 + rng.uniform(-4, 4)
    bar_width = bar_right - bar_left
    top_left = (bar_left, middle - 6)
    bottom_right = (bar_right, middle + 6)
    pen.filled_rectangle(top_left, bottom_right)
    for number in range(num_parts + 1):
        x = bar_left + bar_width * number / num_parts
        top_left = (x - 1.5, middle - 14)
        bottom_right = (x + 1.5, middle + 14)
        pen.ink_rectangle(top_left, bottom_right)


def _draw_open_fence(pen: _Pen, rng: random.Random, *, open_dimension: str) -> None:
    """Draws a yard with a fence on three sides; the open one is a width (top or bottom) or height (left or right)."""
    x_of_left = 8 + rng.uniform(-2, 2)
    y_of_top = 8 + rng.uniform(-2, 2)
    x_of_right = 56 + rng.uniform(-2, 2)
    y_of_bottom = 56 + rng.uniform(-2, 2)
    top_left = (x_of_left, y_of_top)
    top_right = (x_of_right, y_of_top)
    bottom_left = (x_of_left, y_of_bottom)
    bottom_right = (x_of_right, y_of_bottom)
    open_side = rng.choice(("top", "bottom") if open_dimension == "width" else ("left", "right"))
    sides = {
        "top": (top_left, top_right),
        "bottom": (bottom_left, bottom_right),
        "left": (top_left, bottom_left),
        "right": (top_right, bottom_right),
    }
    pen.filled_rectangle(top_left, bottom_right)
    for name, (start, end) in sides.items():
        if name != open_side:
            pen.line(start, end, width=6)
