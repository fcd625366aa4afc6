"""Reads one row: its turns, answer, solution, images and videos; measures its prompt, and makes it a problem."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cepo.config.schema import DataConfig
from cepo.data.contexts import Problem, UserTemplate
from cepo.data.images import ImageRules, PixelBudget, checked_sizes, decoded_images, listed, located
from cepo.data.messages import plain_text, read_turns
from cepo.data.videos import load_video
from cepo.errors import ConfigError, DataError
from cepo.foreign_files import read_text
from cepo.models.inputs import ImageSource, Turn, Video
from cepo.models.processing import IMAGE_MARK, VIDEO_MARK, Processing
from cepo.trees import Fields


@dataclass(frozen=True, kw_only=True)
class RowMeasure:
    """The number of tokens of a row's prompt, including `visual_tokens` of images and videos, and their numbers."""

    length: int
    num_images: int
    num_videos: int
    visual_tokens: int

    def __str__(self) -> str:
        visual = f" ({self.visual_tokens} of them of images and videos, which data.min_pixels and max_pixels bound)"
        return f"{self.length} tokens{visual if self.visual_tokens else ''}"


class RowReader:
    """Reads rows of one source by the settings of `data`; `columns` are the names of its columns."""

    def __init__(self, source: str, columns: Sequence[str], config: DataConfig, processing: Processing) -> None:
        self._source, self._columns, self._config, self._processing = source, columns, config, processing
        self._rules = ImageRules.of(config)
        self._template = None
        if config.format_prompt is not None:
            text, origin = read_text(Path(config.format_prompt)).strip(), f"data.format_prompt '{config.format_prompt}'"
            self._template = UserTemplate(text, origin, "content")
        for name in ("prompt_key", "answer_key"):
            self.require_column(name)

    def require_column(self, name: str) -> None:
        """Raises `ConfigError` if the source lacks the column that the setting `data.<name>` names."""
        key = getattr(self._config, name)
        if key not in self._columns:
            raise ConfigError(
                f"data.{name} is '{key}', which {self._source} does not have. Its columns: {', '.join(self._columns)}"
            )

    def problem(self, number: int, row: dict[str, Any], source: ImageSource | None) -> Problem:
        """Returns the problem of the row `number`; `source` is where its images can be read again, if they can."""
        row, config = dict(row), self._config
        *history, last = self._turns(row)
        budget = PixelBudget()
        with located(f"{self._source}, row {number}"):
            videos = self._videos(row, budget)
            images = decoded_images(row, config.image_key, self._rules, budget)
            teacher_images = decoded_images(row, config.teacher_image_key, self._rules, budget)
        if videos:  # which are sent by value, and the images with them
            source = None
        answer = plain_text(row.pop(config.answer_key)).strip()
        for key in (config.image_key, config.video_key, config.teacher_image_key):
            if key is not None:
                row.pop(key, None)
        return Problem(
            prompt_id=str(number),
            text=last.text,
            history=tuple(history),
            images=images,
            ground_truth=answer,
            solution=worked_solution(row.get(config.solution_key)),
            columns=row,
            videos=videos,
            image_source=source,
            teacher_images=teacher_images,
            teacher_image_source=None if source is None else replace(source, column=config.teacher_image_key),
        )

    def _turns(self, row: Fields) -> list[Turn]:
        """Returns the prompt's turns, with the format prompt applied to the last one."""
        *history, last = read_turns(row[self._config.prompt_key])
        if self._template is not None:
            last = Turn(last.role, self._template.render(content=last.text))
        return [*history, last]

    def _videos(self, row: Fields, budget: PixelBudget) -> tuple[Video, ...]:
        key, fps = self._config.video_key, self._config.video_fps
        videos: list[Video] = []
        for value in listed(row, key):
            with located(f"column '{key}'"):
                factor = self._processing.reader.video_factor
                videos.append(load_video(value, self._rules, fps=fps, factor=factor, budget=budget))
        return tuple(videos)

    def measure(self, row: Fields) -> RowMeasure:
        """Measures the prompt and its images. Videos are decoded completely, the only way to find damaged ones."""
        config = self._config
        for key, wrong, accepted in (
            (config.prompt_key, (dict, bytes), "text, a number, or a list of messages"),
            (config.answer_key, (list, dict, bytes), "text or a number"),
        ):
            if isinstance(row[key], wrong):
                raise DataError(f"column '{key}' holds a {type(row[key]).__name__}; accepted: {accepted}")
        if not read_turns(row[config.prompt_key])[-1].text.strip():
            raise DataError(f"column '{config.prompt_key}' is empty")
        if not plain_text(row[config.answer_key]).strip():
            raise DataError(f"column '{config.answer_key}' is empty; a problem without an answer cannot be rewarded")
        *history, last = self._turns(row)
        text = "".join(turn.text for turn in (*history, last))
        images, videos = listed(row, config.image_key), listed(row, config.video_key)
        shown = [] if config.teacher_image_key is None else listed(row, config.teacher_image_key)
        if shown and len(shown) != len(images):
            raise DataError(
                f"column '{config.teacher_image_key}' has {len(shown)} images for the teacher, and the row has "
                f"{len(images)}; they must agree"
            )
        if IMAGE_MARK in text and config.image_key not in row:
            self.require_column("image_key")
        for mark, values, name in ((IMAGE_MARK, images, "images"), (VIDEO_MARK, videos, "videos")):
            if text.count(mark) != len(values) and (values or mark == IMAGE_MARK):  # without videos it is plain text
                raise DataError(f"{text.count(mark)} '{mark}' in the text but {len(values)} {name}; they must agree")
        budget = PixelBudget()
        sizes = checked_sizes(row, config.image_key, self._rules, budget)
        teachers_sizes = checked_sizes(row, config.teacher_image_key, self._rules, budget)
        visual = 0
        if sizes or videos:
            reader = self._processing.reader
            visual += sum(reader.num_tokens(size) for size in sizes)
            visual += sum(reader.num_video_tokens(video) for video in self._videos(row, budget))
            for size in teachers_sizes:  # which are not in the prompt, but must be readable
                reader.num_tokens(size)
        # The text has one placeholder token per image and video, which their own tokens replace.
        template = self._processing.template_ids(last.text, with_videos=bool(videos), history=history)
        length = visual + len(template) - len(images) - len(videos)
        return RowMeasure(length=length, num_images=len(images), num_videos=len(videos), visual_tokens=visual)


def worked_solution(value: object) -> str | None:
    return None if value is None or not str(value).strip() else str(value)
