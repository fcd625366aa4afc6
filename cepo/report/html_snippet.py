"""Writes a contrast as a piece of HTML that needs no script and no style sheet, for notebooks and trackers."""

from __future__ import annotations

from html import escape

from cepo.report.coloured_tokens import ColouredRow, ColouredToken
from cepo.report.response_pair import Contrast, ContrastSide
from cepo.terminal.lines import without_controls

_COLOURS = {"more": "64, 145, 220", "less": "235, 130, 50", "unmeasured": "128, 128, 128"}
"""Red, green and blue. They are laid over the background, so that the text stays legible on a light and on a dark one."""
_FULL_OPACITY = 0.6
_TOKENS_STYLE = "font-family: monospace; white-space: pre-wrap; overflow-wrap: anywhere; line-height: 1.8"


def fragment(contrast: Contrast, *, image: str | None = None) -> str:
    """Returns the contrast as HTML; `image` is a data URI. All texts are escaped."""
    parts: list[str] = ['<div style="max-width: 60em; line-height: 1.5">']
    parts.append(f"<p><b>{escape(contrast.sentence)}</b></p>")
    if image is not None:
        parts.append(f'<img src="{escape(image)}" alt="image of the problem" style="max-width: 9em; background: #fff">')
    parts.append(f"<p>{escape(contrast.problem)} Answer: <b>{escape(contrast.ground_truth)}</b></p>")
    parts.append('<div style="display: flex; flex-wrap: wrap; gap: 1em 2em">')
    parts += [_side(side) for side in contrast.sides]
    parts.append("</div>")
    parts.append(
        f'<p style="opacity: .75">Blue is credit, orange blame: from {contrast.low:.2f} (pale) to {contrast.high:.2f} '
        f"(full) times {escape(contrast.uniform)}, at step {contrast.step}.</p></div>"
    )
    return without_controls("\n".join(parts))


def _side(side: ContrastSide) -> str:
    title = "✓ Right" if side.verdict == "right" else "✗ Wrong"
    rows = "\n".join(_row(row) for row in side.rows)
    return f'<div style="flex: 1 1 20em; min-width: 0"><p>{title} response, reward {side.reward:.3g}</p>\n{rows}</div>'


def _row(row: ColouredRow) -> str:
    tokens = "".join(_token(token) for token in row.tokens)
    return f'<div style="opacity: .75">{escape(row.label)}</div><div style="{_TOKENS_STYLE}">{tokens}</div>'


def _token(token: ColouredToken) -> str:
    opacity = _FULL_OPACITY * token.percent / 100
    colour = f"rgba({_COLOURS[token.side]}, {opacity:.2f})"
    return f'<span style="background: {colour}" title="{escape(token.help)}">{escape(token.text)}</span>'
