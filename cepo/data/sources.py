"""Finds the files and the rows that a local data source names: a file, or a split of a folder.

A name is a name, never a pattern. What other programs leave beside data is no data. A split is named by its files or
folders, and where only another split is named, nothing is guessed.
"""

from __future__ import annotations

import logging
import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from cepo.config.paths import find_path, split_source
from cepo.data.formats import FORMATS, format_of
from cepo.errors import ConfigError, ForeignFileError
from cepo.files.safe_files import hub_folder, read_json
from cepo.files.trees import is_dict, is_list

logger = logging.getLogger(__name__)

TRAIN = "train"
_MOST_LISTED = 10
_SAVED = "state.json"
_SAVED_SPLITS = "dataset_dict.json"
"""The files in which `Dataset.save_to_disk` and `DatasetDict.save_to_disk` list what they wrote."""
_NO_DATA = re.compile(
    r"dataset_infos?\.json|dataset_dict\.json|state\.json|(tokenizer|special_tokens_map|generation_config|package).*\.json"
    r"|cache-.*\.arrow|tmp.*\.arrow|indices.*\.arrow|readme.*|licen[cs]e.*|.*~",
    re.IGNORECASE,
)
_NO_FOLDER = re.compile(r"\..*|__.*")
_COPY = re.compile(
    r"(-copy\d*|[ _-]+(copy|kopie|kopia|copie|copia|c[óo]pia|копия|副本|コピー|복사본)( ?\(?\d+\)?)?"
    r"| ?\(\d+\)|-checkpoint|[._-](bak|backup|old|orig|original|tmp|temp))+\Z",
    re.IGNORECASE,
)
"""What a copy's name has after the name of its original: of notebooks, file managers in several languages, editors, and
people."""
_SPLIT = re.compile(r"(?P<name>[\w.\-]+)(\[(?P<begin>-?\d+%?)?:(?P<end>-?\d+%?)?\])?")
_SHARD = re.compile(
    r"([._-]?(part|shard|chunk|split)?[._-]?\d++)*+([._-]?of[._-]?(?P<total>\d+))?([._-][0-9a-f]{8,})?", re.IGNORECASE
)
"""What the names of the parts of one split have after its name: `-00000-of-00002`, `_1`, `.part3`."""
_VERSION = re.compile(
    r"(?<![^\W\d_])(v(er(sion)?)?[._-]?\d+|\d+(\.\d+)?[km]|full|all|whole|complete|small|mini|tiny|subset|sample|debug"
    r"|raw|clean(ed)?|filtered|dedup\w*|shuffled|sorted|processed|fixed|new|final)(?![^\W_])",
    re.IGNORECASE,
)
"""A word in a name for one version of rows that other versions have too: `v2`, `10k`, `full`, `filtered`."""
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[^\W\d_]+")
_ALIASES = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing"),
}
_HELD_OUT = {
    *_ALIASES["validation"],
    *_ALIASES["test"],
    *(
        "validate",
        "development",
        "eval",
        "evaluation",
        "testmini",
        "minitest",
        "minival",
        "heldout",
        "holdout",
        "benchmark",
    ),
    *("测试", "测试集", "验证", "验证集"),
}
"""The words that name rows which are not for training."""


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


def local_source(source: str) -> LocalSource | None:
    """Returns the files of a local source, or None if it is no local path.

    Raises `ConfigError` if it has no such split, if its files name only other splits, if it is not clear which files are
    meant, or if they are of several formats or of none that is read.
    """
    name, split = split_source(source)
    path = find_path(name)
    if path is None:
        return None
    slice_of_split = _SPLIT.fullmatch(split or TRAIN)
    if slice_of_split is None:
        raise ConfigError(f"data files '{source}': the split '{split}' is neither a name nor a slice like train[:100]")
    split_name = slice_of_split["name"]
    within = hub_folder(path) if path.is_dir() else None
    files = _folder_files(source, path, split_name) if path.is_dir() else [path]
    if path.is_file() and split_name != TRAIN:
        raise ConfigError(f"data files '{source}': a single file has only the split train, got '{split_name}'")
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
    saved = _saved_files(folder)
    if saved is not None:
        files, named = saved
        if split not in (TRAIN, named):
            raise ConfigError(f"data files '{source}': this saved data set is the split '{named}', got '{split}'")
        return files
    files = _without_copies(_data_files(folder))
    if not files:
        raise ConfigError(f"data files '{source}': no data of a single format there; accepted: {', '.join(FORMATS)}")
    chosen = _split_files(source, files, folder, split)
    if chosen:
        _require_one_version(source, chosen, folder)
        return chosen
    if split != TRAIN:
        raise ConfigError(
            f"data files '{source}': no file there is named '{split}'. There are: {_listed(files, folder)}"
        )
    held_out = [file for file in files if _words(file.relative_to(folder)) & _HELD_OUT]
    if held_out:
        raise ConfigError(
            f"data files '{source}': no file there is named '{TRAIN}', and these are named after another split: "
            f"{_listed(held_out, folder)}. All files: {_listed(files, folder)}. Give the path of the training file itself, or "
            "name the split: FOLDER@NAME"
        )
    num_files_of_name = Counter(file.with_suffix("") for file in files)
    doubles = [file for file in files if num_files_of_name[file.with_suffix("")] > 1]
    if doubles:
        raise ConfigError(
            f"data files '{source}': files of one name may hold the same rows: {_listed(doubles, folder)}. Give the path of one"
        )
    _require_one_version(source, files, folder)
    return files


def _require_one_version(source: str, files: Sequence[Path], folder: Path) -> None:
    """Raises `ConfigError` if the names of two files differ only in words such as `v2`, `10k` or `filtered`."""
    file_of_name: dict[Path, Path] = {}
    for file in files:
        stem_without_version = _VERSION.sub("", file.stem)
        name = re.sub(r"[\s._-]+", "_", stem_without_version).strip("_").lower()
        first_file = file_of_name.setdefault(file.parent / name, file)
        if first_file is not file:
            raise ConfigError(
                f"data files '{source}': by their names, {_listed([first_file, file], folder)} may be versions of the same rows. "
                "Give the path of one, or several as a list"
            )


# Folders that `datasets` saved


def _files_of_saved_split(source: str, folder: Path, split: str) -> list[Path]:
    """Returns the files of a split of a folder that `DatasetDict.save_to_disk` wrote."""
    listed: object = read_json(folder / _SAVED_SPLITS, dict, within=hub_folder(folder)).get("splits")
    names = [name for name in listed if isinstance(name, str)] if is_list(listed) else []
    name = _name_of_split(split, names)
    saved = None if name is None else _saved_files(folder / name)
    if saved is None:
        raise ConfigError(f"data files '{source}': no split there is named '{split}'. There are: {', '.join(names)}")
    files, _ = saved
    return files


def _name_of_split(split: str, names: Sequence[str]) -> str | None:
    """Returns the name that a split has in a list: its own, or one that means the same in any case of letters."""
    if split in names:
        return split
    spellings = {name.lower(): name for name in names}
    for word in _names_of(split):
        if word in spellings:
            return spellings[word]
    return None


def _saved_files(folder: Path) -> tuple[list[Path], str] | None:
    """Returns the files of a data set that `Dataset.save_to_disk` wrote, by its own list, and the name of its split.

    Returns None if the folder is no such data set.
    """
    if not (folder / _SAVED).exists():
        return None
    state = read_json(folder / _SAVED, dict, within=hub_folder(folder))
    listed: object = state.get("_data_files")
    if not is_list(listed):
        return None
    files: list[Path] = []
    for entry in listed:
        name = entry.get("filename") if is_dict(entry) else None
        if not isinstance(name, str) or not name or Path(name).name != name:
            raise ForeignFileError(
                folder / _SAVED, f"names the data file {name!r:.100}, which is no name of a file beside it"
            )
        files.append(folder / name)
    return files, str(state.get("_split") or TRAIN)


# Other folders


def _data_files(folder: Path) -> list[Path]:
    """Returns the data files below a folder, sorted, without those that other programs keep beside data."""
    files: list[Path] = []
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not _NO_FOLDER.fullmatch(name)]
        saved = _saved_files(Path(place))
        if saved is not None:
            files += saved[0]
            continue
        for name in names:
            if not name.startswith(".") and not _NO_DATA.fullmatch(name) and format_of(Path(name)) is not None:
                files.append(Path(place) / name)
    return sorted(files)


def _without_copies(files: Sequence[Path]) -> list[Path]:
    """Leaves out files whose names say that they are copies of others which are there too."""
    present = {(file.parent, file.stem.lower(), file.suffix.lower()) for file in files}
    originals: list[Path] = []
    for file in files:
        stem = file.stem.lower().removeprefix("copy of ")
        ending = _COPY.search(stem)
        original = stem if ending is None else stem[: ending.start()]
        is_original_there = (file.parent, original, file.suffix.lower()) in present
        if original != file.stem.lower() and is_original_there:
            logger.warning(
                "%s is left out: by its name it is a copy of the file %s beside it", file, original + file.suffix
            )
        else:
            originals.append(file)
    return originals


def _names_of(split: str) -> list[str]:
    """Returns the words that name a split, in small letters: its own name, then others that mean the same."""
    name = split.lower()
    for words in _ALIASES.values():
        if name in words:
            synonyms = [word for word in words if word != name]
            return [name, *synonyms]
    return [name]


def _words(path: Path) -> set[str]:
    """Returns the words in a path's folders and stem, in small letters, and those of pairs joined: `held-out`, `test_set`."""
    words: set[str] = set()
    for part in (*path.parent.parts, path.stem):
        texts = [text.lower() for text in _WORDS.findall(part)]
        pairs = [first + second for first, second in pairwise(texts)]
        words.update(texts, pairs)
    return words | {re.sub(r"(data|set|file|split|s)$", "", word) for word in words}


def _deciding_words(path: Path) -> set[str]:
    """Returns the words as `_words`, without those of folders that name several splits: `train_test_split`."""
    parts = [part for part in path.parent.parts if not _names_several_splits(part)]
    return _words(Path(*parts, path.name))


def _names_several_splits(folder: str) -> bool:
    words = _words(Path(folder, "_"))
    return bool(words & _HELD_OUT) and bool(words & set(_ALIASES[TRAIN]))


def _split_files(source: str, files: Sequence[Path], folder: Path, split: str) -> list[Path]:
    """Returns the files that are named after a split, by its own name or else by another that means the same.

    A file is if its name begins with that of the split or it is in a folder of that name, else if it has the word
    anywhere in its name. Raises `ConfigError` if such files are in several places or are not parts of one whole.
    """
    names = _names_of(split)
    words_of_splits = _HELD_OUT | set(_ALIASES[TRAIN])
    excluded_words: set[str] = set()  # for a name of the user's own, such as test_hard
    if split.lower() in words_of_splits:
        excluded_words = words_of_splits - set(names)
    possible = [file for file in files if _deciding_words(file.relative_to(folder)).isdisjoint(excluded_words)]
    for name in names:
        chosen = [file for file in possible if _begins_with(file.stem, name) or _folder_named(file, folder, name)]
        if chosen:
            _require_one_place(source, chosen, folder, name)
            return chosen
    return [file for file in possible if not _words(Path(file.name)).isdisjoint(names)]


def _begins_with(stem: str, name: str) -> bool:
    """Returns whether a file's name begins with a split's, as a word."""
    return re.match(rf"{re.escape(name)}(?![^\W\d_])", stem, re.IGNORECASE) is not None


def _folder_named(file: Path, folder: Path, name: str) -> Path | None:
    """Returns the outermost folder of that name around the file, below `folder`; None if there is none."""
    place = folder
    for part in file.relative_to(folder).parts[:-1]:
        place = place / part
        if part.lower() == name:
            return place
    return None


def _require_one_place(source: str, files: Sequence[Path], folder: Path, name: str) -> None:
    """Raises `ConfigError` unless the files named after a split are one file, its numbered parts, or one folder."""
    places = {_folder_named(file, folder, name) or file.parent for file in files}
    if len(places) > 1:
        raise ConfigError(
            f"data files '{source}': files named '{name}' are in several folders, which may hold the same rows: "
            f"{_listed(files, folder)}. Give the path of one, or several as a list"
        )
    named = [file for file in files if _folder_named(file, folder, name) is None]
    kinds: set[str] = set()
    totals: set[str] = set()  # numbers of parts, as `-of-00002` states them
    for file in named:
        ending = file.stem[len(name) :]
        shard = _SHARD.fullmatch(ending)
        if not ending:
            kinds.add("whole")
        elif shard is None:
            kinds.add("other")
        else:
            kinds.add("part")
            totals.update(filter(None, [shard["total"]]))
    if len(kinds) > 1 or len(totals) > 1 or ("whole" in kinds and len(named) > 1):
        raise ConfigError(
            f"data files '{source}': it is not clear which files are the split '{name}': {_listed(named, folder)}. Give the path "
            "of one, or several as a list"
        )
    if totals and int(max(totals)) != len(named):
        logger.warning("%s: %d of the %s files of '%s' are there", source, len(named), int(max(totals)), name)


def _listed(files: Sequence[Path], folder: Path) -> str:
    names: list[str] = []
    for file in files[:_MOST_LISTED]:
        is_below = folder in file.parents
        names.append(str(file.relative_to(folder) if is_below else file))
    num_more = len(files) - len(names)
    return ", ".join(names) + (f" and {num_more} more" if num_more > 0 else "")
