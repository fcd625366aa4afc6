"""Says what a reward function reads of a sample: the names that the trainer fills, which no column of data may have."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, TypedDict

from cepo.config.schema import DataConfig
from cepo.errors import ConfigError
from cepo.files.trees import Fields, Tree


class TrainersFields(TypedDict, total=False):
    """The entries of a sample whose values the trainer gives; all others are columns of the row."""

    response: str
    response_length: int  # in tokens
    ground_truth: str
    prompt: str
    images: list[Any]  # as the model sees them; only for a function whose file says NEEDS_IMAGES
    videos: list[Any]  # the chosen frames of each, likewise
    extracted_answer: str | None  # only with worker.reward.answer_function


TRAINERS_NAMES = frozenset(TrainersFields.__annotations__)
_SETTINGS = {"prompt": "prompt_key", "ground_truth": "answer_key", "images": "image_key", "videos": "video_key"}
"""The setting of `data` that names the column which a user of such a name most likely has."""


def sample_of(columns: Fields, given: TrainersFields) -> Tree:
    """Returns the sample of a row: its columns, without those of a name that is the trainer's, and what is `given`."""
    sample = {name: value for name, value in columns.items() if name not in TRAINERS_NAMES}
    return {**sample, **given}


def require_free_names(source: str, columns: Sequence[str], data: DataConfig) -> None:
    """Raises `ConfigError` if a column of `source` has a name of the trainer's and no setting of `data` reads it.

    A column that a setting names (`data.prompt_key`, `answer_key`, ...) is read as that, under whatever name.
    """
    read = _columns_read(data)
    taken = [name for name in columns if name in TRAINERS_NAMES and name not in read]
    if not taken:
        return
    name = taken[0]
    setting = _SETTINGS.get(name)
    otherwise = f", or read it with data.{setting}={name} in place of '{getattr(data, setting)}'" if setting else ""
    raise ConfigError(
        f"{source} has the column '{name}', but the trainer itself gives reward functions a value of this name, so that "
        f"the column could decide what is right. Rename the column{otherwise}. Names that columns cannot have: "
        f"{', '.join(sorted(TRAINERS_NAMES))}"
    )


def _columns_read(data: DataConfig) -> Collection[str]:
    """Returns the columns that the settings of `data` name, of a dotted key also its first part."""
    keys = [data.prompt_key, data.answer_key, data.solution_key, data.image_key, data.teacher_image_key, data.video_key]
    names: set[str] = set()
    for key in keys:
        if key is not None:
            names.add(key)
            names.add(key.partition(".")[0])
    return names
