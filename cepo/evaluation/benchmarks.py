"""The format of each benchmark: which columns it needs, and how its rows are read."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from cepo.data.row_settings import CellRules
from cepo.data.tables import Rows, read_source
from cepo.errors import ConfigError, DataError
from cepo.evaluation import formats
from cepo.evaluation.benchmark_names import TITLES, NamedSource
from cepo.evaluation.lmms import PROMPTS, SYSTEM_PROMPT
from cepo.files.trees import Fields, Tree, is_list
from cepo.models.text_codec import IMAGE_MARK

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """The format of one benchmark, whose sources have all of `columns`."""

    name: str
    columns: frozenset[str]
    images: tuple[str, ...]  # columns of the image, of which the first that a row has counts
    convert: Callable[[Fields], Tree]  # see `cepo.evaluation.formats`
    has_variants: bool = False  # rows of one cluster are variants of one question

    @property
    def title(self) -> str:
        return TITLES[self.name]


_SPACE_AROUND_IMAGE = re.compile(rf"\s*{IMAGE_MARK}\s*")
_QUESTION = frozenset({"question", "answer"})
BENCHMARKS = (
    Benchmark(
        name="dynamath",
        columns=frozenset({"id", "question", "ground_truth", "answer_type"}),
        images=("decoded_image", "image"),
        convert=formats.dynamath,
        has_variants=True,
    ),
    Benchmark(
        name="logicvista",
        columns=_QUESTION,
        images=("image",),
        convert=formats.logicvista,
    ),
    Benchmark(
        name="mathvision",
        columns=_QUESTION | {"options"},
        images=("decoded_image", "image"),
        convert=formats.mathvision,
    ),
    Benchmark(
        name="mathvista",
        columns=_QUESTION | {"question_type", "answer_type", "choices"},
        images=("decoded_image", "image"),
        convert=formats.mathvista,
    ),
    Benchmark(
        name="mmmu",
        columns=_QUESTION | {"options", "question_type", "image_1"},
        images=(),
        convert=formats.mmmu,
    ),
    Benchmark(
        name="wemath",
        columns=_QUESTION | {"ID", "key", "option"},
        images=("image_path", "image"),
        convert=formats.wemath,
    ),
)


def opened(named: NamedSource, cells: CellRules) -> tuple[Rows, Benchmark | None]:
    """Reads the rows of a source, and returns them with their benchmark; None if they are the user's own.

    A source is a benchmark's if it is named as one, and otherwise the user's own. Raises `ConfigError` if it lacks a column
    of the benchmark, or those that `data.prompt_key` and `data.answer_key` name, and as `read_source`.
    """
    rows = read_source(named.source)
    columns = rows.column_names
    if named.name is not None:
        return rows, _format_of(named, columns)
    keys = [key.partition(".")[0] for key in (cells.prompt_key, cells.answer_key)]
    if set(keys) <= set(columns):
        return rows, None
    raise ConfigError(
        f"data={named.source} has no column data.prompt_key={cells.prompt_key} with data.answer_key={cells.answer_key}; its "
        f"columns are {', '.join(columns)}. For your own data, name its columns: data.prompt_key=COLUMN "
        f"data.answer_key=COLUMN data.image_key=COLUMN. For a benchmark, name it: NAME:{named.source} with one of "
        f"{', '.join(TITLES)}"
    )


def _format_of(named: NamedSource, columns: Sequence[str]) -> Benchmark:
    """Returns the format of the named benchmark; raises `ConfigError` if a column of it is missing."""
    benchmark = next(benchmark for benchmark in BENCHMARKS if benchmark.name == named.name)
    missing = benchmark.columns - set(columns)
    if missing:
        raise ConfigError(
            f"data={named} does not have the columns of {named.name}; missing: {', '.join(sorted(missing))}. Its columns: "
            f"{', '.join(columns)}"
        )
    return benchmark


def converted(
    rows: Rows, benchmark: Benchmark, source: str, *, skip_bad_rows: bool, is_lmms: bool = False
) -> list[Tree]:
    """Converts rows of a benchmark, whose images are not decoded, to problems, one for each row.

    With `is_lmms` the prompts are those of lmms-eval. Raises `DataError` for a bad row, with its number. With
    `skip_bad_rows`, a warning names it, and its problem is empty, which `ProblemSet` counts as bad.
    """
    problems: list[Tree] = []
    for number in range(len(rows)):
        try:
            problems.append(_problem(rows[number], benchmark, number, is_lmms=is_lmms))
        except DataError as error:
            where = f"{source}, row {number}: it does not match the format of {benchmark.title}: {error}"
            if not skip_bad_rows:
                raise DataError(f"{where}. data.skip_bad_rows=true leaves such rows out") from error
            logger.warning("%s", where)
            problems.append(_blank(benchmark, number) | {"problem": _lmms_turns("") if is_lmms else ""})
    return problems


def _problem(row: Fields, benchmark: Benchmark, number: int, *, is_lmms: bool) -> Tree:
    problem = _blank(benchmark, number) | benchmark.convert(row)
    text = PROMPTS[benchmark.name](row) if is_lmms else problem["problem"]
    if "images" in problem:
        if is_lmms:
            text, problem["images"] = formats.with_images_in_place(text, row)
            text = _SPACE_AROUND_IMAGE.sub(IMAGE_MARK, text).strip()  # its messages have a part for each text and image
    else:
        problem["images"] = _images(row, benchmark)
        if text.count(IMAGE_MARK) != len(problem["images"]):
            text = IMAGE_MARK * len(problem["images"]) + text.replace(IMAGE_MARK, "")
    return problem | {"problem": _lmms_turns(text) if is_lmms else text}


def _lmms_turns(text: str) -> list[Tree]:
    return [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": text}]


def _images(row: Fields, benchmark: Benchmark) -> list[Any]:
    """Returns the images of the first column that has any; raises `DataError` if none has."""
    for column in benchmark.images:
        value = row.get(column)
        values = value if is_list(value) else [value]
        images = [image for image in values if image is not None and image != ""]
        if images:
            return images
    raise DataError(f"it has no image (column {' or '.join(benchmark.images)})")


def _blank(benchmark: Benchmark, number: int) -> Tree:
    return {
        "benchmark": benchmark.name,
        "problem": "",
        "answer": "",
        "answer_kind": "text",
        "choices": list[str](),
        "tolerance": None,
        "decimals": None,
        "alternatives": list[str](),
        "cluster": str(number),
        "categories": dict[str, list[str]](),
    }
