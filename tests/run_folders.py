"""Run folders made by hand, and the pixels of what is drawn of them."""

from __future__ import annotations

import importlib
import itertools
import json
import math
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from omegaconf import OmegaConf
from PIL import Image

from cepo.config import dump_config, load_config
from cepo.report.html_snippet import tracked_credit
from cepo.run_folder.own_records import remember_own_record
from cepo.run_folder.pictures import png_bytes
from cepo.run_folder.sinks.base import RunDescription
from cepo.run_folder.sinks.tracker import build_tracker
from cepo.run_folder.trace import GroupRecord, RolloutRecord

PICTURE = png_bytes(Image.new("RGB", (64, 64), (10, 200, 30)))


def run_in(folder: Path, **changes: Any) -> RunDescription:
    settings: dict[str, Any] = {
        "folder": folder,
        "config_text": "algorithm:\n  adv_estimator: cepo\n",
        "max_steps": 10,
        "credit_of": tracked_credit,
    }
    return RunDescription(**(settings | changes))


def write_run(
    folder: Path,
    rows: Sequence[tuple[int, Mapping[str, float]]],
    *,
    config: str = "algorithm:\n  adv_estimator: cepo\n  weight:\n    clip_radius: 0.5\n",
    groups: Sequence[GroupRecord] = (),
    generations: Mapping[int, Sequence[Mapping[str, object]]] | None = None,
) -> Path:
    tracker = build_tracker(["file"], run_in(folder, config_text=config, max_steps=2))
    for step, values in rows:
        tracker.log_metrics(step, values)
    for _, recorded in itertools.groupby(groups, key=lambda group: group.step):
        tracker.log_rollouts(list(recorded))
    for step, samples in (generations or {}).items():
        tracker.log_generations(step, samples)
    tracker.close()
    return folder


@cache
def recorded_settings(model: str) -> Any:
    """All settings of a run of the toy task as OmegaConf reads them, which takes longer than all else of a record."""
    config = load_config(["config=configs/microgeo/base.yaml", f"worker.actor.model.model_path={model}"])
    return OmegaConf.create(dump_config(config))


def write_checkpoint(run: Path, *settings: str, model: str = "microgeo:model", own: bool = False) -> Path:
    """A checkpoint with an adapter in a run folder, whose record has further settings; returns the checkpoint.

    The run is that of a stranger, or else the user's `own`.
    """
    adapter = run / "global_step_2" / "actor" / "lora_adapter"
    adapter.mkdir(parents=True)
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": model, "r": 4}))
    tree = OmegaConf.merge(recorded_settings(model), OmegaConf.from_dotlist(list(settings)))
    text = OmegaConf.to_yaml(tree)
    (run / "config.yaml").write_text(text, encoding="utf-8")
    if own:
        remember_own_record(text)
    return run / "global_step_2"


def validated(*accuracies: float, every: int = 1) -> list[tuple[int, dict[str, float]]]:
    return [(every * k, {"val/accuracy": value, "val/num_samples": 100}) for k, value in enumerate(accuracies)]


def rollout(*, right: bool, tokens: Sequence[str] = ("5", " sides", "\n"), delta: float | None = 0.25) -> RolloutRecord:
    """A rollout with A = 1 or -1, radius 0.5 and lambda 0.5, and the same evidence at each token."""
    advantage = 1.0 if right else -1.0
    count = len(tokens)
    weight = None if delta is None else min(max(math.exp(advantage * delta), 0.5), 1.5)
    student = [-0.5 - 0.125 * (place % 8) for place in range(count)]
    shifted = None if delta is None else [value + delta for value in student]
    return RolloutRecord(
        response="".join(tokens),
        token_ids=[300 + place % 100 for place in range(count)],
        tokens=tokens,
        reward=float(right),
        accuracy=float(right),
        token_advantages=[advantage * (1 + 0.5 * ((weight or 1.0) - 1))] * count,
        delta=None if delta is None else [delta] * count,
        weight=None if weight is None else [weight] * count,
        log_probs={"student": student, "correct": shifted, "wrong": None if delta is None else student},
        references={} if delta is None else {"correct": "24", "wrong": "7"},
    )


def group(step: int, rollouts: Sequence[RolloutRecord], **changes: Any) -> GroupRecord:
    fields: dict[str, Any] = {"prompt_id": "p", "problem": "How long?", "ground_truth": "24", "images": [PICTURE]}
    return GroupRecord(step=step, rollouts=rollouts, **(fields | changes))


def report_pixels(path: Path) -> np.ndarray:
    with Image.open(path) as image:
        return np.asarray(image.convert("RGB")).astype(float) / 255


def trackio_into(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets Trackio, whose modules read their folder when imported, write into another one."""
    for name, modules in (
        ("TRACKIO_DIR", ("utils", "sqlite_storage")),
        ("MEDIA_DIR", ("utils", "run", "table", "media.media")),
    ):
        place = folder if name == "TRACKIO_DIR" else folder / "media"
        for module in modules:
            monkeypatch.setattr(importlib.import_module(f"trackio.{module}"), name, place)


def written(path: Path, text: bytes) -> bytes:
    """The content of a file that another process may still be writing, once it has the text."""
    deadline = time.monotonic() + 20
    while text not in path.read_bytes():
        assert time.monotonic() < deadline, f"{path} never had {text!r}"
        time.sleep(0.1)
    return path.read_bytes()


def wait_for(page: Path, text: str) -> None:
    """Returns as soon as the page has the text."""
    deadline = time.monotonic() + 60
    while not (page.is_file() and text in page.read_text("utf-8")):
        assert time.monotonic() < deadline, f"{page} never had {text}"
        time.sleep(0.1)
