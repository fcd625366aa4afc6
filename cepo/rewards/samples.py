"""Says what a reward function reads of a sample: the names that the trainer fills, which no column of data may have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

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


def sample_of(columns: Fields, trainers_fields: TrainersFields) -> Tree:
    """Returns the sample of a row: its columns, without those of a name that is the trainer's, and `trainers_fields`."""
    free_columns = {name: value for name, value in columns.items() if name not in TRAINERS_NAMES}
    return {**free_columns, **trainers_fields}


def require_free_names(source: str, columns: Sequence[str], columns_read: Mapping[str, str]) -> None:
    """Raises `ConfigError` if a column of `source` has a name of the trainer's and no setting of `data` reads it.

    `columns_read` are the columns that settings name (`prompt_key`, `answer_key`, ...); each is read as that, under
    whatever name.
    """
    names_read = set(columns_read.values())
    names_read.update(column.partition(".")[0] for column in columns_read.values())
    refused_columns = [name for name in columns if name in TRAINERS_NAMES and name not in names_read]
    if not refused_columns:
        return
    name = refused_columns[0]
    setting = _SETTINGS.get(name)
    alternative = ""
    if setting is not None:
        alternative = f", or read it with data.{setting}={name} in place of '{columns_read[setting]}'"
    raise ConfigError(
        f"{source} has the column '{name}', but the trainer itself gives reward functions a value of this name, so that "
        f"the column could decide what is right. Rename the column{alternative}. Names that columns cannot have: "
        f"{', '.join(sorted(TRAINERS_NAMES))}"
    )
