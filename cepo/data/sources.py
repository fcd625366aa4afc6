"""The files and the rows that a local data source names: a file, or one split of a folder.

A name is a name, never a pattern. Where a folder leaves a choice, nothing is guessed: it is refused, and the user names the
files.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cepo.config.paths import find_path, split_source
from cepo.errors import ConfigError, ForeignFileError
from cepo.files.safe_files import hub_folder, read_json
from cepo.files.trees import is_dict, is_list

logger = logging.getLogger(__name__)

JSON = "json"
CSV = "csv"
TSV = "tsv"
PARQUET = "parquet"
ARROW = "arrow"
FORMATS = {".parquet": PARQUET, ".json": JSON, ".jsonl": JSON, ".csv": CSV, ".tsv": TSV, ".arrow": ARROW}
TEXT_FORMATS = (JSON, CSV, TSV)
TRAIN = "train"
_MOST_LISTED = 10
_SAVED = "state.json"
_SAVED_SPLITS = "dataset_dict.json"
"""The files in which `Dataset.save_to_disk` and `DatasetDict.save_to_disk` list what they wrote."""
_NO_DATA = {"dataset_info.json", "dataset_infos.json", _SAVED, _SAVED_SPLITS}
_SPLIT = re.compile(r"(?P<name>[\w.\-]+)(\[(?P<begin>-?\d+%?)?:(?P<end>-?\d+%?)?\])?")
_PART = re.compile(
    r"(?P<beginning>.*?)(?<!\bv)(?<!_v)[._-]?(part|shard|chunk)?[._-]?\d+([._-]of[._-](?P<total>\d+))?([._-][0-9a-f]{8,})?",
    re.IGNORECASE,
)
"""The name of one of the parts of a whole as its beginning and its number: `-00000-of-00002`, `_1`, `.part3`; the
number behind a `v` is that of a version."""
_ALIASES = (("train", "training"), ("validation", "valid", "val", "dev"), ("test", "testing"))
_HELD_OUT = re.compile(
    r"(?<![^\W\d_])(test|testing|testmini|val|valid|validation|validate|dev|eval|evaluation|held[_-]?out|hold[_-]?out"
    r"|benchmark)(s|set|_set|data)?(?![^\W\d_])",
    re.IGNORECASE,
)
"""A word that names rows which are not for training."""


@dataclass(frozen=True)
class LocalSource:
    """The files of a local source in order, all of one format, and the slice of their rows to read.

    `begin` and `end` are numbers of rows, which count from the end if they are negative, or shares in percent, as texts.
    """

    files: list[Path]
    begin: str | None
    end: str | None
    within: Path | None  # the folder in which all files must lie; None for a single file

    def bounds(self, size: int) -> tuple[int, int]:
        """Returns the first of the rows to read and the one after the last, of `size` rows."""
        begin = 0 if self.begin is None else _row_number(self.begin, size)
        end = size if self.end is None else _row_number(self.end, size)
        return begin, max(begin, end)


def _row_number(text: str, size: int) -> int:
    if text.endswith("%"):
        percentage = int(text[:-1])
        number = round(percentage * size / 100)
    else:
        number = int(text)
    if number < 0:
        number += size
    return min(max(number, 0), size)


def format_of(path: Path) -> str | None:
    """Returns the format that a file's ending states, in any case of letters; None for an unknown one."""
    return FORMATS.get(path.suffix.lower())


def local_source(source: str) -> LocalSource | None:
    """Returns the files of a local source, or None if it is no local path.

    Of a folder that `datasets` saved, the split is what its own list names. In another folder, the split is the only
    file with its name as a word in its own (`train.jsonl`, `geo_train.jsonl`), or numbered parts of such a file, or all
    files of a folder of its name. If no file is named after a split, the split `train` is the only file, or its numbered
    parts. Anything else raises `ConfigError`, as do files of several formats or of none that is read.
    """
    name, split = split_source(source)
    path = find_path(name)
    if path is None:
        return None
    slice_of_split = _SPLIT.fullmatch(split or TRAIN)
    if slice_of_split is None:
        raise ConfigError(
            f"data files '{source}': the split '{split}' is neither a name nor a slice like train[:100] or train[:90%]"
        )
    split_name = slice_of_split["name"]
    within = hub_folder(path) if path.is_dir() else None
    files = _folder_files(source, path, split_name) if path.is_dir() else [path]
    if path.is_file() and split_name != TRAIN:
        raise ConfigError(f"data files '{source}': a single file has only the split train, got '{split_name}'")
    if path.is_file() and format_of(path) is None:
        raise ConfigError(
            f"data file '{source}': the ending '{path.suffix}' is none that is read; accepted: {', '.join(FORMATS)}. Save a "
            "sheet as .csv, and unpack an archive"
        )
    kinds = {format_of(file) for file in files}
    if len(kinds) != 1 or None in kinds:
        names = f": {_listed(files, path)}" if len(kinds) > 1 else ""
        raise ConfigError(
            f"data files '{source}': no data of a single format there{names}; accepted: {', '.join(FORMATS)}"
        )
    return LocalSource(files, slice_of_split["begin"], slice_of_split["end"], within)


def _folder_files(source: str, folder: Path, split: str) -> list[Path]:
    """Returns the files of a split of a folder, in the order of their names."""
    if (folder / _SAVED_SPLITS).exists():
        return _files_of_saved_split(source, folder, split)
    if (folder / _SAVED).exists():
        files, named = _saved_files(folder)
        if split not in (TRAIN, named):
            raise ConfigError(f"data files '{source}': this saved data set is the split '{named}', got '{split}'")
        return files
    files = _data_files(folder)
    if not files:
        raise ConfigError(f"data files '{source}': no data of a single format there; accepted: {', '.join(FORMATS)}")
    chosen = _named_after(files, folder, split)
    if not chosen and split == TRAIN:
        chosen = files
    held_out = [file for file in chosen if _HELD_OUT.search(file.stem) or _HELD_OUT.fullmatch(file.parent.name)]
    if split == TRAIN and held_out:
        raise ConfigError(
            f"data files '{source}': the split '{TRAIN}' would have files that are named after another split: "
            f"{_listed(held_out, folder)}. All files: {_listed(files, folder)}. Give the path of the training file itself, or "
            "name the split: FOLDER@NAME"
        )
    if not chosen:
        raise ConfigError(
            f"data files '{source}': no file there is named '{split}'. There are: {_listed(files, folder)}"
        )
    _require_one_whole(source, chosen, folder, split)
    return chosen


# Folders that `datasets` saved


def _files_of_saved_split(source: str, folder: Path, split: str) -> list[Path]:
    """Returns the files of a split of a folder that `DatasetDict.save_to_disk` wrote."""
    listed: object = read_json(folder / _SAVED_SPLITS, dict, within=hub_folder(folder)).get("splits")
    names = [name for name in listed if isinstance(name, str)] if is_list(listed) else []
    spellings = {name.lower(): name for name in names}
    for word in _names_of(split):
        if word in spellings:
            return _saved_files(folder / spellings[word])[0]
    raise ConfigError(f"data files '{source}': no split there is named '{split}'. There are: {', '.join(names)}")


def _saved_files(folder: Path) -> tuple[list[Path], str]:
    """Returns the files of a data set that `Dataset.save_to_disk` wrote, by its own list, and the name of its split."""
    state = read_json(folder / _SAVED, dict, within=hub_folder(folder))
    listed: object = state.get("_data_files")
    files: list[Path] = []
    for entry in listed if is_list(listed) else []:
        name = entry.get("filename") if is_dict(entry) else None
        if not isinstance(name, str) or not name or Path(name).name != name:
            raise ForeignFileError(
                folder / _SAVED, f"names the data file {name!r:.100}, which is no name of a file beside it"
            )
        files.append(folder / name)
    return files, str(state.get("_split") or TRAIN)


# Other folders


def _data_files(folder: Path) -> list[Path]:
    """Returns the data files below a folder, sorted, without hidden ones and those that `datasets` keeps beside data."""
    files: list[Path] = []
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith((".", "__"))]
        for name in names:
            if not name.startswith(".") and name not in _NO_DATA and format_of(Path(name)) is not None:
                files.append(Path(place) / name)
    return sorted(files)


def _names_of(split: str) -> list[str]:
    """Returns the words that name a split, in small letters: its own name, then others that mean the same."""
    name = split.lower()
    names = [name]
    for words in _ALIASES:
        if name in words:
            names += [word for word in words if word != name]
    return names


def _named_after(files: Sequence[Path], folder: Path, split: str) -> list[Path]:
    """Returns the files that have a split's name as a word in their own, or are in a folder of that name."""
    for name in _names_of(split):
        word = re.compile(rf"(?<![^\W\d_]){re.escape(name)}(set|data)?(?![^\W\d_])", re.IGNORECASE)
        chosen = [file for file in files if word.search(file.stem) or _folder_named(file, folder, [name])]
        if chosen:
            return chosen
    return []


def _folder_named(file: Path, folder: Path, names: Sequence[str]) -> Path | None:
    """Returns the outermost folder of one of these names around the file, below `folder`; None if there is none."""
    place = folder
    for part in file.relative_to(folder).parts[:-1]:
        place = place / part
        if part.lower() in names:
            return place
    return None


def _require_one_whole(source: str, files: Sequence[Path], folder: Path, split: str) -> None:
    """Raises `ConfigError` unless the files are one file, its numbered parts, or all in one folder named after the split.

    Others may hold the same rows: copies, versions, and a whole beside its parts.
    """
    places = {_folder_named(file, folder, _names_of(split)) for file in files}
    if len(places) == 1 and None not in places:
        return
    wholes: set[tuple[Path, str | None]] = set()  # each with its number of parts
    for file in files:
        match = _PART.fullmatch(file.stem)
        if match is None:
            wholes.add((file, None))
        else:
            wholes.add((file.parent / match["beginning"].lower(), match["total"]))
    if len(wholes) > 1:
        raise ConfigError(
            f"data files '{source}': it is not clear which files are the split '{split}'. These are neither one file, nor "
            f"numbered parts of one, nor in one folder of that name, and may hold the same rows: {_listed(files, folder)}. "
            "Give the path of one, or several as a list"
        )
    _, total = wholes.pop()
    if total and int(total) != len(files):
        logger.warning("%s: %d of the %s files of '%s' are there", source, len(files), int(total), split)


def _listed(files: Sequence[Path], folder: Path) -> str:
    names: list[str] = []
    for file in files[:_MOST_LISTED]:
        is_below = folder in file.parents
        names.append(str(file.relative_to(folder) if is_below else file))
    num_more = len(files) - len(names)
    return ", ".join(names) + (f" and {num_more} more" if num_more > 0 else "")
