"""Reads rows from a hub name, a file or a folder without changing them: images undecoded, text columns as text."""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import datasets  # pyright: ignore[reportMissingTypeStubs]
from PIL import Image

from cepo.config.schema import DataConfig
from cepo.data.images import ImageRules, decoded_images, located
from cepo.errors import ConfigError, DataError
from cepo.foreign_files import hub_folder, open_regular, size_of
from cepo.models.inputs import ImageInputs, ImageSource
from cepo.models.processing import Processing
from cepo.trees import Tree

logger = logging.getLogger(__name__)

FORMATS = {".parquet": "parquet", ".json": "json", ".jsonl": "json", ".csv": "csv", ".arrow": "arrow"}
_BESIDE_ARROW = ("dataset_info.json", "state.json", "dataset_dict.json")
"""The files that `Dataset.save_to_disk` writes in addition to arrow files."""
_SPLIT = re.compile(r"(?P<name>[\w.\-]+)(?P<slice>\[[^\[\]]*\])?")


def read_source(source: str, *, text_columns: Sequence[str] = ()) -> Any:
    """Reads the rows of `source`: a file, a folder of such files, or a hub name, each optionally with `@split`.

    The split defaults to `train` and may be a slice such as `train[:100]`. A file has the single split `train`. In a
    folder, the files of a split are those named after it (`train.parquet`, `train-00000-of-00002.parquet`) or in a
    subfolder of that name; if there are none for `train`, the split `train` is the whole folder.

    `text_columns` of csv files are kept as text: `0.50` does not become 0.5. Raises `ConfigError` if the file or split
    does not exist, its format is unknown, or the hub cannot be reached.
    """
    library: Any = datasets  # the return type of `load_dataset` depends on its arguments
    library.disable_progress_bars()
    # It would report each format that is read to a server, for local files too, and without a network wait for seconds.
    library.config.HF_UPDATE_DOWNLOAD_COUNTS = False
    name, _, split = source.partition("@")
    path = Path(name).expanduser()
    if path.exists():
        files, part = local_files(source)
        within = hub_folder(path) if path.is_dir() else None
        blank = next((file for file in files if size_of(file, within=within) == 0), None)
        if blank is not None:
            raise ConfigError(f"data files '{source}': {blank} is empty (0 bytes); remove it or write it again")
        options: Tree = {}
        kind = FORMATS[files[0].suffix]
        for file in files if kind == "json" else ():
            _refuse_null_rows(file)
        if kind == "csv":  # "None" and "NA" are text; only empty cells are missing
            texts = dict.fromkeys(text_columns, str)
            options = {"converters": texts, "keep_default_na": False, "na_values": [""]}
        try:
            return library.load_dataset(kind, data_files=[str(file) for file in files], split=part, **options)
        except Exception as error:  # each format's reader raises its own types
            reason = error.__cause__ or error
            if isinstance(reason, StopIteration) or "corresponds to no data" in str(reason):
                raise ConfigError(f"data files '{source}' have no rows; accepted: at least one problem") from error
            raise ConfigError(f"data files '{source}' cannot be read: {type(reason).__name__}: {reason}") from error
    if path.suffix or name.count("/") != 1:
        raise ConfigError(f"data files '{source}' do not exist; give a file, a folder, or a hub name org/name@split")
    try:
        return library.load_dataset(name, split=split or "train")
    except Exception as error:  # the hub client raises a dozen unrelated types; all mean the same to the user
        raise ConfigError(f"data files '{source}': neither a local path nor reachable on the hub ({error})") from error


def local_files(source: str) -> tuple[list[Path], str]:
    """Returns the files of a local source in order, and the part of their rows to read: `train` or a slice of it."""
    name, _, split = source.partition("@")
    wanted = _SPLIT.fullmatch(split or "train")
    if wanted is None:
        raise ConfigError(f"data files '{source}': the split '{split}' is neither a name nor a slice like train[:100]")
    path, rows = Path(name).expanduser(), f"train{wanted['slice'] or ''}"
    if path.is_file():
        files = [path]
        if wanted["name"] != "train":
            raise ConfigError(f"data files '{source}': a single file has only the split train, got '{wanted['name']}'")
    else:
        found = [file for file in sorted(path.rglob("*")) if file.suffix in FORMATS and file.name not in _BESIDE_ARROW]
        begins = re.compile(rf"{re.escape(wanted['name'])}(?![^\W_])")
        files = [
            file for file in found if begins.match(file.stem) or wanted["name"] in file.relative_to(path).parts[:-1]
        ]
        if not files and wanted["name"] == "train":
            files = found
        if found and not files:
            raise ConfigError(
                f"data files '{source}': no file there is named '{wanted['name']}'. "
                f"There are: {', '.join(str(file.relative_to(path)) for file in found[:10])}"
            )
    kinds = {FORMATS.get(file.suffix) for file in files}
    if len(kinds) != 1 or None in kinds:
        raise ConfigError(f"data files '{source}': no data of a single format there; accepted: {', '.join(FORMATS)}")
    return files, rows


def _refuse_null_rows(file: Path) -> None:
    """Raises `ConfigError` for a null row, because pyarrow's reader crashes if a block of a file begins with one."""
    with open_regular(file) as lines:
        is_start = True
        for number, line in enumerate(lines, start=1):
            row = line.lstrip(b"\xef\xbb\xbf[ \t\r\n") if is_start else line
            if row.startswith(b"null"):
                raise ConfigError(
                    f"data file {file}, line {number}: the row is null; accepted: one JSON object per row"
                )
            is_start = is_start and not row


def without_decoding(rows: Any) -> Any:
    """Returns the rows with undecoded images, videos and other media, whichever decoders a file's metadata name.

    Decoding would take minutes, could start programs, and needs libraries that need not be installed.
    """
    for key, feature in rows.features.items():
        plain = _undecoded(feature)
        if plain != feature:
            rows = rows.cast_column(key, plain)
    return rows


def _undecoded(feature: Any) -> Any:
    if getattr(feature, "decode", False) and not isinstance(feature, datasets.Json):  # only media and JSON have it
        return dataclasses.replace(feature, decode=False)
    if isinstance(feature, dict):
        return {name: _undecoded(inner) for name, inner in cast("Tree", feature).items()}
    if isinstance(feature, datasets.List | datasets.LargeList):
        return dataclasses.replace(feature, feature=_undecoded(feature.feature))
    return feature


def read_row(rows: Any, number: int) -> Tree:
    """Returns a row; raises `DataError` if it cannot be read, for example if a text is not in UTF-8."""
    try:
        return rows[number]
    except Exception as error:  # each format's reader raises its own types
        raise DataError(f"the row cannot be read ({type(error).__name__})") from error


class ImageStore:
    """Reads the images of rows as the trainer does, each once."""

    def __init__(self, config: DataConfig, processing: Processing) -> None:
        self._config, self._processing = config, processing
        self._rows: dict[str, Any] = {}
        self._images: dict[ImageSource, tuple[Image.Image, ...]] = {}
        self._inputs: dict[ImageSource, ImageInputs] = {}

    def images(self, source: ImageSource) -> tuple[Image.Image, ...]:
        """Returns a row's decoded images for the rollout engine; raises `ConfigError` or `DataError` on failure."""
        if source not in self._images:
            column = source.column or self._config.image_key
            with located(f"{source.data}, row {source.row}"):
                row = read_row(self._data(source.data), source.row)
                self._images[source] = decoded_images(row, column, ImageRules.of(self._config))
        return self._images[source]

    def inputs(self, source: ImageSource) -> ImageInputs:
        """Returns the images of a row as inputs of the vision tower."""
        if source not in self._inputs:
            inputs = self._processing.load_images(self.images(source), source)
            assert inputs is not None, f"row {source.row} of {source.data} has no image"
            self._inputs[source] = inputs
        return self._inputs[source]

    def forget(self) -> None:
        """Frees all images; the data sets remain open."""
        self._images.clear()
        self._inputs.clear()

    def _data(self, name: str) -> Any:
        if name not in self._rows:
            text_columns = (self._config.prompt_key, self._config.answer_key)
            self._rows[name] = without_decoding(read_source(name, text_columns=text_columns))
        return self._rows[name]
