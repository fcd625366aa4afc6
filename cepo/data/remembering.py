"""Remembers what a check of a source found, under everything that it depends on, and recalls it at a later start."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import sys
from collections.abc import Sequence
from datetime import date
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import cepo
from cepo.data.cache import content_digest, read_entry, write_entry
from cepo.data.measures import RowMeasures, decoded
from cepo.data.row_settings import RowRules
from cepo.data.sources import local_source
from cepo.data.table import Rows
from cepo.errors import CepoError
from cepo.files.safe_files import hub_folder
from cepo.files.trees import Tree, is_mapping
from cepo.models.processing import Processing

logger = logging.getLogger(__name__)

_KIND = "checks"
_FOLDERS_OF_CODE = ("data", "files", "models")
_LIBRARIES = (
    *("av", "datasets", "jinja2", "numpy", "pillow", "pyarrow"),
    *("qwen-vl-utils", "tokenizers", "torchvision", "transformers"),
)
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".ckpt")


def identity_of(
    source: str, rows: Rows, rules: RowRules, processing: Processing, *, before: Sequence[str] | None
) -> str | None:
    """Returns a digest of all that the check of a source's rows depends on, except the files that rows name.

    These are the content of its files in their order and the part that is read, the settings, the files of tokenizer,
    processor and chat template, the code of this package that reads rows, and the versions of the libraries. None if the
    source has no files, or if one cannot be read or has changed since `before`, its `file_digests` before it was opened.
    """
    code = _code_digest()  # not below: an error here would be a fault of this package, not of the data
    try:
        facts: Tree = {
            "source": _source_facts(rows),
            "settings": _with_contents(rules),
            "processing": _processing_facts(processing),
            "code": code,
            "libraries": {name: _version(name) for name in _LIBRARIES} | {"python": sys.version},
        }
    except (CepoError, OSError) as error:
        logger.info("the results of checking %s are not remembered: %s", source, error)
        return None
    if facts["source"] is None or facts["processing"] is None:
        return None
    if before is not None and before != facts["source"]["content"]:
        return None
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()


def recall(identity: str, num_rows: int) -> RowMeasures | None:
    """Returns what was found of a source with this identity; None if it is not known."""
    content = read_entry(_KIND, identity)
    if content is None:
        return None
    try:
        return decoded(content, num_rows)
    except ValueError as error:
        logger.info("a remembered check is not used, because it is damaged: %s", error)
        return None


def remember(identity: str, measures: RowMeasures) -> None:
    """Keeps what was found, for later starts."""
    write_entry(_KIND, identity, measures.encoded())


def file_digests(source: str) -> list[str] | None:
    """Returns the digests of a local source's files in order; None for a source on the hub. Raises as `read_source`."""
    local = local_source(source)
    return None if local is None else [content_digest(file, within=local.within) for file in local.files]


def _source_facts(rows: Rows) -> Tree | None:
    """Returns digests of the files of a source and the part of their rows that is read; None if there are no files."""
    if not rows.files:
        return None
    return {
        "content": [content_digest(file) for file in rows.files],
        "endings": [file.suffix for file in rows.files],
        "begin": rows.begin,
        "rows": len(rows),
    }


def _with_contents(rules: RowRules) -> Tree:
    """Returns the rules with the content of the file and the place of the folder that they name."""
    settings: Tree = dataclasses.asdict(rules)
    if rules.format_prompt is not None:
        settings["format_prompt"] = content_digest(Path(rules.format_prompt))
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
    digests = {str(file.relative_to(folder)): content_digest(file, within=within) for file in files}
    reads_the_date = any("strftime_now" in template for template in _templates(processing))
    today = date.today().isoformat() if reads_the_date else None
    settings = {name: value for name, value in arguments.items() if name != "path"}
    return [digests, settings, today]


def _model_folder(path: str) -> Path | None:
    """Returns the folder of a model, which for a name on the hub is that of the revision that was loaded."""
    if Path(path).is_dir():
        return Path(path)
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(path, "config.json")
    return Path(config).parent if isinstance(config, str) else None


def _templates(processing: Processing) -> Sequence[str]:
    template: object = processing.tokenizer.chat_template
    templates = template.values() if is_mapping(template) else [template]
    return [str(text) for text in templates]


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
