"""Problems from a hub name, a file or a folder, every row checked before any heavy work begins."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import StrictUndefined, TemplateError
from jinja2.meta import find_undeclared_variables
from jinja2.sandbox import SandboxedEnvironment

from cepo.config.schema import DataConfig
from cepo.data.images import limited_size, load_rgb, verify_image
from cepo.errors import ConfigError, DataError
from cepo.models.processing import IMAGE_MARK, Processing

if TYPE_CHECKING:
    from PIL.Image import Image

logger = logging.getLogger(__name__)

FORMATS = {".parquet": "parquet", ".json": "json", ".jsonl": "json", ".csv": "csv", ".arrow": "arrow"}


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One row, ready to be asked.

    Attributes:
        prompt_id: the row's place in its source, `<row number>`; stable under filtering and shuffling.
        text: the user's text after the format prompt, one `<image>` per picture.
        images: decoded RGB pictures.
        ground_truth: the reference answer as it stands in the data.
        solution: the worked solution, None where the dataset has none.
        columns: the row's other columns, for reward functions.
    """

    prompt_id: str
    text: str
    images: tuple[Image, ...] = field(repr=False)
    ground_truth: str
    solution: str | None
    columns: dict[str, Any] = field(repr=False)


class ProblemSet(Sequence[Problem]):
    """The usable rows of one source; pictures are decoded on access, never kept.

    Raises:
        ConfigError: the source does not exist or lacks a column.
        DataError: a bad row, unless `data.skip_bad_rows`, or no usable row at all.
    """

    def __init__(self, source: str, config: DataConfig, processing: Processing) -> None:
        self._config, self._processing = config, processing
        self._template = _format_template(config.format_prompt)
        self._rows = read_source(source)
        for key, name in ((config.prompt_key, "prompt_key"), (config.answer_key, "answer_key")):
            if key not in self._rows.column_names:
                raise ConfigError(
                    f"data.{name} is '{key}', which {source} does not have. Its columns: {', '.join(self._rows.column_names)}"
                )
        self._rows = _without_decoding(self._rows, config.image_key)
        self.skipped: Counter[str] = Counter()
        self.most_images = 0
        self._usable = self._check_rows(source)

    def __len__(self) -> int:
        return len(self._usable)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        row_number = self._usable[index]
        row = dict(self._rows[row_number])
        config = self._config
        images = tuple(
            load_rgb(value, config.image_dir, config.min_pixels, config.max_pixels) for value in self._images(row)
        )
        text, answer = self._text(row), str(row.pop(config.answer_key)).strip()
        row.pop(config.image_key, None)
        solution = row.get(config.solution_key)
        return Problem(
            prompt_id=str(row_number),
            text=text,
            images=images,
            ground_truth=answer,
            solution=None if solution is None else str(solution),
            columns=row,
        )

    def __iter__(self) -> Iterator[Problem]:
        return (self[index] for index in range(len(self)))

    def _text(self, row: dict[str, Any]) -> str:
        question = str(row[self._config.prompt_key])
        return question if self._template is None else self._template.render(content=question)

    def _images(self, row: dict[str, Any]) -> list[Any]:
        value = row.get(self._config.image_key)
        if value is None:
            return []
        return list(value) if isinstance(value, list | tuple) else [value]

    def _check_rows(self, source: str) -> list[int]:
        """Row numbers that can be used; counts the others or raises on the first, as the options say."""
        usable: list[int] = []
        for number, row in enumerate(self._rows):
            try:
                length = self._check_row(row)
            except DataError as error:
                if not self._config.skip_bad_rows:
                    raise DataError(
                        f"{source}, row {number}: {error}. data.skip_bad_rows=true leaves such rows out"
                    ) from error
                self.skipped["bad"] += 1
                logger.warning("%s, row %d is left out: %s", source, number, error)
                continue
            if length > self._config.max_prompt_length:
                if not self._config.filter_overlong_prompts:
                    raise DataError(
                        f"{source}, row {number}: the prompt has {length} tokens; data.max_prompt_length is "
                        f"{self._config.max_prompt_length}. data.filter_overlong_prompts=true leaves such rows out"
                    )
                self.skipped["overlong"] += 1
                continue
            usable.append(number)
            self.most_images = max(self.most_images, len(self._images(row)))
        if not usable:
            raise DataError(
                f"{source} has no usable row: {dict(self.skipped) or 'it is empty'}; accepted: prompts of at most "
                f"data.max_prompt_length={self._config.max_prompt_length} tokens, with readable pictures and an answer"
            )
        if self.skipped:
            logger.warning("%s: %d rows are used, left out: %s", source, len(usable), dict(self.skipped))
        return usable

    def _check_row(self, row: dict[str, Any]) -> int:
        """The prompt's length in tokens, picture tokens included."""
        config = self._config
        if row[config.prompt_key] is None or not str(row[config.prompt_key]).strip():
            raise DataError(f"column '{config.prompt_key}' is empty")
        if row[config.answer_key] is None or not str(row[config.answer_key]).strip():
            raise DataError(f"column '{config.answer_key}' is empty; a problem without an answer cannot be rewarded")
        text, images = self._text(row), self._images(row)
        if text.count(IMAGE_MARK) != len(images):
            raise DataError(
                f"{text.count(IMAGE_MARK)} '{IMAGE_MARK}' in the text but {len(images)} pictures; accepted: as many"
            )
        length = len(self._processing.template_ids(text)) - len(images)
        for value in images:
            size = limited_size(verify_image(value, config.image_dir), config.min_pixels, config.max_pixels)
            length += self._processing.num_image_tokens(size)
        return length


def read_source(source: str) -> Any:
    """The rows of `source`: a file, a folder of such files, or a hub name, each optionally with `@split` (default `train`).

    Raises:
        ConfigError: no such file, an unknown format, or a hub that cannot be reached.
    """
    import datasets

    datasets.disable_progress_bars()
    name, _, split = source.partition("@")
    path = Path(name).expanduser()
    if path.exists():
        files = [path] if path.is_file() else sorted(file for file in path.iterdir() if file.suffix in FORMATS)
        if split and path.is_dir():
            files = [file for file in files if file.stem.startswith(split)]
        kinds = {FORMATS.get(file.suffix) for file in files}
        if len(kinds) != 1 or None in kinds:
            raise ConfigError(f"data files '{source}': no data of one kind there; accepted: {', '.join(FORMATS)}")
        try:
            return datasets.load_dataset(str(kinds.pop()), data_files=[str(file) for file in files], split="train")
        except Exception as error:  # each format's reader raises its own types
            reason = error.__cause__ or error
            raise ConfigError(f"data files '{source}' cannot be read: {type(reason).__name__}: {reason}") from error
    if path.suffix or name.count("/") != 1:
        raise ConfigError(f"data files '{source}' do not exist; give a file, a folder, or a hub name org/name@split")
    try:
        return datasets.load_dataset(name, split=split or "train")
    except Exception as error:  # the hub client raises a dozen unrelated types; all mean the same to the user
        raise ConfigError(f"data files '{source}': neither a local path nor reachable on the hub ({error})") from error


def _format_template(path: str | None) -> Any:
    if path is None:
        return None
    file = Path(path)
    if not file.is_file():
        raise ConfigError(
            f"data.format_prompt '{path}' does not exist; give a Jinja file with the variable content, or null"
        )
    environment = SandboxedEnvironment(undefined=StrictUndefined)
    source = file.read_text(encoding="utf-8").strip()
    try:
        used = find_undeclared_variables(environment.parse(source))
    except TemplateError as error:
        raise ConfigError(f"data.format_prompt '{path}' does not parse: {error}") from error
    if used != {"content"}:
        raise ConfigError(
            f"data.format_prompt '{path}' uses the variables {', '.join(sorted(used)) or '(none)'}; accepted: content, "
            "which stands for the question"
        )
    return environment.from_string(source)


def _without_decoding(rows: Any, image_key: str) -> Any:
    """Leaves pictures as bytes: decoding all of them just to read other columns would take minutes."""
    import datasets

    feature = rows.features.get(image_key)
    if isinstance(feature, datasets.Image):
        return rows.cast_column(image_key, datasets.Image(decode=False))
    if isinstance(feature, datasets.List | datasets.LargeList) and isinstance(feature.feature, datasets.Image):
        return rows.cast_column(image_key, type(feature)(datasets.Image(decode=False)))
    return rows
