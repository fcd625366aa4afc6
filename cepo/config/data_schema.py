"""Declares the settings of a run's data; a part of the schema."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator

from cepo.config.paths import File, located_data
from cepo.sections import NOT_DECISIVE, Count, CountOrOff, Natural, Positive, section
from cepo.trees import is_list


def parts_of(text: str) -> list[str]:
    return [part.strip() for part in text.split(",")]


def _joined(value: Any) -> Any:
    texts = is_list(value) and value and all(isinstance(entry, str) and "," not in entry for entry in value)
    return ",".join(value) if texts else value


Joined = Annotated[str, BeforeValidator(_joined, json_schema_input_type=str | list[str])]
"""Text with one or more names, separated by commas or as a list."""


@section
class DataConfig:
    """`data.*`: the sources of the problems and how prompts are made from them."""

    train_files: Annotated[Joined, AfterValidator(lambda text: ",".join(map(located_data, parts_of(text))))]
    """Training set: hub name `org/name@split`, local file or folder, or `microgeo:train`. Give several as a list, or
    separated by commas."""
    train_weights: list[Positive] | None = None
    """Share of problems from each training set, in the order of train_files; the sum does not matter. null: all rows
    form one set."""
    val_files: Annotated[Annotated[str, AfterValidator(located_data)] | None, NOT_DECISIVE] = None
    """Validation set, in the same forms; null: no validation."""
    prompt_key: str = "prompt"
    """Column with the question: text, or a list of chat messages."""
    answer_key: str = "answer"
    """Column with the reference answer."""
    solution_key: str = "solution"
    """Column with a worked solution; a dataset may lack it."""
    image_key: str = "images"
    """Column with the list of images; a row may have none."""
    teacher_image_key: str | None = None
    """Column with the images that teachers see instead of the row's, as many as those: crops, for example, or annotated
    figures. A row without any shows its own; null: all rows do."""
    image_hosts: list[str] = []
    """Hosts (`name` or `name:port`, by https; `http://name` allows http) from which images given as addresses are
    downloaded. Empty: an address is an error."""
    video_key: str = "videos"
    """Column with the list of videos; a row may have none. Needs the extra `video`."""
    video_fps: Positive = 2.0
    """Frames per second that are taken from a video."""
    image_dir: File | None = None
    """Folder that paths of images and videos are relative to and must lie in; null: the working directory, and paths
    may lead anywhere."""
    max_prompt_length: Count = 512
    """Longest prompt in tokens, expanded image tokens included."""
    max_response_length: Count = 512
    """Longest response in tokens."""
    rollout_batch_size: Count = 512
    """Prompts per training step."""
    mini_rollout_batch_size: Count | None = None
    """Prompts sampled per round of algorithm.online_filtering; null: rollout_batch_size."""
    val_batch_size: Annotated[CountOrOff, NOT_DECISIVE] = -1
    """Prompts per validation batch; -1: the whole set. A small value limits how many videos are in memory at once."""
    format_prompt: File | None = None
    """Jinja file that wraps the question (variable `content`); null: the question alone."""
    override_chat_template: File | None = None
    """File with a chat template that replaces the model's own."""
    shuffle: bool = True
    """Visit the training rows in a seeded random order; false: in the order of the data."""
    seed: Natural = 1
    """Seed of the order of the training rows; trainer.seed if it is not set."""
    min_pixels: Count | None = 262144
    """Enlarge images with fewer pixels; null: the processor's own limit, which keeps small figures cheap."""
    max_pixels: Count | None = 4194304
    """Shrink images with more pixels; null: the processor's own limit. A lower value gives images fewer tokens."""
    filter_overlong_prompts: bool = True
    """Drop and count rows whose prompt exceeds max_prompt_length; false: such a row is an error."""
    skip_bad_rows: bool = False
    """Drop and count rows with an unreadable image, mismatched placeholders or an empty answer; false: such a row is an
    error."""

    @property
    def train_sources(self) -> list[str]:
        return parts_of(self.train_files)
