"""Writes TensorBoard event files into the run folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from cepo.tracking.base import RunDescription, Sink
from cepo.tracking.run_folder import TENSORBOARD_FOLDER


class TensorboardSink(Sink):
    """Logs every metric as a scalar, validation samples as text. On resume, TensorBoard hides the repeated steps."""

    required: ClassVar[bool] = False

    def __init__(self, run: RunDescription) -> None:
        from torch.utils.tensorboard import SummaryWriter  # loads torch, which reading records must not do

        first_step = 0 if run.resumed_step is None else run.resumed_step + 1
        self._writer = SummaryWriter(log_dir=str(run.folder / TENSORBOARD_FOLDER), purge_step=first_step)

    def log_metrics(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, float(value), global_step=step)
        self._writer.flush()

    def log_generations(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        for number, row in enumerate(rows):
            text = "\n\n".join(f"**{name}**\n\n{_indented(str(value))}" for name, value in row.items())
            self._writer.add_text(f"val/sample_{number}", text, global_step=step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def _indented(text: str) -> str:
    """Returns a Markdown code block, so that a model's text is not read as markup."""
    return "\n".join("    " + line for line in text.splitlines() or [""])
