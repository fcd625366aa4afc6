"""Draws one figure of a run: training curves above, the credit heat map below."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cepo.report.curves import draw_accuracy, draw_evidence, draw_leak, draw_seconds
from cepo.report.heatmap import TEXT_WIDTH_POINTS, Block, draw_block, draw_legend, pick_groups, prepare_block
from cepo.report.recorded_run import RunData, load_run
from cepo.tracking.run_folder import GroupRecord, read_rollouts

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

REPORT_FILE = "report.png"
_MARGIN, _TEXT_LEFT = 30.0, 135.0
_WIDTH = 2 * _MARGIN + _TEXT_LEFT + TEXT_WIDTH_POINTS + 10
_TITLE, _CURVES, _LEGEND, _BETWEEN = 44.0, 240.0, 112.0, 20.0
_DOTS_PER_INCH = 120
_DEFAULT_RADIUS = 0.5


def write_report(run_folder: Path, out: Path | None = None) -> Path:
    """Draws a run into a PNG, by default `report.png` in its folder, and returns the file's path.

    Above: accuracy, evidence and seconds of each step. Below, if rollouts were recorded: for the two most recent mixed
    groups the image, the question, the references, and one right and one wrong rollout with every token in the colour
    of its credit (`heatmap`).

    Raises:
        DataError: the folder or its metrics are missing or broken.
    """
    run = load_run(Path(run_folder))
    groups = pick_groups(read_rollouts(run.folder))
    radius = _radius(run)
    mixing = run.values_by_step("evidence/lambda")
    blocks = [prepare_block(group, clip_radius=radius, mixing=mixing.get(group.step)) for group in groups]
    target = run.folder / REPORT_FILE if out is None else Path(out)
    target.parent.mkdir(parents=True, exist_ok=True)
    _save(_draw(run, groups, blocks, radius), target)
    return target


def _radius(run: RunData) -> float:
    """Returns the run's clip radius; if it has none or 0, the paper's, so that there is a colour scale."""
    return run.clip_radius or _DEFAULT_RADIUS


def _draw(run: RunData, groups: Sequence[GroupRecord], blocks: Sequence[Block], radius: float) -> Figure:
    from matplotlib.figure import Figure

    below = _LEGEND + sum(block.points + _BETWEEN for block in blocks) if blocks else 0.0
    height = _TITLE + _CURVES + below + 10
    figure = Figure(figsize=(_WIDTH / 72, height / 72), dpi=_DOTS_PER_INCH, facecolor="white")
    held_out = run.series("val/accuracy")[1]
    result = f", held-out accuracy {held_out[0]:.3f} to {held_out[-1]:.3f}" if len(held_out) > 1 else ""
    title = f"{run.estimator}: run {run.name}, {run.last_step} steps{result}"
    figure.text(_MARGIN / _WIDTH, 1 - 14 / height, title, fontsize=14, va="top", parse_math=False)
    panels = [draw_accuracy, draw_evidence, draw_seconds]
    if run.series("leak/hint_gap_wrong")[0]:
        panels.insert(2, draw_leak)
    panel = (_WIDTH - 2 * _MARGIN) / len(panels)
    for number, draw in enumerate(panels):
        left = _MARGIN + number * panel + 20
        draw(_axes(figure, left, _TITLE + 22, panel - 40, _CURVES - 70), run)
    if not blocks:
        return figure
    top = _TITLE + _CURVES
    evidence = any(group.has_evidence for group in groups)
    heading = "Credit of each token" + (", with delta in nats" if evidence else "")
    figure.text(_MARGIN / _WIDTH, 1 - top / height, heading, fontsize=13, va="top")
    scale = _axes(figure, _MARGIN + 180, top + 44, _WIDTH - 2 * _MARGIN - 260, 16)
    draw_legend(scale, clip_radius=radius if evidence else None)
    top += _LEGEND
    for block in blocks:
        axes = _axes(figure, _MARGIN, top, _WIDTH - 2 * _MARGIN, block.points)
        axes.set_axis_off()
        draw_block(axes, block, text_left=_TEXT_LEFT)
        axes.set_xlim(0, _WIDTH - 2 * _MARGIN)
        axes.set_ylim(block.points, 0)
        top += block.points + _BETWEEN
    return figure


def _axes(figure: Figure, left: float, top: float, width: float, height: float) -> Axes:
    full_width, full_height = figure.get_size_inches() * 72
    place = (left / full_width, 1 - (top + height) / full_height, width / full_width, height / full_height)
    return figure.add_axes(place)


def _save(figure: Figure, target: Path) -> None:
    """Writes a new file and renames it, so that a viewer never opens an incomplete figure."""
    beside = target.with_name(target.name + ".new")
    figure.savefig(beside, format="png")
    os.replace(beside, target)
