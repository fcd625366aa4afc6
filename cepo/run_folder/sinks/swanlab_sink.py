"""Logs to SwanLab."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

from cepo.run_folder.layout import SWANLAB_FOLDER
from cepo.run_folder.sinks.base import RunDescription
from cepo.run_folder.sinks.external import SAMPLES, LibrarySink, earlier_run
from cepo.run_folder.sinks.samples import TrackedSample

_IMAGES = "val/images"


class SwanlabSink(LibrarySink):
    def __init__(self, run: RunDescription) -> None:
        import swanlab  # pyright: ignore[reportMissingImports]

        super().__init__(run)
        folder = run.folder / SWANLAB_FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        identifier = earlier_run(run, "swanlab") or uuid.uuid4().hex[:12]
        self.start(
            swanlab,
            run,
            identifier,
            name=run.experiment,
            id=identifier,
            reinit=True,
            log_dir=str(folder),
        )

    def log_samples(self, step: int, samples: Sequence[TrackedSample]) -> None:
        texts: list[Any] = []
        images: dict[str, Any] = {}
        for sample in samples:
            lines = [f"{name}: {value}" for name, value in sample.texts.items()]
            texts.append(self.library.Text("\n\n".join(lines)))
            if sample.image is not None and sample.image_name not in images:
                caption = sample.texts.get("prompt_id", "")
                images[sample.image_name] = self.library.Image(sample.image, caption=caption)
        media = {SAMPLES: texts}
        if images:
            media[_IMAGES] = list(images.values())
        self.log(step, media)
