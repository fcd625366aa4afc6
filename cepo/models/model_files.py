"""Checks the small files of a model folder before transformers reads them, because others may have made them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cepo.errors import DataError
from cepo.foreign_files import LARGEST_JSON, hub_folder, open_regular, read_json
from cepo.trees import is_list, is_mapping

_CONFIG, WEIGHTS_INDEX = "config.json", "model.safetensors.index.json"
_COPIED = (".json", ".jinja", ".txt", ".model")
"""Files whose content a merge copies into its own folder. Weights may be links to another disk."""
_LARGEST = {
    "num_hidden_layers": 2_000,
    "depth": 2_000,
    "num_attention_heads": 10_000,
    "num_key_value_heads": 10_000,
    "hidden_size": 1_000_000,
    "intermediate_size": 10_000_000,
    "vocab_size": 10_000_000,
}
"""Sizes above these would fill the memory before a weight is read."""


def check_model_files(path: str) -> None:
    """Checks that a local folder's files are regular, that its index names files in it, and that its sizes are possible.

    Hub names are not checked: the hub's client writes only regular files.

    Raises:
        DataError: a file breaks the policy of `cepo.foreign_files`, or has other contents.
    """
    folder = Path(path)
    if not folder.is_dir():
        return
    for file in (*folder.iterdir(), *folder.glob("additional_chat_templates/*")):
        if not file.is_dir():
            copied = file.suffix in _COPIED
            open_regular(
                file, within=hub_folder(folder) if copied else None, largest=LARGEST_JSON if copied else None
            ).close()
    if (folder / _CONFIG).exists():
        for name, value in _entries(read_json(folder / _CONFIG, dict)):
            if name in _LARGEST and isinstance(value, int) and not 0 <= value <= _LARGEST[name]:
                raise DataError(f"{folder / _CONFIG}: {name} is out of range; accepted: 0 to {_LARGEST[name]:,}")
    if (folder / WEIGHTS_INDEX).exists():
        weight_files(folder)


def weight_files(folder: Path) -> list[str]:
    """Returns the names of the files that a folder's index lists.

    Raises:
        DataError: the index breaks the policy of `cepo.foreign_files`, or names a file elsewhere.
    """
    names = read_json(folder / WEIGHTS_INDEX, dict).get("weight_map")
    if not is_mapping(names) or not all(isinstance(name, str) and Path(name).name == name for name in names.values()):
        raise DataError(f"{folder / WEIGHTS_INDEX} does not map weights to files of its folder")
    return sorted(set(names.values()))


def _entries(tree: Any) -> Iterator[tuple[str, Any]]:
    """Yields the entries of all mappings in a configuration."""
    for name, value in tree.items() if is_mapping(tree) else ():
        yield name, value
        yield from _entries(value)
    for value in tree if is_list(tree) else ():
        yield from _entries(value)
