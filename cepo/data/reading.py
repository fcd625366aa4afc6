"""Opens the rows of a data source: a hub name, a file or a folder, each optionally with a split."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cepo.config.paths import split_source
from cepo.data.converted import open_parts
from cepo.data.sources import LocalSource, local_source
from cepo.data.table import Rows, rows_of
from cepo.errors import ConfigError
from cepo.files.safe_files import size_of


def read_source(source: str) -> Rows:
    """Opens the rows of `source`: a file, a folder of such files, or a hub name, each optionally with `@split`.

    The split defaults to `train` and may be a slice such as `train[:100]`. A file has the single split `train`. In a
    folder, the files of a split are those named after it (`train.parquet`, `train-00000-of-00002.parquet`) or in a
    subfolder of that name; if no file is named after any split, the split `train` is the whole folder.

    Nothing in a row is interpreted: texts are as the file has them, numbers keep their spelling, images are undecoded.
    Raises `ConfigError` if the file or split does not exist, its format is unknown, or the hub cannot be reached.
    """
    local = local_source(source)
    rows = _hub_rows(source) if local is None else _local_rows(source, local)
    if not len(rows):
        raise ConfigError(f"data files '{source}' have no rows; accepted: at least one problem")
    return rows


def _local_rows(source: str, local: LocalSource) -> Rows:
    for file in local.files:
        if size_of(file, within=local.within) == 0:
            raise ConfigError(f"data files '{source}': {file} is empty (0 bytes); remove it or write it again")
    parts = open_parts(local.files, within=local.within)
    begin, end = local.bounds(sum(len(part) for part in parts))
    return Rows(parts, begin=begin, end=end)


def _hub_rows(source: str) -> Rows:
    name, split = split_source(source)
    if Path(name).suffix or name.count("/") != 1:
        raise ConfigError(f"data files '{source}' do not exist; give a file, a folder, or a hub name org/name@split")
    import datasets  # pyright: ignore[reportMissingTypeStubs]  # takes a second, which local files need not wait for

    library: Any = datasets  # the return type of `load_dataset` depends on its arguments
    library.disable_progress_bars()
    try:
        return rows_of(library.load_dataset(name, split=split or "train"))
    except Exception as error:  # the hub client raises a dozen unrelated types; all mean the same to the user
        raise ConfigError(f"data files '{source}': neither a local path nor reachable on the hub ({error})") from error
