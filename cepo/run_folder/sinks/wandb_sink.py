"""Logs to Weights & Biases."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from cepo.run_folder.sinks.base import RunDescription, TrackedCredit
from cepo.run_folder.sinks.external import CREDIT, SAMPLES, LibrarySink, earlier_run
from cepo.run_folder.sinks.samples import IMAGE, TrackedSample

STEP_NAME = "trainer/step"
"""The axis of all W&B charts. On W&B's own step axis, a resumed run's values for earlier steps would be dropped."""


class WandbSink(LibrarySink):
    def __init__(self, run: RunDescription) -> None:
        import wandb  # pyright: ignore[reportMissingImports]

        super().__init__(run)
        run.folder.mkdir(parents=True, exist_ok=True)
        identifier = earlier_run(run, "wandb") or uuid.uuid4().hex[:12]
        self.start(
            wandb,
            run,
            identifier,
            name=run.experiment,
            id=identifier,
            reinit="create_new",
            dir=str(run.folder),
            settings=wandb.Settings(console="off"),
        )
        self.run.define_metric(STEP_NAME)
        self.run.define_metric("*", step_metric=STEP_NAME)

    def log_metrics(self, step: int, values: Mapping[str, float]) -> None:
        self.log(step, {name: float(value) for name, value in values.items()})

    def log_samples(self, step: int, samples: Sequence[TrackedSample]) -> None:
        columns: dict[str, None] = {}  # in the order of their first sample
        for sample in samples:
            columns.update(dict.fromkeys(sample.texts))
        images = self._images(samples)
        table_rows: list[list[Any]] = []
        for sample in samples:
            table_row: list[Any] = [sample.texts.get(name, "") for name in columns]
            if images:
                table_row.insert(0, images.get(sample.image_name))
            table_rows.append(table_row)
        names = [IMAGE, *columns] if images else list(columns)
        self.log(step, {SAMPLES: self.library.Table(columns=names, data=table_rows)})

    def _images(self, samples: Sequence[TrackedSample]) -> dict[str, Any]:
        """Returns the library's images by name, each once."""
        images: dict[str, Any] = {}
        for sample in samples:
            if sample.image is not None and sample.image_name not in images:
                images[sample.image_name] = self.library.Image(sample.image)
        return images

    def log_credit(self, step: int, credit: TrackedCredit) -> None:
        self.log(step, {CREDIT: self.library.Html(credit.html(), data_is_not_path=True)})

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        self.run.log({STEP_NAME: step, **values})
