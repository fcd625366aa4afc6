"""Writes a contrast for notebooks and trackers: as HTML without script and style sheet, and as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from cepo.report.response_pair import Contrast, ContrastSide, clearest_pair, contrast_of
from cepo.report.shown_responses import ColouredRow, ColouredToken, data_uri, response_title
from cepo.run_folder.trace import GroupRecord
from cepo.terminal.lines import without_controls

_COLOURS = {"more": "64, 145, 220", "less": "235, 130, 50", "unmeasured": "128, 128, 128"}
"""Red, green and blue. They are laid over the background, so that the text stays legible on a light and on a dark one."""
_FULL_OPACITY = 0.6
_MARKUP = str.maketrans({character: f"\\{character}" for character in "\\`*_{}[]()<>#+-.!|~&"})
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
    title = response_title(side.verdict == "right", side.reward)
    rows = "\n".join(_row(row) for row in side.rows)
    return f'<div style="flex: 1 1 20em; min-width: 0"><p>{title}</p>\n{rows}</div>'


def _row(row: ColouredRow) -> str:
    tokens = "".join(_token(token) for token in row.tokens)
    return f'<div style="opacity: .75">{escape(row.label)}</div><div style="{_TOKENS_STYLE}">{tokens}</div>'


def _token(token: ColouredToken) -> str:
    opacity = _FULL_OPACITY * token.percent / 100
    colour = f"rgba({_COLOURS[token.side]}, {opacity:.2f})"
    return f'<span style="background: {colour}" title="{escape(token.help)}">{escape(token.text)}</span>'


@dataclass(frozen=True, kw_only=True)
class TrackedCredit:
    """The credit of a right and a wrong response to one problem, where both were recorded."""

    contrast: Contrast
    group: GroupRecord

    @property
    def step(self) -> int:
        return self.group.step

    def html(self) -> str:
        """Returns both responses with coloured tokens, and the image of the problem, as HTML without scripts."""
        image = data_uri(self.group.images[0]) if self.group.images else None
        return fragment(self.contrast, image=image)

    def markdown(self) -> str:
        """Returns both responses as tables of tokens with their numbers, for trackers that show no colours."""
        parts = [
            _escaped(self.contrast.sentence),
            f"{_escaped(self.contrast.problem)} Answer: {_escaped(self.contrast.ground_truth)}",
        ]
        for side in self.contrast.sides:
            rollout = self.group.rollouts[side.place]
            parts.append(f"**{side.verdict} response, reward {side.reward:.3g}**")
            lines = ["| token | advantage | delta | weight |", "| --- | --- | --- | --- |"]
            for place, token in enumerate(side.rows[0].tokens):
                numbers: list[str] = []
                for values in (rollout.token_advantages, rollout.delta, rollout.weight):
                    numbers.append("" if values is None else f"{values[place]:.4g}")
                lines.append(f"| {_escaped(token.text)} | {' | '.join(numbers)} |")
            parts.append("\n".join(lines))
        return "\n\n".join(parts)


def tracked_credit(groups: Sequence[GroupRecord], method: str) -> TrackedCredit | None:
    """Returns the clearest pair of a step's recorded groups under the run's `method`; None without groups."""
    if not groups:
        return None
    group = max(groups, key=lambda candidate: clearest_pair(candidate.rollouts)[0])
    _, places = clearest_pair(group.rollouts)
    return TrackedCredit(contrast=contrast_of(group, places, method=method), group=group)


def _escaped(text: str) -> str:
    """Returns a text that Markdown shows as it is, in one line."""
    return text.replace("\n", " ").translate(_MARKUP)
