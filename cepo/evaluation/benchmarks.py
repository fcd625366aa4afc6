"""Knows the format of each benchmark: by which columns it is recognised, how its rows are read, which scores it has."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from cepo.data.row_settings import CellRules
from cepo.data.tables import Rows, read_source
from cepo.errors import ConfigError, DataError
from cepo.evaluation import formats
from cepo.evaluation.benchmark_names import TITLES, NamedSource
from cepo.evaluation.lmms import LMMS_TASKS, SYSTEM_PROMPT
from cepo.evaluation.statistics import Row, hallusionbench_scores, wemath_scores
from cepo.files.trees import Fields, Tree, is_list
from cepo.models.text_codec import IMAGE_MARK

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """The format of one benchmark.

    A source of it has all of `columns`. A source that is not named as a benchmark is taken for this one if it also has
    all of `only_here`, columns that together no other public data set has; with None it never is, because its columns
    are common. A source that is not named must not have the columns `without`.
    """

    name: str
    columns: frozenset[str]
    only_here: frozenset[str] | None
    images: tuple[str, ...]  # columns of the image, of which the first that a row has counts
    convert: Callable[[Fields], Tree]  # see `cepo.evaluation.formats`
    family: str = ""  # a further name, which several formats share
    without: frozenset[str] = frozenset()
    needs_image: bool = True
    has_variants: bool = False  # rows of one cluster are variants of one question
    scores: Callable[[Sequence[Row]], Tree] | None = None  # of groups of rows

    @property
    def title(self) -> str:
        return TITLES[self.name]

    def reads(self, columns: Iterable[str]) -> bool:
        return self.columns <= set(columns)

    def is_meant_by(self, columns: Iterable[str]) -> bool:
        """Returns whether a source with these columns can be nothing else."""
        if self.only_here is None or self.without & set(columns):
            return False
        return self.columns | self.only_here <= set(columns)


_SPACE_AROUND_IMAGE = re.compile(rf"\s*{IMAGE_MARK}\s*")
_QUESTION = frozenset({"question", "answer"})
_JMMMU = frozenset({"image_1_license"})
"""A column of JMMMU and JMMMU-Pro, which else have the columns of MMMU and MMMU-Pro."""
_MMMU_PRO = frozenset({"id", "options", "answer", "subject"})
BENCHMARKS = (
    Benchmark(
        name="dynamath",
        columns=frozenset({"id", "question", "ground_truth", "answer_type"}),
        only_here=frozenset({"decoded_image"}),
        images=("decoded_image", "image"),
        convert=formats.dynamath,
        has_variants=True,
    ),
    Benchmark(
        name="hallusionbench",
        columns=frozenset({"category", "subcategory", "set_id", "figure_id", "question_id", "question", "gt_answer"}),
        only_here=frozenset(),
        images=("image",),
        convert=formats.hallusionbench,
        needs_image=False,
        scores=hallusionbench_scores,
    ),
    Benchmark(
        name="logicvista",
        columns=_QUESTION,
        only_here=None,
        images=("image",),
        convert=formats.logicvista,
    ),
    Benchmark(
        name="mathverse",
        columns=_QUESTION | {"problem_index", "problem_version", "question_type"},
        only_here=frozenset({"sample_index"}),
        images=("image",),
        convert=formats.mathverse,
        needs_image=False,
    ),
    Benchmark(
        name="mathvision",
        columns=_QUESTION | {"options"},
        only_here=frozenset({"decoded_image", "level", "subject"}),
        images=("decoded_image", "image"),
        convert=formats.mathvision,
    ),
    Benchmark(
        name="mathvista",
        columns=_QUESTION | {"question_type", "answer_type", "choices"},
        only_here=frozenset({"pid", "precision"}),
        images=("decoded_image", "image"),
        convert=formats.mathvista,
    ),
    Benchmark(
        name="mmmu",
        columns=_QUESTION | {"options", "question_type", "image_1"},
        only_here=frozenset({"id", "img_type", "topic_difficulty", "subfield"}),
        without=_JMMMU,
        images=(),
        convert=formats.mmmu,
    ),
    Benchmark(
        name="mmmu_pro",
        columns=_MMMU_PRO | {"question", "image_1"},
        only_here=frozenset({"img_type", "topic_difficulty"}),
        without=_JMMMU | {"question_type"},
        images=(),
        convert=formats.mmmu_pro,
    ),
    Benchmark(
        name="mmmu_pro_vision",
        family="mmmu_pro",
        columns=_MMMU_PRO | {"image"},
        only_here=None,
        images=("image",),
        convert=formats.mmmu_pro_vision,
    ),
    Benchmark(
        name="wemath",
        columns=_QUESTION | {"ID", "key", "option"},
        only_here=frozenset({"image_path"}),
        images=("image_path", "image"),
        convert=formats.wemath,
        scores=wemath_scores,
    ),
)


def opened(named: NamedSource, cells: CellRules) -> tuple[Rows, Benchmark | None]:
    """Reads the rows of a source, and returns them with their benchmark; None if they are the user's own.

    A source is a benchmark's if it is named as one. Otherwise it is the user's own if it has the columns that
    `data.prompt_key` and `data.answer_key` name. Otherwise its columns must identify one benchmark. Raises `ConfigError`
    if they do not, or lack a column of the named benchmark, and as `read_source`.
    """
    rows = read_source(named.source)
    columns = rows.column_names
    if named.name is not None:
        return rows, _format_of(named, columns)
    keys = [key.partition(".")[0] for key in (cells.prompt_key, cells.answer_key)]
    candidates = recognised(columns)
    if set(keys) <= set(columns):
        for benchmark in candidates:
            logger.info("%s is read by data.prompt_key, although %s:SOURCE exists", named.source, benchmark.name)
        return rows, None
    if len(candidates) == 1:
        logger.info("%s has the columns of %s", named.source, candidates[0].title)
        return rows, candidates[0]
    if candidates:
        meaning = f"those of {' and of '.join(benchmark.name for benchmark in candidates)}"
    else:
        meaning = "and they identify no benchmark"
    raise ConfigError(
        f"data={named.source} has no column data.prompt_key={cells.prompt_key} with data.answer_key={cells.answer_key}; its "
        f"columns are {', '.join(columns)}, {meaning}. For your own data, name its columns: data.prompt_key=COLUMN "
        f"data.answer_key=COLUMN data.image_key=COLUMN. For a benchmark, name it: NAME:{named.source} with one of "
        f"{', '.join(TITLES)}"
    )


def recognised(columns: Sequence[str]) -> list[Benchmark]:
    """Returns the benchmarks that alone are known to have these columns; several if they cannot be told apart."""
    return [benchmark for benchmark in BENCHMARKS if benchmark.is_meant_by(columns)]


def _format_of(named: NamedSource, columns: Sequence[str]) -> Benchmark:
    """Returns the format of the named benchmark that the columns have."""
    forms = [benchmark for benchmark in BENCHMARKS if named.name in (benchmark.name, benchmark.family)]
    for benchmark in forms:
        if benchmark.reads(columns):
            return benchmark
    missing = [", ".join(sorted(benchmark.columns - set(columns))) for benchmark in forms]
    raise ConfigError(
        f"data={named} does not have the columns of {named.name}; missing: {'; or '.join(missing)}. Its columns: "
        f"{', '.join(columns)}"
    )


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
            problems.append(
                _blank(benchmark, number) | {"problem": _turns("", has_system_prompt=False) if is_lmms else ""}
            )
    return problems


def _problem(row: Fields, benchmark: Benchmark, number: int, *, is_lmms: bool) -> Tree:
    problem = _blank(benchmark, number) | benchmark.convert(row)
    task = LMMS_TASKS[benchmark.name] if is_lmms else None
    text = problem["problem"] if task is None else task.prompt(row)
    if "images" in problem:
        if task is not None:
            text, problem["images"] = formats.with_images_in_place(text, row)
            text = _SPACE_AROUND_IMAGE.sub(IMAGE_MARK, text).strip()  # its messages have a part for each text and image
    else:
        problem["images"] = _images(row, benchmark)
        if text.count(IMAGE_MARK) != len(problem["images"]):
            text = IMAGE_MARK * len(problem["images"]) + text.replace(IMAGE_MARK, "")
    if task is None:
        return problem | {"problem": text}
    return problem | {"problem": _turns(text, has_system_prompt=task.has_system_prompt)}


def _turns(text: str, *, has_system_prompt: bool) -> list[Tree]:
    user = {"role": "user", "content": text}
    return [{"role": "system", "content": SYSTEM_PROMPT}, user] if has_system_prompt else [user]


def _images(row: Fields, benchmark: Benchmark) -> list[Any]:
    """Returns the images of the first column that has any."""
    for column in benchmark.images:
        value = row.get(column)
        values = value if is_list(value) else [value]
        images = [image for image in values if image is not None and image != ""]
        if images:
            return images
    if benchmark.needs_image:
        raise DataError(f"it has no image (column {' or '.join(benchmark.images)})")
    return []


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
        "groups": dict[str, str](),
    }
