"""What the results of a check of rows depend on: its identity, and the state of the files that rows name."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import pyarrow.compute  # pyright: ignore[reportMissingTypeStubs, reportUnusedImport]  # which makes it an attribute of pyarrow

import cepo
from cepo.data.row_settings import RowRules
from cepo.data.tables import Rows, pyarrow
from cepo.errors import CepoError
from cepo.files.own_cache import digest_of
from cepo.files.safe_files import OpenedFile, hub_folder, open_regular
from cepo.files.trees import Tree
from cepo.models.processing import Processing

logger = logging.getLogger(__name__)

_FOLDERS_OF_CODE = ("data", "files", "models")
_LIBRARIES = (
    *("av", "datasets", "jinja2", "numpy", "pillow", "pyarrow"),
    *("qwen-vl-utils", "tokenizers", "torchvision", "transformers"),
)
_LOOKING_THREADS = 8
_UNKNOWN = "unknown"
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".ckpt")


def identity_of(source: str, rows: Rows, rules: RowRules, processing: Processing) -> str | None:
    """Returns a digest of all that the check of a source's rows depends on, except the files that rows name.

    These are the content of its files in their order and the part that is read, the settings, the files of tokenizer,
    processor and chat template, the code of this package that reads rows, and the versions of the libraries. None for
    rows that a program made, or if a file cannot be read.
    """
    if rows.identity is None:
        return None
    code = _code_digest()  # not below: an error here would be a fault of this package, not of the data
    try:
        facts: Tree = {
            "rows": rows.identity,
            "settings": _with_contents(rules),
            "processing": _processing_facts(processing),
            "code": code,
            "libraries": {name: _version(name) for name in _LIBRARIES} | {"python": sys.version},
        }
    except (CepoError, OSError) as error:
        logger.info("the results of checking %s are not kept: %s", source, error)
        return None
    if facts["processing"] is None:
        return None
    text = json.dumps(facts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _content_digest(file: Path, within: Path | None = None) -> str:
    with open_regular(file, within=within) as opened:
        return digest_of(opened)


def _with_contents(rules: RowRules) -> Tree:
    """Returns the rules with the content of the file and the place of the folder that they name."""
    settings: Tree = dataclasses.asdict(rules)
    if rules.format_prompt is not None:
        settings["format_prompt"] = _content_digest(Path(rules.format_prompt))
    image_dir = rules.images.image_dir
    settings["images"]["image_dir"] = [image_dir is None, str(Path.cwd() / (image_dir or ""))]
    return settings


def _processing_facts(processing: Processing) -> Any:
    """Returns what tokenizer, processor and chat template are made from; None if their files cannot be found."""
    arguments = processing.arguments
    folder = _model_folder(arguments["path"])
    if folder is None:
        return None
    paths = {*folder.glob("*"), *folder.glob("additional_chat_templates/*"), *folder.rglob("*.py")}
    files = [path for path in sorted(paths) if path.is_file() and path.suffix not in _WEIGHTS]
    within = hub_folder(folder)
    digests = {str(file.relative_to(folder)): _content_digest(file, within) for file in files}
    settings = {name: value for name, value in arguments.items() if name != "path"}
    return [digests, settings]


def _model_folder(path: str) -> Path | None:
    """Returns the folder of a model, which for a name on the hub is that of the revision that was loaded."""
    if Path(path).is_dir():
        return Path(path)
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(path, "config.json")
    return Path(config).parent if isinstance(config, str) else None


@cache
def _code_digest() -> str:
    """Returns a digest of the modules by which rows are read and measured, so that a change of one is a new identity."""
    package = Path(cepo.__file__).parent
    digest = hashlib.sha256(cepo.__version__.encode())
    for folder in _FOLDERS_OF_CODE:
        files = sorted((package / folder).rglob("*.py"))
        assert files, f"the package has no folder {folder}"
        for file in files:
            digest.update(file.relative_to(package).as_posix().encode() + file.read_bytes())
    return digest.hexdigest()


def _version(library: str) -> str | None:
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        return None


# Files that rows name


def file_entry(file: OpenedFile) -> str:
    """Returns a file that was opened, or could not be, with its state, as a text; the state of an address is unknown."""
    name, status = file
    if status is None:
        return f"{'-' if os.path.isabs(name) else _UNKNOWN} {name}"
    return f"{status.st_ino}:{status.st_size}:{status.st_mtime_ns}:{status.st_ctime_ns} {name}"


def stale_rows(files: Any) -> tuple[list[int], list[str] | None]:
    """Returns the rows whose files are not as they were, and how these files are now, None if that is unknown.

    `files` is an Arrow column with the list of a row's `file_entry`.
    """
    files = files.combine_chunks()
    noted: list[str] = files.flatten().unique().to_pylist()
    names = [entry.partition(" ")[2] for entry in noted]
    with ThreadPoolExecutor(_LOOKING_THREADS) as pool:  # a look at a file on a network takes long
        present = [*pool.map(_present_entry, names)]
    changed: dict[str, str] = {}
    for old, new in zip(noted, present, strict=True):
        if old != new or old.startswith(_UNKNOWN):
            changed[old] = new
    if not changed:
        return [], []
    is_changed = pyarrow.compute.is_in(files.flatten(), value_set=pyarrow.array([*changed]))
    rows = pyarrow.compute.list_parent_indices(files)
    changes = sorted(changed.values())
    is_known = not any(entry.startswith(_UNKNOWN) for entry in changes)
    return rows.filter(is_changed).unique().to_pylist(), changes if is_known else None


def _present_entry(name: str) -> str:
    try:
        return file_entry((name, os.stat(name)))
    except (OSError, ValueError):  # ValueError: a null byte
        return file_entry((name, None))
