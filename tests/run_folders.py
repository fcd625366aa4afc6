"""Run folders made by hand, and the pixels of what is drawn of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from cepo.tracking import GroupRecord, RolloutRecord, RunDescription, build_tracker, png_bytes

PICTURE = png_bytes(Image.new("RGB", (64, 64), (10, 200, 30)))


def write_run(
    folder: Path,
    rows: Sequence[tuple[int, Mapping[str, float]]],
    *,
    config: str = "algorithm:\n  adv_estimator: cepo\n  cepo:\n    clip_radius: 0.5\n",
    groups: Sequence[GroupRecord] = (),
    generations: Mapping[int, Sequence[Mapping[str, object]]] | None = None,
) -> Path:
    tracker = build_tracker(["file"], RunDescription(folder=folder, config_text=config, max_steps=2))
    for step, values in rows:
        tracker.log_metrics(step, values)
    tracker.log_rollouts(groups)
    for step, samples in (generations or {}).items():
        tracker.log_generations(step, samples)
    tracker.close()
    return folder


def validated(*accuracies: float, every: int = 1) -> list[tuple[int, dict[str, float]]]:
    return [(every * k, {"val/accuracy": value, "val/num_samples": 100}) for k, value in enumerate(accuracies)]


def rollout(*, right: bool, tokens: Sequence[str] = ("5", " sides", "\n"), weight: float | None = 1.5) -> RolloutRecord:
    advantage = 1.0 if right else -1.0
    count = len(tokens)
    delta = None if weight is None else [math.copysign(1.0, advantage) * math.log(weight)] * count
    return RolloutRecord(
        response="".join(tokens),
        tokens=tokens,
        reward=float(right),
        accuracy=float(right),
        advantage=advantage,
        token_advantages=[advantage * (weight or 1.0)] * count,
        delta=delta,
        weight=None if weight is None else [weight] * count,
    )


def group(
    step: int, rollouts: Sequence[RolloutRecord], *, prompt_id: str = "p", problem: str = "How long?"
) -> GroupRecord:
    references = {"correct": "24", "wrong": None}
    fields = {"prompt_id": prompt_id, "problem": problem, "ground_truth": "24", "image": PICTURE}
    return GroupRecord(step=step, references=references, rollouts=rollouts, **fields)  # type: ignore[arg-type]


def report_pixels(path: Path) -> np.ndarray:
    with Image.open(path) as image:
        return np.asarray(image.convert("RGB")).astype(float) / 255
