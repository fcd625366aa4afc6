"""Defines, writes and reads the files of a run folder.

| file | content |
| --- | --- |
| `metrics.jsonl` | one object per step: `{"step": 1, "reward/mean": 0.5, ...}`; step 0 is before training |
| `rollouts.jsonl` | one object per recorded group of rollouts (`GroupRecord`) |
| `generations.jsonl` | one object per recorded validation sample |
| `config.yaml` | the resolved configuration |
| `environment.json` | a list: versions, commit, devices and command of the start and of every resume |
| `trackers.json` | the identifiers that external trackers gave the run, for resuming |

Non-finite values are null in the files and NaN when read.
"""

from __future__ import annotations

import base64
import io
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cepo.errors import DataError
from cepo.tracking.lines import finite_or_none, read_objects, to_disk

if TYPE_CHECKING:
    from PIL.Image import Image

METRICS_FILE = "metrics.jsonl"
ROLLOUTS_FILE = "rollouts.jsonl"
GENERATIONS_FILE = "generations.jsonl"
CONFIG_FILE = "config.yaml"
ENVIRONMENT_FILE = "environment.json"
TENSORBOARD_FOLDER = "tensorboard"
TRACKERS_FILE = "trackers.json"
MLFLOW_FOLDER = "mlflow"
SWANLAB_FOLDER = "swanlab"


@dataclass(frozen=True, kw_only=True)
class MetricsRow:
    """The metrics measured after the 1-based step `step`; 0 is before training."""

    step: int
    values: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class RolloutRecord:
    """The record of one rollout; the per-token lists have one entry per token.

    Attributes:
        tokens: the text of each response token.
        accuracy: the verifier's verdict in [0, 1].
        advantage: the mean of `token_advantages`.
        token_advantages: A_hat_t, which the update used.
        delta: evidence in nats; None if the method consulted no teacher.
        weight: w_t; None without evidence.
        references: view -> the text that this rollout's teacher saw, for views that show the group's rollouts different
            texts.
    """

    response: str
    tokens: Sequence[str]
    reward: float
    accuracy: float
    advantage: float
    token_advantages: Sequence[float]
    delta: Sequence[float] | None = None
    weight: Sequence[float] | None = None
    references: Mapping[str, str | None] = field(default_factory=dict[str, "str | None"])

    def __post_init__(self) -> None:
        for name in ("token_advantages", "delta", "weight"):
            values = getattr(self, name)
            if values is not None and len(values) != len(self.tokens):
                raise DataError(f"rollout record: {name} has {len(values)} entries for {len(self.tokens)} tokens")

    @property
    def right(self) -> bool:
        """Whether the verifier accepts the response."""
        return self.accuracy >= 0.5

    @property
    def has_evidence(self) -> bool:
        """Whether the delta or weight of any token differs from neutral."""
        deltas, weights = self.delta or (), self.weight or ()
        return any(delta != 0 for delta in deltas) or any(weight != 1 for weight in weights)


@dataclass(frozen=True, kw_only=True)
class GroupRecord:
    """The record of all recorded rollouts of one prompt in one step.

    Attributes:
        image: the prompt's first image as PNG bytes; None for a prompt without one.
        references: view -> the text that all its teachers saw; None if the view was the student's own, or if rollouts
            have references of their own.
    """

    step: int
    prompt_id: str
    problem: str
    ground_truth: str
    image: bytes | None
    references: Mapping[str, str | None]
    rollouts: Sequence[RolloutRecord] = field(repr=False)

    @property
    def mixed(self) -> bool:
        """Whether there are right and wrong rollouts."""
        return len({rollout.right for rollout in self.rollouts}) == 2

    @property
    def has_evidence(self) -> bool:
        return any(rollout.has_evidence for rollout in self.rollouts)


def png_bytes(image: Image) -> bytes:
    """Encodes an image for `GroupRecord.image`."""
    buffer = io.BytesIO()
    image.convert("RGB").save(buffer, format="PNG")
    return buffer.getvalue()


def metrics_object(row: MetricsRow) -> dict[str, Any]:
    """Returns the line of `metrics.jsonl`."""
    return {"step": row.step} | {name: finite_or_none(value) for name, value in row.values.items()}


def metrics_row(line: Mapping[str, Any]) -> MetricsRow:
    """Reads what `metrics_object` wrote; raises `DataError` if there is no `step`."""
    if "step" not in line:
        raise DataError(f"a row of {METRICS_FILE} has no 'step'; it has {', '.join(line) or 'nothing'}")
    try:
        values = {name: math.nan if value is None else float(value) for name, value in line.items() if name != "step"}
        return MetricsRow(step=int(line["step"]), values=values)
    except (TypeError, ValueError, OverflowError) as error:
        raise DataError(f"a row of {METRICS_FILE} holds a value that is not a number: {error}") from error


def group_object(group: GroupRecord) -> dict[str, Any]:
    """Returns the line of `rollouts.jsonl`; numbers keep 6 significant digits."""
    return {
        "step": group.step,
        "prompt_id": group.prompt_id,
        "problem": group.problem,
        "ground_truth": group.ground_truth,
        "image": None if group.image is None else base64.b64encode(group.image).decode("ascii"),
        "references": dict(group.references),
        "rollouts": [_rollout_object(rollout) for rollout in group.rollouts],
    }


def group_record(line: Mapping[str, Any]) -> GroupRecord:
    """Reads what `group_object` wrote."""
    image = line["image"]
    return GroupRecord(
        step=int(line["step"]),
        prompt_id=line["prompt_id"],
        problem=line["problem"],
        ground_truth=line["ground_truth"],
        image=None if image is None else base64.b64decode(image),
        references=dict(line["references"]),
        rollouts=[_rollout_record(rollout) for rollout in line["rollouts"]],
    )


def read_metrics(run_folder: Path) -> list[MetricsRow]:
    """Returns all rows of a run in order; raises `DataError` if the folder or file is missing or a line is broken."""
    return [metrics_row(line) for line in read_objects(_existing(run_folder, METRICS_FILE))]


def read_rollouts(run_folder: Path) -> Iterator[GroupRecord]:
    """Yields the recorded groups of a run, oldest first; none if nothing was recorded."""
    path = run_folder / ROLLOUTS_FILE
    if path.exists():
        yield from map(group_record, read_objects(path))


def read_generations(run_folder: Path) -> Iterator[dict[str, Any]]:
    """Yields the recorded validation samples, each with its `step`; none if nothing was recorded."""
    path = run_folder / GENERATIONS_FILE
    if path.exists():
        yield from read_objects(path)


def read_environment(run_folder: Path) -> list[dict[str, Any]]:
    """Returns one entry per start or resume, none without a record; raises `DataError` if the file is damaged."""
    path = run_folder / ENVIRONMENT_FILE
    if not path.exists():
        return []
    try:
        entries = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is damaged: {error}") from error
    if not isinstance(entries, list):
        raise DataError(f"{path} is damaged: it does not hold a list")
    return entries


def write_atomically(path: Path, text: str, *, private: bool = False) -> None:
    """Writes a new file and renames it over the old one, so that a reader never sees a part of it.

    The new file is on the disk before the rename, and so is its name when this returns. `private`: only its owner may
    read it.
    """
    beside = path.with_name(path.name + ".new")
    beside.unlink(missing_ok=True)
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if private else 0o666)
    with open(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)
    to_disk(path.parent)


def _existing(run_folder: Path, name: str) -> Path:
    if not run_folder.is_dir():
        raise DataError(
            f"run folder {run_folder} does not exist; give the folder a training run wrote its records into"
        )
    path = run_folder / name
    if not path.is_file():
        raise DataError(f"{path} does not exist; a run writes it when trainer.logger contains 'file'")
    return path


def _rollout_object(rollout: RolloutRecord) -> dict[str, Any]:
    line: dict[str, Any] = {
        "response": rollout.response,
        "tokens": list(rollout.tokens),
        "reward": _short(rollout.reward),
        "accuracy": _short(rollout.accuracy),
        "advantage": _short(rollout.advantage),
        "token_advantages": [_short(value) for value in rollout.token_advantages],
    }
    for name in ("delta", "weight"):
        values = getattr(rollout, name)
        if values is not None:
            line[name] = [_short(value) for value in values]
    if rollout.references:
        line["references"] = dict(rollout.references)
    return line


def _rollout_record(line: Mapping[str, Any]) -> RolloutRecord:
    return RolloutRecord(
        response=line["response"],
        tokens=line["tokens"],
        reward=_number(line["reward"]),
        accuracy=_number(line["accuracy"]),
        advantage=_number(line["advantage"]),
        token_advantages=[_number(value) for value in line["token_advantages"]],
        delta=[_number(value) for value in line["delta"]] if "delta" in line else None,
        weight=[_number(value) for value in line["weight"]] if "weight" in line else None,
        references=dict(line.get("references", {})),
    )


def _short(value: float) -> float | None:
    return finite_or_none(float(f"{float(value):.6g}"))


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)
