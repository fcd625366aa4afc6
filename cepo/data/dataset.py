"""Reads problems, checks every row before heavy work begins, combines training sets, and decides their order."""

from __future__ import annotations

import logging
import random
import zlib
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any, cast

import numpy

from cepo.config.schema import DataConfig
from cepo.data.contexts import Problem, UserTemplate
from cepo.data.reading import read_row, read_source, without_decoding
from cepo.data.visuals import decoded_images, limited_size, listed, load_video, verify_image
from cepo.errors import ConfigError, DataError
from cepo.foreign_files import read_text
from cepo.models.inputs import ImageSource, Turn, Video
from cepo.models.processing import IMAGE_MARK, VIDEO_MARK, Processing
from cepo.progress import shown
from cepo.trees import Fields, is_mapping

logger = logging.getLogger(__name__)

ROLES = ("system", "user", "assistant")
_ACCEPTED = "accepted: a list of messages {role, content}, of which the last is the user's"


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


class ProblemSet(Sequence[Problem]):
    """Holds the usable rows of one source. Images are decoded on access and never kept.

    `rows` are converted rows of the source; by default it is read. Raises `ConfigError` if the source does not exist or
    lacks a column, and `DataError` if a row is bad or overlong and not to be skipped, or no row is usable.
    """

    def __init__(self, source: str, config: DataConfig, processing: Processing, *, rows: Any = None) -> None:
        self._source, self._config, self._processing = source, config, processing
        self._rows_are_given = rows is not None
        self._template = None
        if config.format_prompt is not None:
            text, origin = read_text(Path(config.format_prompt)).strip(), f"data.format_prompt '{config.format_prompt}'"
            self._template = UserTemplate(text, origin, "content")
        read = read_source(source, text_columns=(config.prompt_key, config.answer_key)) if rows is None else rows
        self._rows = without_decoding(read)
        for name in ("prompt_key", "answer_key"):
            self.require_column(name)
        usable = self._usable_rows()
        self._usable = list(usable)
        images, videos = zip(*((each.num_images, each.num_videos) for each in usable.values()), strict=True)
        self.most_visuals: tuple[int, int] = max(images), max(videos)
        if self.skipped:
            logger.warning("%s: %d rows are used, left out: %s", source, len(self._usable), dict(self.skipped))

    def require_column(self, name: str) -> None:
        """Raises `ConfigError` if the source lacks the column that the setting `data.<name>` names."""
        key = getattr(self._config, name)
        if key not in self._rows.column_names:
            raise ConfigError(
                f"data.{name} is '{key}', which {self._source} does not have. Its columns: "
                f"{', '.join(self._rows.column_names)}"
            )

    def __len__(self) -> int:
        return len(self._usable)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[cast("slice[int, int, int]", index)]]
        number = self._usable[cast(int, index)]
        row, config = dict(self._rows[number]), self._config
        *history, last = self._turns(row)
        videos = tuple(self._video(value) for value in listed(row, config.video_key))
        is_known = not (videos or self._rows_are_given)
        source = ImageSource(data=self._source, row=number)
        images, shown = (decoded_images(row, config, column) for column in ("", config.teacher_image_key))
        answer = plain_text(row.pop(config.answer_key)).strip()
        for key in (config.image_key, config.video_key, config.teacher_image_key):
            row.pop(key, None)
        return Problem(
            prompt_id=str(number),
            text=last.text,
            history=tuple(history),
            images=images,
            ground_truth=answer,
            solution=_solution(row.get(config.solution_key)),
            columns=row,
            videos=videos,
            image_source=source if is_known else None,
            teacher_images=shown,
            teacher_image_source=replace(source, column=config.teacher_image_key) if is_known else None,
        )

    def content(self) -> str:
        """Describes the usable rows by their number and a CRC-32 of prompts and answers, without images."""
        texts = self._rows.select_columns([self._config.prompt_key, self._config.answer_key]).select(self._usable)
        total = 0
        for row in texts:
            total = zlib.crc32(repr(tuple(row.values())).encode("utf-8", "surrogatepass"), total)
        return f"{len(self)} rows, CRC-32 {total:08x}"

    def require_solutions(self) -> None:
        """Raises `ConfigError` if a usable row has no worked solution."""
        key, names = self._config.solution_key, self._rows.column_names
        missing: Sequence[int] = self._usable
        if key in names:
            solutions = self._rows.select_columns(key)
            missing = [row for row in self._usable if _solution(solutions[row][key]) is None]
        if missing:
            raise ConfigError(
                f"algorithm.positive.source=solution shows worked solutions, but {len(missing)} of {len(self)} rows of "
                f"{self._source} have none ({'' if key in names else 'no '}column '{key}'), the first of them row "
                f"{missing[0]}; name the column in data.solution_key (there are "
                f"{', '.join(names)}), or choose solution_or_answer or another source"
            )

    def image_probe(self) -> ImageSource | None:
        """Returns a row with images, with which other nodes test whether they can read them; None if there is none.

        Nothing is decoded. Rows with videos are skipped, because their content is sent by value.
        """
        most_images, _ = self.most_visuals
        for number in self._usable if most_images and not self._rows_are_given else ():
            row = self._rows[number]
            if listed(row, self._config.image_key) and not listed(row, self._config.video_key):
                return ImageSource(data=self._source, row=number)
        return None

    def _turns(self, row: Fields) -> list[Turn]:
        """Returns the prompt's turns, with the format prompt applied to the last one."""
        *history, last = read_turns(row[self._config.prompt_key])
        if self._template is not None:
            last = Turn(last.role, self._template.render(content=last.text))
        return [*history, last]

    def _video(self, value: object) -> Video:
        return load_video(value, self._config, factor=self._processing.reader.video_factor)

    def _usable_rows(self) -> dict[int, RowMeasure]:
        """Returns the measures of the rows that can be used by number, and counts in `skipped` those left out.

        A row takes about 1 ms with an image.
        """
        config, limit = self._config, self._config.max_prompt_length
        usable: dict[int, RowMeasure] = {}
        overlong: list[RowMeasure] = []
        for number in shown(range(len(self._rows)), f"checking {self._source}", len(self._rows)):
            where = f"{self._source}, row {number}"
            try:
                measured = self._measure(read_row(self._rows, number))
            except DataError as error:
                if not config.skip_bad_rows:
                    raise DataError(f"{where}: {error}. data.skip_bad_rows=true leaves such rows out") from error
                logger.warning("%s is left out: %s", where, error)
                continue
            if measured.length <= limit:
                usable[number] = measured
            elif config.filter_overlong_prompts:
                overlong.append(measured)
            else:
                raise DataError(
                    f"{where}: the prompt has {measured}; data.max_prompt_length is {limit}. "
                    "data.filter_overlong_prompts=true leaves such rows out"
                )
        self.skipped = +Counter(bad=len(self._rows) - len(usable) - len(overlong), overlong=len(overlong))
        if overlong and not usable:
            shortest, longest = (choose(overlong, key=lambda measured: measured.length) for choose in (min, max))
            raise DataError(
                f"{self._source}: all of its {len(overlong)} prompts are overlong: they have {shortest.length} to "
                f"{longest}, and data.max_prompt_length={limit}. Raise it to {longest.length} for all of them"
            )
        if not usable:
            why = " that can be used; the warnings above name each bad one" if self.skipped else ""
            raise DataError(f"{self._source} has no row{why}")
        return usable

    def _measure(self, row: Fields) -> RowMeasure:
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
        sizes = [verify_image(value, config.image_dir, hosts=config.image_hosts) for value in (*images, *shown)]
        visual = 0
        if sizes or videos:
            reader, limits = self._processing.reader, (config.min_pixels, config.max_pixels)
            visual += sum(reader.num_tokens(limited_size(size, *limits)) for size in sizes[: len(images)])
            visual += sum(reader.num_video_tokens(self._video(value)) for value in videos)
        # The text has one placeholder token per image and video, which their own tokens replace.
        template = self._processing.template_ids(last.text, with_videos=bool(videos), history=history)
        length = visual + len(template) - len(images) - len(videos)
        return RowMeasure(length=length, num_images=len(images), num_videos=len(videos), visual_tokens=visual)


def _solution(value: object) -> str | None:
    return None if value is None or not str(value).strip() else str(value)


class TrainingProblems:
    """Concatenates the usable rows of one or several sources. Of several, a problem's id is `<source number>:<row>`.

    Without `data.train_weights` all rows form one set: an epoch uses each row once, whatever its source.
    """

    def __init__(self, parts: Sequence[ProblemSet], config: DataConfig) -> None:
        self._parts, self._config = parts, config
        self._ends = list(accumulate(len(part) for part in parts))
        self._begins = [0, *self._ends]
        self.most_visuals = most_visuals(*parts)

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Problem:
        part = bisect_right(self._ends, index)
        problem = self._parts[part][index - self._begins[part]]
        if len(self._parts) == 1:
            return problem
        return replace(problem, prompt_id=f"{part}:{problem.prompt_id}")

    def indices(self, step: int, batch_size: int) -> list[int]:
        """Returns the problems of the 0-based `step`, which depend only on the step and `data.seed`.

        Without weights, each pass over the data has its own order.
        """
        weights, shuffle, seed = self._config.train_weights, self._config.shuffle, self._config.seed
        if weights is not None and len(self._parts) > 1:
            sizes = [len(part) for part in self._parts]
            chosen = weighted_indices(
                step, sizes=sizes, weights=weights, batch_size=batch_size, shuffle=shuffle, seed=seed
            )
            return [self._begins[part] + index for part, index in chosen]
        per_epoch = self.steps_per_epoch(batch_size)
        assert per_epoch > 0, "a batch must not be larger than the problem set; checked when the run is put together"
        epoch, number = divmod(step, per_epoch)
        order = shuffled(len(self), f"{seed}/{epoch}") if shuffle else range(len(self))
        return [*order[number * batch_size : (number + 1) * batch_size]]

    def steps_per_epoch(self, batch_size: int) -> int:
        return len(self) // batch_size  # an incomplete last batch is dropped, as in EasyR1

    def content(self) -> str:
        return "; ".join(part.content() for part in self._parts)

    def image_probe(self) -> ImageSource | None:
        """Returns the first source's probe that is not None."""
        return next(filter(None, (part.image_probe() for part in self._parts)), None)


def read_training_sets(config: DataConfig, processing: Processing, *, with_solutions: bool = False) -> TrainingProblems:
    """Reads all of `data.train_files` and checks every row.

    Raises as `ProblemSet`, for fewer problems than a step needs, and `with_solutions` for a problem that has none.
    """
    parts: list[ProblemSet] = []
    for source in config.train_sources:
        logger.info("reading and checking %s", source)
        part = ProblemSet(source, config, processing)
        if config.teacher_image_key is not None:
            part.require_column("teacher_image_key")
        if with_solutions:
            part.require_solutions()
        parts.append(part)
    sizes = [len(part) for part in parts]
    if sum(sizes) < config.rollout_batch_size:
        raise ConfigError(
            f"data.rollout_batch_size is {config.rollout_batch_size}, but {config.train_files} has {sum(sizes)} usable "
            "problems; accepted: at most as many"
        )
    weights = config.train_weights or sizes
    for source, size, weight in zip(config.train_sources, sizes, weights, strict=True) if len(parts) > 1 else ():
        logger.info("plan: %.1f %% of the prompts from %s (%d problems)", 100 * weight / sum(weights), source, size)
    return TrainingProblems(parts, config)


@lru_cache(maxsize=16)
def shuffled(size: int, seed: str) -> tuple[int, ...]:
    """Returns the numbers below `size` in the order of this seed."""
    order = list(range(size))
    random.Random(seed).shuffle(order)
    return tuple(order)


def weighted_indices(
    step: int, *, sizes: Sequence[int], weights: Sequence[float], batch_size: int, shuffle: bool, seed: int
) -> list[tuple[int, int]]:
    """Returns pairs (set, index in the set) for the 0-based `step`, with sets drawn in proportion to `weights`.

    Each set has its own epochs, with every problem once per epoch and a new order for each. As in `datasets`'
    `interleave_datasets`, sets are drawn by numpy's generator; its first numbers do not depend on how many are drawn.
    """
    shares = [weight / sum(weights) for weight in weights]
    drawn = numpy.random.default_rng(seed).choice(len(sizes), size=(step + 1) * batch_size, p=shares)
    counts: list[int] = numpy.bincount(drawn[: step * batch_size], minlength=len(sizes)).tolist()
    chosen: list[tuple[int, int]] = []
    parts: list[int] = drawn[step * batch_size :].tolist()
    for part in parts:
        epoch, index = divmod(counts[part], sizes[part])
        counts[part] += 1
        chosen.append((part, shuffled(sizes[part], f"{seed}/{part}/{epoch}")[index] if shuffle else index))
    return chosen


def most_visuals(*problem_sets: ProblemSet | TrainingProblems | None) -> tuple[int, int]:
    """Returns the largest numbers of images and videos in a prompt, which the engine must accept; ignores None."""
    images, videos = zip(*(problems.most_visuals for problems in problem_sets if problems is not None), strict=True)
    return max(images), max(videos)


def plain_text(value: object) -> str:
    """Returns a cell as text: empty for None, and whole numbers without the `.0` of a float column."""
    if value is None:
        return ""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def read_turns(prompt: Any) -> list[Turn]:
    """Returns the turns of a cell of the prompt column, which holds text or messages. The last turn is the question.

    A message's content is text or a list of parts: `{type: text, text: ...}`, `{type: image}` and `{type: video}`.
    Image and video parts stand for the row's images and videos in order. Anything else raises `DataError`.
    """
    if not isinstance(prompt, list | tuple):
        return [Turn("user", plain_text(prompt))]
    if not prompt:
        raise DataError(f"the prompt has no message; {_ACCEPTED}")
    turns = [_turn(message, number) for number, message in enumerate(cast("Sequence[object]", prompt))]
    if turns[-1].role != "user":
        raise DataError(f"the last message is the {turns[-1].role}'s; {_ACCEPTED}")
    return turns


def _turn(message: object, number: int) -> Turn:
    given: Fields = message if is_mapping(message) else {}
    content: object = given.get("content")
    if "role" not in given or not isinstance(content, str | list | tuple):
        raise DataError(f"message {number} has no role or no content of text or parts: {message!r:.200}; {_ACCEPTED}")
    if given["role"] not in ROLES:
        raise DataError(f"message {number} has the role {given['role']!r}; accepted: {', '.join(ROLES)}")
    parts = cast("Sequence[object]", [{"type": "text", "text": content}] if isinstance(content, str) else content)
    return Turn(given["role"], "".join(_part(part, number) for part in parts))


def _part(part: object, number: int) -> str:
    given: Fields = {key: value for key, value in part.items() if value is not None} if is_mapping(part) else {}
    kind = given.get("type")
    if kind == "text" and isinstance(given.get("text"), str):
        return given["text"]
    if kind in ("image", "video") and len(given) == 1:
        return IMAGE_MARK if kind == "image" else VIDEO_MARK
    raise DataError(
        f"message {number} has the part {str(given or part)[:200]}; accepted: {{type: text, text: ...}}, {{type: image}} and "
        "{type: video}, whose images and videos stand in the row's columns data.image_key and data.video_key"
    )
