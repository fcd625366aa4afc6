"""Draws a right and a wrong response with their coloured tokens and beliefs as a still picture, for a post."""

from __future__ import annotations

import textwrap
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from cepo.errors import ConfigError, DataError
from cepo.files.trees import Tree
from cepo.report.html_page import Section, write_template
from cepo.report.shown_responses import ColouredRow, ColouredToken, CreditedResponse

_ASSETS = Path(__file__).parent / "assets"
_WIDTH = 1200
_MARGIN = 40
_COLUMN = 545
"""Width of a response. All lengths are in pixels."""
_LETTER = 10.9
"""Width of a letter of a token: 50 of them fill a line."""
_LETTERS = int(_COLUMN / _LETTER)
_LINE = 28
_CURVE = 60
_IMAGE = 130
_MOST_LINES = 16
"""Lines of a response that are drawn: of more, those around its strongest token."""


def require_svg(path: Path | None) -> None:
    """Raises `ConfigError` for a file that is no SVG."""
    if path is not None and path.suffix != ".svg":
        raise ConfigError(f"--image {path}: the ending must be .svg")


def write_still_picture(path: Path, pair: Section | None) -> Path:
    """Writes the two responses of a part of a page as SVG, which is light or dark as the reader's screen; returns the path.

    Raises `DataError`: there is no pair.
    """
    if pair is None:
        raise DataError("there is no group with a right and a wrong response, so --image has nothing to draw")
    first = pair.responses[0]
    headline = textwrap.wrap(pair.notes[0], 70)
    image_top = _MARGIN + _LINE * len(headline)
    problem = textwrap.wrap(first.problem, 84 if first.image else 100, max_lines=4, placeholder=" …")
    problem.append(f"Answer: {first.ground_truth}")
    indent = _IMAGE + 20 if first.image else 0
    texts = [*_texts(headline, _MARGIN, _MARGIN + 10, "headline")]
    texts += _texts(problem, _MARGIN + indent, image_top + _LINE, "")
    height_of_image = _IMAGE if first.image else 0
    top = image_top + max(_LINE * len(problem), height_of_image) + 50
    height_of_curve = 50 + _CURVE if first.rows[0].belief else 10
    first_line = top + height_of_curve + _LINE
    left_response, right_response = pair.responses
    sides = [_side(left_response, _MARGIN, first_line), _side(right_response, _WIDTH - _MARGIN - _COLUMN, first_line)]
    lines = [piece.y for side in sides for piece in side["pieces"]]
    height = max([first_line, *lines]) + _MARGIN
    return write_template(
        path,
        _ASSETS / "still_picture.svg",
        width=_WIDTH,
        height=height,
        margin=_MARGIN,
        column=_COLUMN,
        curve=_CURVE,
        top=top,
        texts=texts,
        sides=sides,
        sentence=pair.notes[0],
        image=first.image,
        image_top=image_top,
        image_size=_IMAGE,
    )


@dataclass(frozen=True, kw_only=True)
class _Piece:
    """A part of a token that stands in one line, at `column` of `line`, both from 0, later at x and y."""

    text: str
    token: ColouredToken
    line: int
    column: int
    x: float = 0
    y: float = 0

    @property
    def width(self) -> float:
        return _LETTER * _letters(self.text)


def _texts(lines: Sequence[str], x: float, y: float, kind: str) -> Iterator[Tree]:
    for number, line in enumerate(lines):
        yield {"text": line, "x": x, "y": y + _LINE * number, "kind": kind}


def _side(response: CreditedResponse, x: float, first_line: float) -> Tree:
    row = response.rows[0]
    pieces = _shown(list(_pieces(row)))
    start = pieces[0].line if pieces else 0
    placed = [
        replace(piece, x=round(x + _LETTER * piece.column, 1), y=first_line + _LINE * (piece.line - start))
        for piece in pieces
    ]
    side: Tree = {"title": response.title, "x": x, "pieces": placed}
    if row.belief:
        side["points"] = row.belief_points(_COLUMN, _CURVE)
        side["belief"] = f"P(right), 0 to 1: {row.belief[0]:.2f} at the first token, {row.belief[-1]:.2f} at the last"
    return side


def _pieces(row: ColouredRow) -> Iterator[_Piece]:
    """Yields the pieces of tokens, which are broken after a line feed and where they are longer than a line."""
    line = column = 0
    for token in row.tokens:
        text = ""
        if column + _letters(token.text) > _LETTERS >= _letters(token.text):
            line, column = line + 1, 0
        for character in token.text:
            if character == "\n" or column + _letters(text + character) > _LETTERS:
                yield _Piece(text=text, token=token, line=line, column=column)
                line, column, text = line + 1, 0, ""
            text += character.strip("\n")
        yield _Piece(text=text, token=token, line=line, column=column)
        column += _letters(text)


def _shown(pieces: Sequence[_Piece]) -> list[_Piece]:
    """Returns the pieces with a text in at most so many lines, around the strongest one; an empty response has none."""
    if not pieces:
        return []
    strongest = max(pieces, key=lambda piece: piece.token.percent)
    most_above = max(0, pieces[-1].line + 1 - _MOST_LINES)
    start = min(most_above, max(0, strongest.line - _MOST_LINES // 2))
    return [piece for piece in pieces if piece.text and start <= piece.line < start + _MOST_LINES]


def _letters(text: str) -> int:
    """Returns the width of a text in letters: East Asian ones are two wide."""
    return sum(2 if unicodedata.east_asian_width(character) in "WF" else 1 for character in text)
