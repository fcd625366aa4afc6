"""The settings of a run's data; a part of the schema."""

# ruff: noqa: RUF009  (`option` returns a dataclass field: nothing mutable is shared between instances)

from __future__ import annotations

from dataclasses import dataclass, field

from cepo.config.options import described, option, parts_of


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """`data.*`: where the problems come from and how prompts are made of them."""

    train_files: str = field(
        metadata=described(
            "Training set: hub name `org/name@split`, local file or folder, or `microgeo:train`; several as a list, or "
            "separated by commas.",
            joined=True,
        )
    )
    train_weights: list[float] | None = option(
        None,
        "Share of each of several training sets in every step, in their order, of any sum; null: all rows are one set.",
        above=0,
    )
    val_files: str | None = option(None, "Validation set, in the same forms; null: no validation.")
    prompt_key: str = option("prompt", "Column with the question: text, or a list of chat messages.")
    answer_key: str = option("answer", "Column with the reference answer.")
    solution_key: str = option("solution", "Column with a worked solution; a dataset need not have it.")
    image_key: str = option("images", "Column with the list of images; a row may have none.")
    video_key: str = option("videos", "Column with the list of videos; a row may have none. Needs the extra `video`.")
    video_fps: float = option(2.0, "Frames per second taken of a video.", above=0)
    image_dir: str | None = option(
        None,
        "Folder that image and video paths given as text lie in; null: paths may lead anywhere.",
    )
    max_prompt_length: int = option(512, "Prompt tokens, expanded image tokens included.", minimum=1)
    max_response_length: int = option(512, "Tokens a response may have.", minimum=1)
    rollout_batch_size: int = option(512, "Prompts per training step.", minimum=1)
    mini_rollout_batch_size: int | None = option(
        None, "Prompts sampled in one round under online filtering; null: rollout_batch_size.", minimum=1
    )
    val_batch_size: int = option(-1, "Prompts per validation batch; -1: the whole set at once.", minimum=1, off=-1)
    format_prompt: str | None = option(None, "Jinja file around the question (variable `content`); null: as it is.")
    override_chat_template: str | None = option(None, "File with a chat template that replaces the model's own.")
    shuffle: bool = option(True, "Visit the training rows in a seeded random order; false: in their own order.")
    seed: int = option(1, "Seed of that order.", minimum=0)
    min_pixels: int | None = option(
        262144,
        "Enlarge images below this pixel count; null: the processor's own limit, which keeps small figures cheap.",
        minimum=1,
    )
    max_pixels: int | None = option(
        4194304, "Shrink images above this pixel count; null: the processor's own limit.", minimum=1
    )
    filter_overlong_prompts: bool = option(
        True, "Drop and count rows whose prompt exceeds max_prompt_length; false: such a row is an error."
    )
    skip_bad_rows: bool = option(
        False,
        "Drop and count rows with an unreadable image, a placeholder mismatch or an empty answer; false: an error.",
    )

    @property
    def train_sources(self) -> list[str]:
        """The training sets one by one."""
        return parts_of(self.train_files)
