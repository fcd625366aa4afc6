"""The sinks of trackers: what all share, and those that log through a library with runs: W&B, SwanLab, Trackio.

`docs/tracking.md` says what each does without a network.
"""

from __future__ import annotations

import itertools
import json
import math
import uuid
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from cepo.files.safe_files import read_json
from cepo.files.trees import Tree
from cepo.run_folder.layout import SWANLAB_FOLDER, TRACKERS_FILE
from cepo.run_folder.sinks.base import RunDescription, Sink
from cepo.run_folder.sinks.samples import IMAGE, TrackedSample, tracked_samples
from cepo.run_folder.trace import GroupRecord
from cepo.run_folder.writing import write_atomically

SAMPLES = "val/generations"
CREDIT = "credit/responses"
STEP_NAME = "trainer/step"
"""The axis of all W&B charts. On W&B's own step axis, a resumed run's values for earlier steps would be dropped."""
_SWANLAB_IMAGES = "val/images"
_STEPS_BETWEEN_CREDIT = 10
"""A tracker gets the credit of two responses at most this often, since long ones take some hundred kB."""


class ExternalSink(Sink):
    """Gives a tracker the validation samples with images, and at some steps the credit of a right and a wrong response."""

    def __init__(self, run: RunDescription) -> None:
        algorithm = config_tree(run).get("algorithm") or {}
        self._method = str(algorithm.get("adv_estimator", "the run's method"))
        self._credit_of = run.credit_of
        self._step_of_credit: int | None = None

    def log_generations(self, step: int, rows: Sequence[Mapping[str, object]]) -> None:
        if rows:
            self.log_samples(step, tracked_samples(rows))

    def log_rollouts(self, records: Sequence[GroupRecord]) -> None:
        if self._credit_of is None or not records:
            return
        step = records[0].step
        if self._step_of_credit is None or step - self._step_of_credit >= _STEPS_BETWEEN_CREDIT:
            self._step_of_credit = step
            self.log_credit(step, self._credit_of(records, self._method))

    @abstractmethod
    def log_samples(self, step: int, samples: Sequence[TrackedSample]) -> None: ...

    def log_credit(self, step: int, html: str) -> None:
        """Logs the credit of two responses; a tracker that shows no HTML has none."""


class LibrarySink(ExternalSink):
    """Logs through a library whose runs have `log` and `finish`."""

    def start(self, library: Any, run: RunDescription, identifier: str, **options: Any) -> None:
        """Starts or continues the library's run, whose `identifier` is remembered in the run folder."""
        self.library = library
        self.run = library.init(project=run.project, resume="allow", config=config_tree(run), **options)
        remember_run(run, library.__name__, identifier)

    def log_metrics(self, step: int, values: Mapping[str, float]) -> None:
        self.log(step, finite_or_nan(values))

    def log_credit(self, step: int, html: str) -> None:
        self.log(step, {CREDIT: self.library.Html(html)})

    def table_rows(self, samples: Sequence[TrackedSample]) -> list[dict[str, Any]]:
        """Returns a row for each sample by the names of columns, with its image as the library's."""
        images = self.images(samples)
        rows: list[dict[str, Any]] = []
        for sample in samples:
            image = images.get(sample.image_name)
            row = {} if image is None else {IMAGE: image}
            rows.append(row | dict(sample.texts))
        return rows

    def images(self, samples: Sequence[TrackedSample]) -> dict[str, Any]:
        """Returns the samples' images as the library's by name, each once."""
        images: dict[str, Any] = {}
        for sample in samples:
            if sample.image is not None and sample.image_name not in images:
                caption = sample.texts.get("prompt_id", "")
                images[sample.image_name] = self.library.Image(sample.image, caption=caption)
        return images

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Logs numbers or media of a step."""
        self.run.log(values, step=step)

    def close(self) -> None:
        self.run.finish()


class WandbSink(LibrarySink):
    """Logs to Weights & Biases."""

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
        rows = self.table_rows(samples)
        columns = list(dict.fromkeys(itertools.chain.from_iterable(rows)))
        cells: list[list[Any]] = []
        for row in rows:
            cells.append([row.get(name) for name in columns])
        self.log(step, {SAMPLES: self.library.Table(columns=columns, data=cells)})

    def log_credit(self, step: int, html: str) -> None:
        self.log(step, {CREDIT: self.library.Html(html, data_is_not_path=True)})

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        self.run.log({STEP_NAME: step, **values})


class SwanlabSink(LibrarySink):
    """Logs to SwanLab."""

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
        for sample in samples:
            lines = [f"{name}: {value}" for name, value in sample.texts.items()]
            texts.append(self.library.Text("\n\n".join(lines)))
        media = {SAMPLES: texts}
        images = self.images(samples)
        if images:
            media[_SWANLAB_IMAGES] = list(images.values())
        self.log(step, media)


class TrackioSink(LibrarySink):
    """Logs to Trackio, which finds runs by name, so that a run has the experiment's name with a suffix of its own."""

    def __init__(self, run: RunDescription) -> None:
        import trackio  # pyright: ignore[reportMissingImports]

        super().__init__(run)
        name = earlier_run(run, "trackio") or f"{run.experiment}-{uuid.uuid4().hex[:6]}"
        self.start(trackio, run, name, name=name, embed=False, auto_log_cpu=False, auto_log_gpu=False)

    def log_samples(self, step: int, samples: Sequence[TrackedSample]) -> None:
        self.log(step, {SAMPLES: self.library.Table(data=self.table_rows(samples))})


# What trackers know of a run


def earlier_run(run: RunDescription, tracker: str) -> str | None:
    """Returns the tracker's identifier of the run that `run` resumes; None for a new run or one unknown to the tracker."""
    if run.resumed_step is None:
        return None
    return _known(run).get(tracker)


def remember_run(run: RunDescription, tracker: str, identifier: str) -> None:
    run.folder.mkdir(parents=True, exist_ok=True)
    known = _known(run) | {tracker: identifier}
    write_atomically(run.folder / TRACKERS_FILE, json.dumps(known, indent=2) + "\n")


def config_tree(run: RunDescription) -> Tree:
    return yaml.safe_load(run.config_text) or {}


def finite_or_nan(values: Mapping[str, float]) -> dict[str, float]:
    """Replaces infinities by NaN, since some trackers store them as the largest float."""
    return {name: float(value) if math.isfinite(value) else math.nan for name, value in values.items()}


def _known(run: RunDescription) -> dict[str, str]:
    path = run.folder / TRACKERS_FILE
    return read_json(path, dict, within=run.folder) if path.exists() else {}
