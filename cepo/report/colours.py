"""Turns token weights into colours, and token texts into boxes on a page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

Rgba = tuple[float, float, float, float]

# The ends are light enough for black text (contrast above 5) and distinct under red-green blindness.
RAISED: Rgba = (67 / 255, 147 / 255, 195 / 255, 1.0)
LOWERED: Rgba = (214 / 255, 96 / 255, 77 / 255, 1.0)
NEUTRAL: Rgba = (1.0, 1.0, 1.0, 1.0)
_MISSING: Rgba = (0.85, 0.85, 0.85, 1.0)
_UNSHOWABLE = "▯"
_GAP = 0.35


@dataclass(frozen=True, kw_only=True)
class TokenBox:
    """A piece of a token on the page, in character cells; only a token longer than a row has several pieces."""

    token: int
    row: int
    column: float
    width: float
    text: str


def shift_colour(shift: float) -> Rgba:
    """Returns white at 0, blue towards 1 and red towards -1; clamped outside that range, grey for NaN."""
    if math.isnan(shift):
        return _MISSING
    end = RAISED if shift > 0 else LOWERED
    amount = min(abs(shift), 1.0)
    red, green, blue = (neutral + (full - neutral) * amount for neutral, full in zip(NEUTRAL[:3], end[:3], strict=True))
    return red, green, blue, 1.0


def weight_colour(weight: float, *, advantage: float = 1.0, clip_radius: float = 0.5) -> Rgba:
    """Returns blue if the evidence raises a token's advantage above the plain one, red if it lowers it.

    The shift is `sign(A) (w - 1) / r`: `A w - A` in units of its largest possible size. On a right rollout w > 1 is
    blue; on a wrong one w > 1 means more blame and is red. Blue is therefore always evidence for the right answer
    (delta > 0). A = 0 or r = 0 gives white.
    """
    if advantage == 0 or clip_radius == 0:
        return NEUTRAL
    return shift_colour(math.copysign(1.0, advantage) * (weight - 1.0) / clip_radius)


def visible(text: str) -> str:
    """Returns a token's text with line breaks, tabs, control and unknown characters made visible; spaces stay."""
    return "".join(_visible_character(character) for character in text) or "∅"


def lay_out(tokens: Sequence[str], columns: int, *, minimum_width: float = 1.0) -> list[TokenBox]:
    """Places tokens in rows of `columns` character cells; a token that ends in a line break ends its row.

    A box is as wide as its text, and at least `minimum_width` cells.
    """
    boxes: list[TokenBox] = []
    row, column = 0, 0.0
    for index, token in enumerate(tokens):
        text = visible(token)
        if column > 0 and column + max(len(text), minimum_width) > columns:
            row, column = row + 1, 0.0
        for start in range(0, len(text), columns):
            piece = text[start : start + columns]
            if start > 0:
                row, column = row + 1, 0.0
            width = max(float(len(piece)), minimum_width)
            boxes.append(TokenBox(token=index, row=row, column=column, width=width, text=piece))
            column += width + _GAP
        if token.endswith("\n"):
            row, column = row + 1, 0.0
    return boxes


def _visible_character(character: str) -> str:
    named = {"\n": "↵", "\t": "⇥", "\r": "␍"}
    if character in named:
        return named[character]
    return character if character.isprintable() and has_glyph(character) else _UNSHOWABLE


@cache
def has_glyph(character: str) -> bool:
    """Returns whether the page's font, which comes with matplotlib, can show a character."""
    from matplotlib import font_manager

    font = font_manager.get_font(font_manager.findfont("DejaVu Sans Mono"))
    return font.get_char_index(ord(character)) != 0
