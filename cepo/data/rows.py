"""Reads one row: its turns, answer, solution, images and videos; measures its prompt, and makes it a problem."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from cepo.config.paths import find_path, split_source
from cepo.data.image_files import first_missing, folders_beside, place_of_missing
from cepo.data.images import checked_sizes, decoded_images, located
from cepo.data.json_text import without_spelling
from cepo.data.prompts import Problem, UserTemplate
from cepo.data.row_parser import Cells, has_column, read_cells
from cepo.data.row_settings import CHARACTERS_PER_TOKEN, RowRules
from cepo.data.videos import load_video
from cepo.errors import ConfigError, DataError
from cepo.files.safe_files import read_text
from cepo.files.trees import Fields
from cepo.models.interface import ImageSource, Turn, Video
from cepo.models.processing import Processing
from cepo.models.text_codec import IMAGE_MARK, VIDEO_MARK

_FOREIGN_MARKS = ("<img>", "<IMAGE>", "[image]", "<image 1>", "<image1>", "<image_1>", "<|image_pad|>", "<|image|>")
"""What other programs write where an image stands."""
_SHEET_FAULTS = ("#REF!", "#N/A", "#VALUE!", "#NAME?", "#DIV/0!", "#NUM!", "#NULL!", "#SPILL!", "#CALC!")
"""What a spreadsheet writes for a formula that has no value."""


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
    """Reads rows of one source by `rules`; `columns` are the names of its columns."""

    def __init__(self, source: str, columns: Sequence[str], rules: RowRules, processing: Processing) -> None:
        self._source = source
        self._columns = columns
        self._rules = rules
        self._processing = processing
        self._template = None
        if rules.format_prompt is not None:
            text = read_text(Path(rules.format_prompt)).strip()
            self._template = UserTemplate(text, f"data.format_prompt '{rules.format_prompt}'", "content")
        for name in ("prompt_key", "answer_key"):
            self.require_column(name)

    def require_column(self, name: str) -> None:
        """Raises `ConfigError` if the source lacks the column that the setting `data.<name>` names."""
        key = getattr(self._rules.cells, name)
        if not has_column(self._columns, key):
            raise ConfigError(
                f"data.{name} is '{key}', which {self._source} does not have. Its columns: {', '.join(self._columns)}"
            )

    def problem(self, number: int, row: Fields, source: ImageSource | None) -> Problem:
        """Returns the problem of the row `number`; `source` is where its images can be read again, if they can."""
        keys = self._rules.cells
        cells = read_cells(row, keys)
        *history, last = self._turns(cells)
        videos = self._videos(cells)
        images = decoded_images(cells.images, keys.image_key, self._rules.images)
        teacher_key = keys.teacher_image_key
        teacher_images = decoded_images(cells.teacher_images, teacher_key, self._rules.images)
        if videos:  # which are sent by value, and the images with them
            source = None
        keys_read = (keys.answer_key, keys.image_key, keys.video_key, teacher_key)
        teacher_source = None if source is None else replace(source, column=teacher_key)
        return Problem(
            prompt_id=str(number),
            text=last.text,
            history=tuple(history),
            images=images,
            ground_truth=cells.answer,
            solution=cells.solution,
            columns={name: without_spelling(value) for name, value in row.items() if name not in keys_read},
            videos=videos,
            image_source=source,
            teacher_images=teacher_images,
            teacher_image_source=teacher_source,
        )

    def _turns(self, cells: Cells) -> list[Turn]:
        """Returns the prompt's turns, with the format prompt applied to the last one."""
        *history, last = cells.turns
        if self._template is not None:
            last = Turn(last.role, self._template.render(content=last.text))
        return [*history, last]

    def _videos(self, cells: Cells) -> tuple[Video, ...]:
        videos: list[Video] = []
        for value in cells.videos:
            with located(f"column '{self._rules.cells.video_key}'"):
                video = load_video(
                    value,
                    self._rules.images,
                    fps=self._rules.video_fps,
                    factor=self._processing.reader.video_factor,
                )
            videos.append(video)
        return tuple(videos)

    def measure(self, row: Fields) -> RowMeasure:
        """Measures the prompt and its images. Videos are decoded completely, the only way to find damaged ones.

        Raises `DataError` for a row that cannot be used.
        """
        cells = read_cells(row, self._rules.cells)
        self._require_texts(cells)
        turns = self._turns(cells)
        self._require_marks(cells, "".join(turn.text for turn in turns), row)
        self._require_lengths(cells)
        try:
            visual = self._visual_tokens(cells)
        except DataError as error:
            raise DataError(f"{error}{self._place_of_images(cells)}") from error
        # The text has one placeholder token per image and video, which their own tokens replace.
        template = self._template_ids(turns, with_videos=bool(cells.videos))
        length = visual + len(template) - len(cells.images) - len(cells.videos)
        return RowMeasure(
            length=length, num_images=len(cells.images), num_videos=len(cells.videos), visual_tokens=visual
        )

    def _place_of_images(self, cells: Cells) -> str:
        """Returns a hint where a file is that the row names and that is missing; empty if none is, or nobody knows."""
        values = [*cells.images, *cells.teacher_images, *cells.videos]
        image_dir = self._rules.images.image_dir
        path = first_missing(values, image_dir)
        return "" if path is None else place_of_missing(path, image_dir, self._folders_beside)

    @cached_property
    def _folders_beside(self) -> list[Path]:
        data = find_path(self._source) or find_path(split_source(self._source)[0])
        return [] if data is None else folders_beside(data)

    def _require_texts(self, cells: Cells) -> None:
        """Raises `DataError` if the question or the answer is empty."""
        if not cells.turns[-1].text.strip():
            raise DataError(f"column '{self._rules.cells.prompt_key}' is empty")
        if not cells.answer:
            raise DataError(
                f"column '{self._rules.cells.answer_key}' is empty; a problem without an answer cannot be rewarded"
            )
        if cells.answer in _SHEET_FAULTS:
            raise DataError(
                f"column '{self._rules.cells.answer_key}' has {cells.answer}, which a spreadsheet writes for a faulty formula"
            )

    def _require_lengths(self, cells: Cells) -> None:
        """Raises `DataError` for a text that is too long for a tokenizer."""
        for name, text in cells.texts:
            if len(text) > self._rules.most_characters:
                raise DataError(
                    f"the {name} has {len(text):,} characters; accepted: at most {self._rules.most_characters:,}, or "
                    f"{CHARACTERS_PER_TOKEN} times data.max_prompt_length"
                )

    def _require_marks(self, cells: Cells, text: str, row: Fields) -> None:
        """Raises `DataError` if the prompt's marks and the row's images and videos do not agree."""
        keys = self._rules.cells
        if cells.teacher_images and len(cells.teacher_images) != len(cells.images):
            raise DataError(
                f"column '{keys.teacher_image_key}' has {len(cells.teacher_images)} images for the teacher, and the row has "
                f"{len(cells.images)}; they must agree"
            )
        if IMAGE_MARK in text and not cells.images and not has_column(row, keys.image_key):
            self.require_column("image_key")
        for mark, values, name in ((IMAGE_MARK, cells.images, "images"), (VIDEO_MARK, cells.videos, "videos")):
            is_mark = bool(values) or mark == IMAGE_MARK  # without videos it is plain text
            if is_mark and text.count(mark) != len(values):
                remedy = _remedy_of_marks(text, cells.images) if mark == IMAGE_MARK else ""
                raise DataError(
                    f"{text.count(mark)} '{mark}' in the text but {len(values)} {name}; they must agree{remedy}"
                )

    def _visual_tokens(self, cells: Cells) -> int:
        """Returns the number of tokens of the images and videos, all of which are checked."""
        keys = self._rules.cells
        sizes = checked_sizes(cells.images, keys.image_key, self._rules.images)
        teacher_sizes = checked_sizes(cells.teacher_images, keys.teacher_image_key, self._rules.images)
        if not sizes and not cells.videos:
            return 0
        reader = self._processing.reader
        tokens = sum(reader.num_tokens(size) for size in sizes)
        tokens += sum(reader.num_video_tokens(video) for video in self._videos(cells))
        for size in teacher_sizes:  # which are not in the prompt, but must be readable
            reader.num_tokens(size)
        return tokens

    def _template_ids(self, turns: Sequence[Turn], *, with_videos: bool) -> list[int]:
        *history, last = turns
        try:
            return self._processing.template_ids(last.text, with_videos=with_videos, history=history)
        except BaseException as error:
            if type(error).__name__ != "PanicException":  # of the tokenizer's Rust code; it is no Exception
                raise
            raise DataError(f"the prompt cannot be tokenised ({error})") from error


def _remedy_of_marks(text: str, images: Sequence[object]) -> str:
    """Returns what to write if a prompt has another number of marks than its row has images."""
    if text.count(IMAGE_MARK) > len(images):
        return ". Several images are a list, in a cell of text as JSON" if images else ""
    foreign = next((mark for mark in _FOREIGN_MARKS if mark in text), None)
    if foreign is not None:
        return f". Write {IMAGE_MARK} in place of {foreign}"
    return ". data.image_marks=front puts missing marks in front"
