"""Draws the credit heat map: which tokens of a right and a wrong rollout the evidence credits and blames."""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cepo.report.colours import NEUTRAL, Rgba, TokenBox, has_glyph, lay_out, shift_colour, weight_colour
from cepo.tracking.run_folder import GroupRecord, RolloutRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LINE_POINTS = 13.0
TEXT_WIDTH_POINTS = 684.0
"""The width of the tokens' rows and of the question."""
PICTURE_POINTS = 118.0
_FIRST_TOKENS, _LAST_TOKENS = 100, 160
_SHOWN_DELTA = 0.05
"""The smallest delta, in nats, that is written under its token."""


@dataclass(frozen=True, kw_only=True)
class TokenStyle:
    """The size of the tokens' boxes. With `delta_font_size`, each box also shows its token's delta."""

    font_size: float
    row_points: float
    minimum_width: float
    delta_font_size: float | None

    @property
    def cell_points(self) -> float:
        """The width of a character of the monospaced font."""
        return 0.602 * self.font_size

    @property
    def columns(self) -> int:
        return int(TEXT_WIDTH_POINTS / self.cell_points)


_LARGE = TokenStyle(font_size=12.0, row_points=31.0, minimum_width=2.6, delta_font_size=7.0)
_COMPACT = TokenStyle(font_size=9.0, row_points=16.5, minimum_width=1.0, delta_font_size=None)
_ROWS_OF_LARGE = 4


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One rollout ready to be drawn: its heading, and its tokens' boxes, colours and deltas."""

    heading: str
    style: TokenStyle
    boxes: Sequence[TokenBox]
    colours: Sequence[Rgba]
    deltas: Sequence[float | None]

    @property
    def points(self) -> float:
        """The height in points."""
        return LINE_POINTS + self.style.row_points * (self.boxes[-1].row + 1 if self.boxes else 1) + 8


@dataclass(frozen=True, kw_only=True)
class Block:
    """One group ready to be drawn."""

    title: str
    lines: Sequence[str]
    image: bytes | None
    panels: Sequence[Panel]

    @property
    def points(self) -> float:
        """The height in points."""
        text = LINE_POINTS * (len(self.lines) + 1.5) + 4
        return max(text + sum(panel.points for panel in self.panels), PICTURE_POINTS + 1.5 * LINE_POINTS)


def pick_groups(groups: Iterable[GroupRecord], count: int = 2) -> list[GroupRecord]:
    """Returns the most recent mixed groups with evidence, newest first; else the most recent mixed ones; else the most recent.

    Within a step, the group recorded first comes first.
    """
    ranked: list[list[GroupRecord]] = [[], [], []]
    for group in groups:
        if group.rollouts:
            kept = ranked[0 if group.mixed and group.has_evidence else 1 if group.mixed else 2]
            kept.append(group)
            kept.sort(key=lambda group: -group.step)  # stable: recorded order within a step
            del kept[count:]
    return next((kept for kept in ranked if kept), [])


def pick_rollouts(group: GroupRecord) -> list[RolloutRecord]:
    """Returns the right and the wrong rollout whose tokens the evidence moves most; only one if the group is not mixed."""
    right = [rollout for rollout in group.rollouts if rollout.right]
    wrong = [rollout for rollout in group.rollouts if not rollout.right]
    return [max(side, key=_mean_movement) for side in (right, wrong) if side]


def token_colours(rollout: RolloutRecord, *, clip_radius: float, largest_advantage: float) -> list[Rgba]:
    """Returns one colour per token: by its weight, or without evidence by its advantage over the group's largest."""
    weights = token_weights(rollout, clip_radius=clip_radius)
    if weights is not None:
        return [weight_colour(weight, advantage=rollout.advantage, clip_radius=clip_radius) for weight in weights]
    if largest_advantage == 0:
        return [NEUTRAL] * len(rollout.tokens)
    return [shift_colour(advantage / largest_advantage) for advantage in rollout.token_advantages]


def token_weights(rollout: RolloutRecord, *, clip_radius: float) -> Sequence[float] | None:
    """Returns the recorded weights, else `exp(clamp(sign(A) delta, log1p(-r), log1p(r)))` of the deltas, else None."""
    if rollout.weight is not None:
        return rollout.weight
    if rollout.delta is None:
        return None
    sign = (rollout.advantage > 0) - (rollout.advantage < 0)
    low, high = math.log1p(-clip_radius), math.log1p(clip_radius)
    return [math.exp(min(max(sign * delta, low), high)) for delta in rollout.delta]


def prepare_block(group: GroupRecord, *, clip_radius: float, mixing: float | None) -> Block:
    """Lays out all parts of a group's block, whose heights are then known."""
    largest = max((abs(rollout.advantage) for rollout in group.rollouts), default=0.0)
    panels = [_prepare_panel(rollout, clip_radius, largest) for rollout in pick_rollouts(group)]
    width = int(TEXT_WIDTH_POINTS / 5.2)  # mean width of a character at 9 points, with room to spare
    lines = textwrap.wrap(showable(group.problem), width)[:8] or ["(no text)"]
    references = [f"{view} reference: {_quoted(text)}" for view, text in group.references.items()]
    lines += textwrap.wrap("     ".join([f"ground truth: {_quoted(group.ground_truth)}", *references]), width)
    right = sum(rollout.right for rollout in group.rollouts)
    title = f"Step {group.step}, prompt {group.prompt_id}: {right} of {len(group.rollouts)} rollouts recorded are right"
    if mixing is not None and group.has_evidence:
        title += f"; lambda {mixing:.3g}"
    return Block(title=showable(title), lines=lines, image=group.image, panels=panels)


def draw_block(axes: Axes, block: Block, *, text_left: float) -> None:
    """Draws a block into axes whose unit is one point, y downwards from 0; the image is to the left of `text_left`."""
    axes.text(0, 0, block.title, fontsize=11, fontweight="bold", va="top", parse_math=False)
    y = 1.5 * LINE_POINTS + 4
    if block.image is not None:
        _draw_picture(axes, block.image, y, text_left - 12)
    for line in block.lines:
        axes.text(text_left, y, line, fontsize=9, va="top", parse_math=False)
        y += LINE_POINTS
    for panel in block.panels:
        y += 6
        axes.text(text_left, y, panel.heading, fontsize=9, fontweight="bold", va="top", parse_math=False)
        _draw_tokens(axes, panel, text_left, y + LINE_POINTS)
        y += panel.points - 6


def draw_legend(axes: Axes, *, clip_radius: float | None) -> None:
    """Draws the colour scale: weights and nats for a right and a wrong rollout, or plain advantages without evidence."""
    steps = 201
    axes.imshow([[shift_colour(2 * k / (steps - 1) - 1) for k in range(steps)]], extent=(-1, 1, 0, 1), aspect="auto")
    axes.set_yticks([])
    axes.tick_params(labelsize=8, length=3)
    shifts = (-1.0, -0.5, 0.0, 0.5, 1.0)
    if clip_radius is None:
        axes.set_xticks(shifts, [f"{shift:+.1f}" for shift in shifts])
        axes.set_xlabel("plain advantage of the rollout, in units of the group's largest (no evidence)", fontsize=8)
        return
    axes.set_xticks(shifts, [_scale_label(shift, clip_radius, sign=1) for shift in shifts])
    axes.set_xlabel(
        "red: advantage lowered below the plain one, evidence against the right answer        "
        "blue: raised above it, evidence for the right answer",
        fontsize=8,
    )
    above = axes.secondary_xaxis("top")
    above.set_xticks(shifts, [_scale_label(shift, clip_radius, sign=-1) for shift in shifts])
    above.tick_params(labelsize=8, length=3)
    for height, name in ((-8, "right rollout"), (24, "wrong rollout")):
        left_of_labels = {"xytext": (-88, height), "textcoords": "offset points", "ha": "right", "va": "center"}
        axes.annotate(name, (0, 0), xycoords="axes fraction", fontsize=8, fontweight="bold", **left_of_labels)


def showable(text: str) -> str:
    """Returns a text on one line without characters that the page's font lacks."""
    return "".join(character if has_glyph(character) else "▯" for character in " ".join(text.split()))


def _scale_label(shift: float, clip_radius: float, *, sign: int) -> str:
    """Returns `w 1.50, +0.41 nats`, a colour's weight and delta; at the ends of the scale the evidence may be larger."""
    weight = 1 + sign * shift * clip_radius
    delta = 0.0 if shift == 0 else sign * math.log(weight)
    bound = "≥ " if shift == 1 else "≤ " if shift == -1 else ""
    return f"w {weight:.2f}, delta {bound}{delta:+.2f} nats" if shift else "w 1, delta 0"


def _prepare_panel(rollout: RolloutRecord, clip_radius: float, largest_advantage: float) -> Panel:
    colours = token_colours(rollout, clip_radius=clip_radius, largest_advantage=largest_advantage)
    tokens, deltas = list(rollout.tokens), list(rollout.delta or [None] * len(rollout.tokens))
    skipped = max(len(tokens) - _FIRST_TOKENS - _LAST_TOKENS, 0)
    if skipped:
        tokens[_FIRST_TOKENS:-_LAST_TOKENS] = [f" [... {skipped} tokens ...] "]
        colours[_FIRST_TOKENS:-_LAST_TOKENS] = [NEUTRAL]
        deltas[_FIRST_TOKENS:-_LAST_TOKENS] = [None]
    verdict = "Right" if rollout.right else "Wrong"
    heading = f"{verdict} rollout: reward {rollout.reward:.3g}, advantage {rollout.advantage:+.3f}"
    if rollout.delta is not None:
        heading += f", sum of delta {math.fsum(rollout.delta):+.2f} nats over {len(rollout.tokens)} tokens"
    style = _LARGE
    boxes = lay_out(tokens, style.columns, minimum_width=style.minimum_width)
    if boxes and boxes[-1].row >= _ROWS_OF_LARGE:
        style = _COMPACT
        boxes = lay_out(tokens, style.columns, minimum_width=style.minimum_width)
    for view, text in rollout.references.items():
        heading += f", {view} reference: {_quoted(text)}"
    return Panel(heading=showable(heading), style=style, boxes=boxes, colours=colours, deltas=deltas)


def _mean_movement(rollout: RolloutRecord) -> float:
    if rollout.weight:
        return math.fsum(abs(weight - 1) for weight in rollout.weight) / len(rollout.weight)
    return math.fsum(map(abs, rollout.delta)) / len(rollout.delta) if rollout.delta else 0.0


def _quoted(text: str | None) -> str:
    return (
        "none (the student's own context)"
        if text is None
        else textwrap.shorten(showable(text), 160, placeholder=" ...")
    )


def _draw_tokens(axes: Axes, panel: Panel, left: float, top: float) -> None:
    from matplotlib.patches import Rectangle

    style, cell = panel.style, panel.style.cell_points
    height = style.row_points - 3
    middle = height / 2 if style.delta_font_size is None else 0.32 * height
    letters = {"ha": "center", "va": "center_baseline", "parse_math": False}
    for box in panel.boxes:
        x, y = left + box.column * cell, top + box.row * style.row_points
        place, size = (x - 0.1 * cell, y), ((box.width + 0.2) * cell, height)
        axes.add_patch(Rectangle(place, *size, facecolor=panel.colours[box.token], edgecolor="#B0B0B0", linewidth=0.5))
        centre = x + box.width * cell / 2
        axes.text(centre, y + middle, box.text, fontsize=style.font_size, family="DejaVu Sans Mono", **letters)
        delta = panel.deltas[box.token]
        if style.delta_font_size is not None and delta is not None and abs(delta) >= _SHOWN_DELTA:
            axes.text(centre, y + 0.76 * height, f"{delta:+.1f}", fontsize=style.delta_font_size, **letters)


def _draw_picture(axes: Axes, png: bytes, top: float, width: float) -> None:
    from PIL import Image

    with Image.open(io.BytesIO(png)) as image:
        picture = image.convert("RGB")
    scale = min(width / picture.width, PICTURE_POINTS / picture.height)
    extent = (0, picture.width * scale, top + picture.height * scale, top)
    smoothing = "nearest" if scale >= 1 else "antialiased"
    axes.imshow(picture, extent=extent, interpolation=smoothing, aspect="auto")
