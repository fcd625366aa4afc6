"""Declares the settings of a run's data; a part of the schema."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from cepo.config.paths import File, located_data
from cepo.sections import section
from cepo.trees import is_list


def parts_of(text: str) -> list[str]:
    """Returns the names in a `Joined` setting, one by one."""
    return [part.strip() for part in text.split(",")]


def _joined(value: Any) -> Any:
    texts = is_list(value) and value and all(isinstance(entry, str) and "," not in entry for entry in value)
    return ",".join(value) if texts else value


Joined = Annotated[str, BeforeValidator(_joined, json_schema_input_type=str | list[str])]
"""Text that may name several things, separated by commas or as a list."""
CountOrOff = Literal[-1] | Annotated[int, Field(ge=1)]
"""A count of at least 1; -1 turns the setting off."""


def _located_sources(text: str) -> str:
    return ",".join(map(located_data, parts_of(text)))


@section
class DataConfig:
    """`data.*`: the sources of the problems and how prompts are made from them."""

    train_files: Annotated[Joined, AfterValidator(_located_sources)] = Field(
        description="Training set: hub name `org/name@split`, local file or folder, or `microgeo:train`; several as a "
        "list, or separated by commas."
    )
    train_weights: list[Annotated[float, Field(gt=0)]] | None = Field(
        default=None,
        description="Share of each of several training sets in every step, in their order, of any sum; null: all rows "
        "are one set.",
    )
    val_files: Annotated[str, AfterValidator(located_data)] | None = Field(
        default=None, description="Validation set, in the same forms; null: no validation."
    )
    prompt_key: str = Field(default="prompt", description="Column with the question: text, or a list of chat messages.")
    answer_key: str = Field(default="answer", description="Column with the reference answer.")
    solution_key: str = Field(
        default="solution", description="Column with a worked solution; a dataset need not have it."
    )
    image_key: str = Field(default="images", description="Column with the list of images; a row may have none.")
    video_key: str = Field(
        default="videos", description="Column with the list of videos; a row may have none. Needs the extra `video`."
    )
    video_fps: float = Field(default=2.0, gt=0, description="Frames per second taken of a video.")
    image_dir: File | None = Field(
        default=None,
        description="Folder that image and video paths given as text lie in; null: paths may lead anywhere.",
    )
    max_prompt_length: int = Field(default=512, ge=1, description="Prompt tokens, expanded image tokens included.")
    max_response_length: int = Field(default=512, ge=1, description="Tokens a response may have.")
    rollout_batch_size: int = Field(default=512, ge=1, description="Prompts per training step.")
    mini_rollout_batch_size: int | None = Field(
        default=None, ge=1, description="Prompts sampled in one round under online filtering; null: rollout_batch_size."
    )
    val_batch_size: CountOrOff = Field(
        default=-1, description="Prompts per validation batch; -1: the whole set at once."
    )
    format_prompt: File | None = Field(
        default=None, description="Jinja file around the question (variable `content`); null: as it is."
    )
    override_chat_template: File | None = Field(
        default=None, description="File with a chat template that replaces the model's own."
    )
    shuffle: bool = Field(
        default=True, description="Visit the training rows in a seeded random order; false: in their own order."
    )
    seed: int = Field(default=1, ge=0, description="Seed of that order.")
    min_pixels: int | None = Field(
        default=262144,
        ge=1,
        description="Enlarge images below this pixel count; null: the processor's own limit, which keeps small figures "
        "cheap.",
    )
    max_pixels: int | None = Field(
        default=4194304, ge=1, description="Shrink images above this pixel count; null: the processor's own limit."
    )
    filter_overlong_prompts: bool = Field(
        default=True,
        description="Drop and count rows whose prompt exceeds max_prompt_length; false: such a row is an error.",
    )
    skip_bad_rows: bool = Field(
        default=False,
        description="Drop and count rows with an unreadable image, a placeholder mismatch or an empty answer; false: "
        "an error.",
    )

    @property
    def train_sources(self) -> list[str]:
        """The training sets, one by one."""
        return parts_of(self.train_files)
