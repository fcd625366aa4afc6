"""Holds what the settings of `data` say about rows: where their parts stand, and what images may be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from cepo.data.images import ImageRules

if TYPE_CHECKING:
    from cepo.config.schema import DataConfig

MOST_CHARACTERS = 400_000
CHARACTERS_PER_TOKEN = 16
"""A text has at most the first number of characters, or the second times data.max_prompt_length if that is more. A
tokenizer needs minutes for much longer ones, or ends the process."""


@dataclass(frozen=True, kw_only=True)
class CellRules:
    """The columns that hold a row's parts, by the names of their settings, and where a question's images stand."""

    prompt_key: str = "prompt"
    answer_key: str = "answer"
    solution_key: str = "solution"
    image_key: str = "images"
    teacher_image_key: str | None = None
    video_key: str = "videos"
    puts_marks_in_front: bool = False

    @property
    def columns(self) -> dict[str, str]:
        """The columns by the names of their settings."""
        return {name: key for name, key in vars(self).items() if name.endswith("_key") and key is not None}


@dataclass(frozen=True, kw_only=True)
class RowRules:
    """All settings on which the content and the measure of a row depend."""

    cells: CellRules
    images: ImageRules
    video_fps: float
    format_prompt: str | None  # the path of a template
    most_characters: int  # of a text

    @classmethod
    def of(cls, config: DataConfig) -> Self:
        return cls(
            cells=CellRules(
                prompt_key=config.prompt_key,
                answer_key=config.answer_key,
                solution_key=config.solution_key,
                image_key=config.image_key,
                teacher_image_key=config.teacher_image_key,
                video_key=config.video_key,
                puts_marks_in_front=config.image_marks == "front",
            ),
            images=ImageRules(
                image_dir=config.image_dir,
                image_hosts=tuple(config.image_hosts),
                min_pixels=config.min_pixels,
                max_pixels=config.max_pixels,
            ),
            video_fps=config.video_fps,
            format_prompt=config.format_prompt,
            most_characters=max(MOST_CHARACTERS, CHARACTERS_PER_TOKEN * config.max_prompt_length),
        )
