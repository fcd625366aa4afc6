"""Holds what the settings of `data` say about rows: where their parts stand, and what images may be."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Self, TypeVar

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


RulesT = TypeVar("RulesT", CellRules, ImageRules)


def _rules(kind: type[RulesT], config: DataConfig, **others: Any) -> RulesT:
    """Returns the rules of a kind, whose fields beside `others` have the names of settings of `data`."""
    names = {field.name for field in fields(kind)} - others.keys()
    return kind(**{name: getattr(config, name) for name in names}, **others)


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
            cells=_rules(CellRules, config, puts_marks_in_front=config.image_marks == "front"),
            images=_rules(ImageRules, config, image_hosts=tuple(config.image_hosts)),
            video_fps=config.video_fps,
            format_prompt=config.format_prompt,
            most_characters=max(MOST_CHARACTERS, CHARACTERS_PER_TOKEN * config.max_prompt_length),
        )


class ProblemRules:
    """A former name: `ProblemSet` takes the section `data` of the configuration."""

    @staticmethod
    def of(config: DataConfig) -> DataConfig:
        return config
