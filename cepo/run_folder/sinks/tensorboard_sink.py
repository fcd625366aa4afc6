"""Writes TensorBoard files into the run folder."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence

import numpy

from cepo.run_folder.layout import TENSORBOARD_FOLDER
from cepo.run_folder.sinks.base import RunDescription
from cepo.run_folder.sinks.external import ExternalSink
from cepo.run_folder.sinks.samples import TrackedSample


class TensorboardSink(ExternalSink):
    def __init__(self, run: RunDescription) -> None:
        from torch.utils.tensorboard import SummaryWriter  # loads torch, which reading records must not do

        super().__init__(run)
        first_step = 0 if run.resumed_step is None else run.resumed_step + 1
        # What an earlier start recorded from `first_step` on is hidden.
        self._writer = SummaryWriter(log_dir=str(run.folder / TENSORBOARD_FOLDER), purge_step=first_step)
        self._problems_with_image: set[str] = set()

    def log_metrics(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, float(value), global_step=step)
        self._writer.flush()

    def log_samples(self, step: int, samples: Sequence[TrackedSample]) -> None:
        for number, sample in enumerate(samples):
            tag = f"val/sample_{number}"
            self._writer.add_text(tag, _as_markdown(sample), global_step=step)
            problem = sample.texts.get("prompt_id", str(number))
            if sample.image is None or problem in self._problems_with_image:  # the same at every validation
                continue
            self._problems_with_image.add(problem)
            pixels = numpy.asarray(sample.image)  # (height, width, 3)
            self._writer.add_image(tag, pixels, global_step=step, dataformats="HWC")
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def _as_markdown(sample: TrackedSample) -> str:
    """Returns the texts as code blocks, so that a model's text is not interpreted as markup."""
    blocks: list[str] = []
    for name, text in sample.texts.items():
        code = textwrap.indent(text or " ", "    ", lambda _: True)
        blocks.append(f"**{name}**\n\n{code}")
    return "\n\n".join(blocks)
