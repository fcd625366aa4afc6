"""Draws the 64x64 images: thick solid shapes with small random rotations, readable by a vision tower of two layers.

The shape shows the quantity that the text omits. Colours, position, rotation and size are irrelevant to the answer and
random.
"""

from __future__ import annotations

import math
import random

from PIL import Image, ImageDraw

from cepo.microgeo.problems import Problem

IMAGE_SIDE = 64
PATCH_SIZE = 16
MERGE_SIZE = 2
_OVERSAMPLING = 2
_MAX_TURN_RADIANS = 0.25
INKS = ((20, 20, 60), (70, 10, 10), (10, 60, 20), (50, 20, 70), (25, 25, 25))
FILLS = ((120, 160, 235), (235, 150, 120), (130, 210, 140), (215, 170, 230), (225, 205, 110))
PAPERS = ((255, 255, 255), (246, 246, 240), (240, 246, 255))

Point = tuple[float, float]


def draw_figure(problem: Problem) -> Image.Image:
    """Draws the image of a problem (RGB, 64x64), a pure function of the problem."""
    rng = random.Random(f"figure/{problem.stream}/{problem.seed}/{problem.index}")
    side = IMAGE_SIDE * _OVERSAMPLING
    image = Image.new("RGB", (side, side), rng.choice(PAPERS))
    draw = ImageDraw.Draw(image)
    ink, fill = rng.choice(INKS), rng.choice(FILLS)
    if problem.family in ("perimeter", "angle"):
        _draw_polygon(draw, rng, int(problem.seen), ink, fill)
    elif problem.family == "ticks":
        _draw_ticked_bar(draw, rng, int(problem.seen), ink, fill)
    else:
        _draw_open_fence(draw, rng, problem.seen, ink, fill)
    return image.reduce(_OVERSAMPLING)


def _pixels(point: Point) -> Point:
    return point[0] * _OVERSAMPLING, point[1] * _OVERSAMPLING


def _disc(draw: ImageDraw.ImageDraw, centre: Point, radius: float, colour: tuple[int, int, int]) -> None:
    x, y = _pixels(centre)
    r = radius * _OVERSAMPLING
    draw.ellipse((x - r, y - r, x + r, y + r), fill=colour)


def _draw_polygon(draw: ImageDraw.ImageDraw, rng: random.Random, count: int, ink: tuple, fill: tuple) -> None:
    centre = (32 + rng.uniform(-2, 2), 32 + rng.uniform(-2, 2))
    radius = rng.uniform(23, 26)
    turn = rng.uniform(-_MAX_TURN_RADIANS, _MAX_TURN_RADIANS) - math.pi / 2
    corners = [
        (
            centre[0] + radius * math.cos(turn + 2 * math.pi * k / count),
            centre[1] + radius * math.sin(turn + 2 * math.pi * k / count),
        )
        for k in range(count)
    ]
    draw.polygon([_pixels(corner) for corner in corners], fill=fill)
    for corner in corners:
        _disc(draw, corner, 4.0, ink)


def _draw_ticked_bar(draw: ImageDraw.ImageDraw, rng: random.Random, count: int, ink: tuple, fill: tuple) -> None:
    """Draws a horizontal bar cut into `count` equal parts, with a tick at every cut and at both ends."""
    left, right = rng.uniform(4, 6), 64 - rng.uniform(4, 6)
    middle = 32 + rng.uniform(-4, 4)
    draw.rectangle((*_pixels((left, middle - 6)), *_pixels((right, middle + 6))), fill=fill)
    for k in range(count + 1):
        x = left + (right - left) * k / count
        draw.rectangle((*_pixels((x - 1.5, middle - 14)), *_pixels((x + 1.5, middle + 14))), fill=ink)


def _draw_open_fence(draw: ImageDraw.ImageDraw, rng: random.Random, seen: str, ink: tuple, fill: tuple) -> None:
    """Draws a yard with a fence on three sides; the open one is a width (top or bottom) or height (left or right)."""
    left, top = 8 + rng.uniform(-2, 2), 8 + rng.uniform(-2, 2)
    right, bottom = 56 + rng.uniform(-2, 2), 56 + rng.uniform(-2, 2)
    open_side = rng.choice(("top", "bottom") if seen == "width" else ("left", "right"))
    sides = {
        "top": ((left, top), (right, top)),
        "bottom": ((left, bottom), (right, bottom)),
        "left": ((left, top), (left, bottom)),
        "right": ((right, top), (right, bottom)),
    }
    draw.rectangle((*_pixels((left, top)), *_pixels((right, bottom))), fill=fill)
    for name, (start, end) in sides.items():
        if name != open_side:
            draw.line([_pixels(start), _pixels(end)], fill=ink, width=6 * _OVERSAMPLING)
