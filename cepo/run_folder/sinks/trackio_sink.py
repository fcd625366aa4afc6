"""Logs to Trackio."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

from cepo.run_folder.sinks.base import RunDescription
from cepo.run_folder.sinks.external import SAMPLES, LibrarySink, earlier_run
from cepo.run_folder.sinks.samples import IMAGE, TrackedSample


class TrackioSink(LibrarySink):
    """Trackio finds runs by name, so that a run has the experiment's name with a suffix of its own."""

    def __init__(self, run: RunDescription) -> None:
        import trackio  # pyright: ignore[reportMissingImports]

        super().__init__(run)
        name = earlier_run(run, "trackio") or f"{run.experiment}-{uuid.uuid4().hex[:6]}"
        self.start(trackio, run, name, name=name, embed=False, auto_log_cpu=False, auto_log_gpu=False)

    def log_samples(self, step: int, samples: Sequence[TrackedSample]) -> None:
        table_rows: list[dict[str, Any]] = []
        for sample in samples:
            table_row: dict[str, Any] = dict(sample.texts)
            if sample.image is not None:
                table_row[IMAGE] = self.library.Image(sample.image)
            table_rows.append(table_row)
        self.log(step, {SAMPLES: self.library.Table(data=table_rows)})
