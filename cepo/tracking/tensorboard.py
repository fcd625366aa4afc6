"""Writes TensorBoard event files into the run folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from cepo.tracking.run_folder import TENSORBOARD_FOLDER
from cepo.tracking.sink import RunDescription, Sink
from cepo.tracking.trace import GroupRecord

_CELL = (10, 6)
"""Height and width of a token in a heat map, in pixels."""
_MOST_TOKENS = 400
_ABOVE, _BELOW, _BEYOND = np.array([67, 147, 195]), np.array([214, 96, 77]), 217


class TensorboardSink(Sink):
    """Logs metrics as scalars, samples as text, and a heat map of token advantages for one group per step.

    On resume, TensorBoard hides earlier records of the steps that are repeated.
    """

    def __init__(self, run: RunDescription) -> None:
        from torch.utils.tensorboard import SummaryWriter  # loads torch, which reading records must not do

        first_step = 0 if run.resumed_step is None else run.resumed_step + 1
        self._writer = SummaryWriter(log_dir=str(run.folder / TENSORBOARD_FOLDER), purge_step=first_step)

    def log_metrics(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, float(value), global_step=step)
        self._writer.flush()

    def log_generations(self, step: int, rows: Sequence[Mapping[str, object]]) -> None:
        for number, row in enumerate(rows):
            text = "\n\n".join(f"**{name}**\n\n{_indented(str(value))}" for name, value in row.items())
            self._writer.add_text(f"val/sample_{number}", text, global_step=step)
        self._writer.flush()

    def log_rollouts(self, records: Sequence[GroupRecord]) -> None:
        for group in records[:1]:
            self._writer.add_image(
                "rollouts/advantages", advantage_map(group), global_step=group.step, dataformats="HWC"
            )
            parts = [("problem", group.problem), ("ground truth", group.ground_truth)]
            parts += [(f"reward {rollout.reward:g}", rollout.response) for rollout in group.rollouts]
            text = "\n\n".join(f"**{name}**\n\n{_indented(value)}" for name, value in parts)
            self._writer.add_text("rollouts/responses", text, global_step=group.step)

    def close(self) -> None:
        self._writer.close()


def advantage_map(group: GroupRecord) -> np.ndarray:
    """Draws a heat map of advantages, (height, width, 3) bytes, with a row per rollout and a cell per token.

    White is advantage 0. Positive advantages are blue and negative ones red, with full colour at the group's largest
    |advantage|. Cells after the end of a response are grey. Only the first 400 tokens of a response are shown.
    """
    longest = min(max(len(rollout.tokens) for rollout in group.rollouts), _MOST_TOKENS)
    cells = np.full((len(group.rollouts), max(longest, 1), 3), _BEYOND, dtype=np.uint8)
    rows = [np.nan_to_num(np.asarray(rollout.token_advantages[:longest])) for rollout in group.rollouts]
    scale = max((float(np.abs(row).max()) for row in rows if row.size), default=0.0) or 1.0
    for cell, row in zip(cells, rows, strict=True):
        share = row[:, None] / scale
        cell[: len(row)] = np.round(255 + np.abs(share) * (np.where(share > 0, _ABOVE, _BELOW) - 255))
    return cells.repeat(_CELL[0], axis=0).repeat(_CELL[1], axis=1)


def _indented(text: str) -> str:
    """Returns a Markdown code block, so that a model's text is not interpreted as markup."""
    return "\n".join("    " + line for line in text.splitlines() or [""])
