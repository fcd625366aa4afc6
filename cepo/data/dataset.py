"""Reads problems from a hub name, a file or a folder and checks every row before heavy work begins."""

from __future__ import annotations

import logging
import random
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, cast

from cepo.config.schema import DataConfig
from cepo.data.hints import UserTemplate, template_text
from cepo.data.images import decoded_images, limited_size, listed, verify_image
from cepo.data.reading import read_source, without_decoding
from cepo.data.row_checks import RowMeasure, check_rows, why_none_is_usable
from cepo.data.videos import FrameRules, load_video
from cepo.errors import ConfigError, DataError
from cepo.models.inputs import ImageSource, Turn, Video
from cepo.models.processing import IMAGE_MARK, VIDEO_MARK, Processing
from cepo.trees import Fields

if TYPE_CHECKING:
    from PIL.Image import Image

logger = logging.getLogger(__name__)

ROLES = ("system", "user", "assistant")
_ACCEPTED = "accepted: a list of messages {role, content}, of which the last is the user's"


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One row of the data, prepared for prompts.

    Attributes:
        prompt_id: the row number in the source; unchanged by filtering and shuffling.
        text: the user's text (of a conversation, the last one) after the format prompt, with one `<image>` per image
            and one `<video>` per video.
        images: decoded RGB images.
        videos: the chosen frames of each video.
        ground_truth: the reference answer as written in the data.
        solution: the worked solution; None if the dataset has none.
        columns: the row's other columns, for reward functions.
        history: the turns before `text` if the prompt is a conversation.
        image_source: where `images` can be read again; None for rows with videos and for rows not read from a source.
        teacher_images: the images that teachers see instead of `images`, as many; empty if they see the same.
        teacher_image_source: as `image_source`, of `teacher_images`.
    """

    prompt_id: str
    text: str
    images: tuple[Image, ...] = field(repr=False)
    ground_truth: str
    solution: str | None
    columns: dict[str, Any] = field(repr=False)
    image_source: ImageSource | None = None
    teacher_images: tuple[Image, ...] = field(default=(), repr=False)
    teacher_image_source: ImageSource | None = None
    videos: tuple[Video, ...] = field(default=(), repr=False)
    history: tuple[Turn, ...] = ()


class ProblemSet(Sequence[Problem]):
    """Holds the usable rows of one source. Images are decoded on access and never kept.

    Args:
        rows: converted rows of the source; None reads the rows from the source.

    Raises:
        ConfigError: the source does not exist or lacks a column.
        DataError: a row is bad or overlong and the settings do not skip such rows, or no row is usable.
    """

    def __init__(self, source: str, config: DataConfig, processing: Processing, *, rows: Any = None) -> None:
        self._source, self._config, self._processing = source, config, processing
        self._rows_are_given = rows is not None
        self._template = _format_template(config.format_prompt)
        self._rows = read_source(source, text_columns=(config.prompt_key, config.answer_key)) if rows is None else rows
        for key, name in ((config.prompt_key, "prompt_key"), (config.answer_key, "answer_key")):
            if key not in self._rows.column_names:
                raise ConfigError(
                    f"data.{name} is '{key}', which {source} does not have. Its columns: {', '.join(self._rows.column_names)}"
                )
        self._rows = without_decoding(self._rows)
        checks = check_rows(self._rows, source=source, config=config, measure=self._measure)
        self.skipped = Counter(
            {name: len(rows) for name, rows in (("bad", checks.bad), ("overlong", checks.overlong)) if rows}
        )
        self.most_images, self.most_videos = checks.most_images, checks.most_videos
        self._usable = checks.usable
        if not self._usable:
            raise DataError(why_none_is_usable(checks, source, config))
        if self.skipped:
            logger.warning("%s: %d rows are used, left out: %s", source, len(self._usable), dict(self.skipped))

    def __len__(self) -> int:
        return len(self._usable)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[cast("slice[int, int, int]", index)]]
        row_number: int = self._usable[cast(int, index)]
        row = dict(self._rows[row_number])
        config = self._config
        images, shown = decoded_images(row, config), decoded_images(row, config, config.teacher_image_key)
        videos = tuple(self._video(value) for value in listed(row, config.video_key))
        (*history, last), answer = self._turns(row), plain_text(row.pop(config.answer_key)).strip()
        for key in (config.image_key, config.video_key, config.teacher_image_key):
            row.pop(key, None)
        solution = row.get(config.solution_key)
        return Problem(
            prompt_id=str(row_number),
            text=last.text,
            history=tuple(history),
            images=images,
            ground_truth=answer,
            solution=None if solution is None or not str(solution).strip() else str(solution),
            columns=row,
            videos=videos,
            image_source=self._image_source(row_number, has_videos=bool(videos)),
            teacher_images=shown,
            teacher_image_source=self._image_source(
                row_number, has_videos=bool(videos), column=config.teacher_image_key
            ),
        )

    def __iter__(self) -> Iterator[Problem]:
        return (self[index] for index in range(len(self)))

    def indices(self, step: int, batch_size: int) -> list[int]:
        """Returns the problems of the 0-based `step`, which depend only on the step and `data.seed`."""
        config = self._config
        return problem_indices(
            step, num_problems=len(self), batch_size=batch_size, shuffle=config.shuffle, seed=config.seed
        )

    def content(self) -> str:
        """Describes the usable rows by their number and a CRC-32 of prompts and answers, without images."""
        texts = self._rows.select_columns([self._config.prompt_key, self._config.answer_key]).select(self._usable)
        total = 0
        for row in texts:
            total = zlib.crc32(repr(tuple(row.values())).encode("utf-8", "surrogatepass"), total)
        return f"{len(self)} rows, CRC-32 {total:08x}"

    def require_solutions(self, setting: str) -> None:
        """Checks that every usable row has a worked solution, because `setting` shows it.

        Raises:
            ConfigError: the column is missing, or a row has no solution.
        """
        key = self._config.solution_key
        remedy = "name the column in data.solution_key, or choose solution_or_answer or another source"
        if key not in self._rows.column_names:
            raise ConfigError(
                f"{setting} shows worked solutions, but {self._source} has no column '{key}' (its columns: "
                f"{', '.join(self._rows.column_names)}); {remedy}"
            )
        solutions = self._rows.select_columns(key)
        missing = [row for row in self._usable if solutions[row][key] is None or not str(solutions[row][key]).strip()]
        if missing:
            raise ConfigError(
                f"{setting} shows worked solutions, but {len(missing)} of {len(self)} rows of {self._source} have none in "
                f"'{key}', the first of them row {missing[0]}; {remedy}"
            )

    def require_teacher_images(self) -> None:
        """Raises `ConfigError` if `data.teacher_image_key` names a column that the source lacks."""
        key = self._config.teacher_image_key
        if key is not None and key not in self._rows.column_names:
            raise ConfigError(
                f"data.teacher_image_key is '{key}', which {self._source} does not have. Its columns: "
                f"{', '.join(self._rows.column_names)}"
            )

    def image_probe(self) -> ImageSource | None:
        """Returns a row with which other nodes test whether they can read images, or None.

        The row has images if any usable row has. Nothing is decoded. Rows with videos are skipped, because their
        content is sent by value.
        """
        for row_number in self._usable if self.most_images else self._usable[:1]:
            row = self._rows[row_number]
            source = self._image_source(row_number, has_videos=bool(listed(row, self._config.video_key)))
            if source is not None and (listed(row, self._config.image_key) or not self.most_images):
                return source
        return None

    def _image_source(self, row_number: int, *, has_videos: bool, column: str | None = None) -> ImageSource | None:
        given = has_videos or self._rows_are_given
        return None if given else ImageSource(data=self._source, row=row_number, column=column)

    def _turns(self, row: Fields) -> list[Turn]:
        """Returns the prompt's turns, with the format prompt applied to the last one."""
        value = row[self._config.prompt_key]
        *history, last = read_conversation(value) if is_conversation(value) else [Turn("user", plain_text(value))]
        if self._template is not None:
            last = Turn(last.role, self._template.render(content=last.text))
        return [*history, last]

    def _video(self, value: object) -> Video:
        config = self._config
        rules = FrameRules(
            fps=config.video_fps,
            min_pixels=config.min_pixels,
            max_pixels=config.max_pixels,
            factor=self._processing.reader.video_factor,
        )
        return load_video(value, config.image_dir, rules)

    def _measure(self, row: Fields) -> RowMeasure:
        """Measures the prompt and its images. Videos are decoded completely, the only way to find damaged ones."""
        config = self._config
        for key, wrong, accepted in (
            (config.prompt_key, (dict, bytes), "text, a number, or a list of messages"),
            (config.answer_key, (list, dict, bytes), "text or a number"),
        ):
            if isinstance(row[key], wrong):
                raise DataError(f"column '{key}' holds a {type(row[key]).__name__}; accepted: {accepted}")
        prompt = row[config.prompt_key]
        if not (read_conversation(prompt)[-1].text if is_conversation(prompt) else plain_text(prompt)).strip():
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
        for value in shown:
            verify_image(value, config.image_dir, hosts=config.image_hosts)
        for mark, values, name in ((IMAGE_MARK, images, "images"), (VIDEO_MARK, videos, "videos")):
            if text.count(mark) and mark == IMAGE_MARK and config.image_key not in row:
                raise ConfigError(
                    f"data.image_key is '{config.image_key}', which {self._source} does not have, and its texts have '{mark}'. "
                    f"Its columns: {', '.join(map(str, row))}"
                )
            if text.count(mark) != len(values) and (values or mark == IMAGE_MARK):  # without videos it is plain text
                raise DataError(f"{text.count(mark)} '{mark}' in the text but {len(values)} {name}; they must agree")
        visual = 0
        for value in images:
            size = limited_size(
                verify_image(value, config.image_dir, hosts=config.image_hosts), config.min_pixels, config.max_pixels
            )
            visual += self._processing.reader.num_tokens(size)
        for value in videos:
            visual += self._processing.reader.num_video_tokens(self._video(value))
        # The text has one placeholder token per image and video, which their own tokens replace.
        template = self._processing.template_ids(last.text, with_videos=bool(videos), history=history)
        length = visual + len(template) - len(images) - len(videos)
        return RowMeasure(length=length, num_images=len(images), num_videos=len(videos), visual_tokens=visual)


def steps_per_epoch(num_problems: int, batch_size: int) -> int:
    """Returns the number of full batches in one pass; an incomplete last batch is dropped, as in EasyR1."""
    return num_problems // batch_size


def problem_indices(step: int, *, num_problems: int, batch_size: int, shuffle: bool, seed: int) -> list[int]:
    """Returns the indices of the problems of the 0-based `step`; each pass over the data has its own order."""
    per_epoch = steps_per_epoch(num_problems, batch_size)
    assert per_epoch > 0, "a batch must not be larger than the problem set; checked when the run is put together"
    epoch, number = divmod(step, per_epoch)
    order = list(range(num_problems))
    if shuffle:
        random.Random(f"{seed}/{epoch}").shuffle(order)
    return order[number * batch_size : (number + 1) * batch_size]


class _WithVisuals(Protocol):
    most_images: int
    most_videos: int


def most_visuals(*problem_sets: _WithVisuals | None) -> tuple[int, int]:
    """Returns the largest numbers of images and videos in a prompt, which the engine must accept; ignores None."""
    present = [problems for problems in problem_sets if problems is not None]
    return max(each.most_images for each in present), max(each.most_videos for each in present)


def plain_text(value: object) -> str:
    """Returns a cell as text: empty for None, and whole numbers without the `.0` of a float column."""
    if value is None:
        return ""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def _format_template(path: str | None) -> UserTemplate | None:
    if path is None:
        return None
    origin = f"data.format_prompt '{path}'"
    template = UserTemplate(template_text(path, origin, "with the variable content, or null").strip(), origin)
    if template.variables != {"content"}:
        raise ConfigError(
            f"{origin} uses the variables {', '.join(sorted(template.variables)) or '(none)'}; accepted: content, "
            "which stands for the question"
        )
    return template


def is_conversation(value: object) -> bool:
    """Returns whether a cell of the prompt column holds messages."""
    return isinstance(value, list | tuple)


def read_conversation(messages: Any) -> list[Turn]:
    """Returns the turns of a cell's messages. The last turn is the question.

    A message's content is text or a list of parts: `{type: text, text: ...}`, `{type: image}` and `{type: video}`.
    Image and video parts stand for the row's images and videos in order.

    Raises:
        DataError: there are no messages, a role or part is unknown, or the last turn is not the user's.
    """
    if not messages:
        raise DataError(f"the prompt has no message; {_ACCEPTED}")
    turns = [_turn(message, number) for number, message in enumerate(messages)]
    if turns[-1].role != "user":
        raise DataError(f"the last message is the {turns[-1].role}'s; {_ACCEPTED}")
    return turns


def _mapping(value: object) -> Fields | None:
    return cast("Fields", value) if isinstance(value, Mapping) else None


def _turn(message: object, number: int) -> Turn:
    given = _mapping(message)
    if given is None or given.get("content") is None or "role" not in given:
        found = type(message).__name__ if given is None else f"the keys {', '.join(map(str, given))}"
        raise DataError(f"message {number} has no role or no content (it is: {found}); {_ACCEPTED}")
    if given["role"] not in ROLES:
        raise DataError(f"message {number} has the role {given['role']!r}; accepted: {', '.join(ROLES)}")
    content: object = given["content"]
    if not isinstance(content, str | list | tuple):
        raise DataError(
            f"message {number} has a {type(content).__name__} as content; accepted: text or a list of parts"
        )
    parts: list[object] = [{"type": "text", "text": content}] if isinstance(content, str) else [*content]
    return Turn(given["role"], "".join(_part(part, number) for part in parts))


def _part(part: object, number: int) -> str:
    given = {key: value for key, value in (_mapping(part) or {}).items() if value is not None}
    kind = given.get("type")
    if kind == "text" and isinstance(given.get("text"), str):
        return given["text"]
    if kind in ("image", "video") and len(given) == 1:
        return IMAGE_MARK if kind == "image" else VIDEO_MARK
    raise DataError(
        f"message {number} has the part {str(given or part)[:200]}; accepted: {{type: text, text: ...}}, {{type: image}} and "
        "{type: video}, whose images and videos stand in the row's columns data.image_key and data.video_key"
    )
