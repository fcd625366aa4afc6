"""Checks a model folder, which may be a stranger's, before transformers reads it.

Its files are data. They name no other file, no program, and no class but those of the supported families, and their
numbers are possible (`cepo.models.folder_values`). The tokenizer's file is checked by `cepo.models.tokenizer_check`.
Names of the hub are not checked: the user has chosen such a name, and the hub's client writes only regular files.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from cepo.errors import DataError
from cepo.files.safe_files import LARGEST_JSON, hub_folder, open_regular, read_json
from cepo.files.trees import Fields, Tree, is_list, is_mapping
from cepo.models import folder_values
from cepo.models.families import FAMILIES, TOKENIZERS, is_part, processors_of

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
WEIGHTS_INDEX = "model.safetensors.index.json"
TOKENIZER = "tokenizer.json"
_ADAPTER = "adapter_config.json"
_MISTRAL = "tekken.json"
_TOKENIZER_CONFIG = "tokenizer_config.json"
_SPECIAL_TOKENS = "special_tokens_map.json"
_ADDED_TOKENS = "added_tokens.json"
_PROCESSORS = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")
_CHECKED = (
    CONFIG, GENERATION_CONFIG, _TOKENIZER_CONFIG, _SPECIAL_TOKENS, *_PROCESSORS, "chat_template.json", _ADDED_TOKENS,
)  # fmt: skip
"""The JSON files that transformers reads, except the tokenizer's own."""
_TIED = "lm_head.weight"
"""A weight that an index may name though no file has it; a head that is not tied must exist (`weights_check`)."""
_COPIED = (".json", ".jinja", ".txt", ".model")
"""Files whose content a merge copies into its own folder. Weights may be links to another disk."""

_NAMES_OF_FILES = re.compile(r".*_(file|files|path|paths|dir|folder)|init_inputs|transformers_weights|vocab|merges")
"""Entries that make transformers open a file."""
_NAMES_OF_CODE = ("auto_map", "custom_pipelines", "custom_generate")
_HARMLESS_NAMES = re.compile(
    r"\w*name_or_path|.*_tokens?|added_tokens_decoder|content|template|special_tokens_map_file"
)
"""Entries with a text that nothing opens: a token may look like a path, and folders say where they once were."""
_PATH = re.compile(r"[/~\\]|[A-Za-z]:[/\\]|.*://|(.*[/\\])?\.\.([/\\]|$)")

_READERS = {
    "processor_class": ("Processor",),
    "image_processor_type": ("ImageProcessor",),
    "feature_extractor_type": ("ImageProcessor", "FeatureExtractor", "AudioFeatureExtractor"),
    "video_processor_type": ("VideoProcessor",),
}
"""The entries that name classes of processors, and the ends of these names."""
_SUPPORTED = {kind for family in FAMILIES for kind in family.model_types}


def check_model_folder(path: str, *, trusted: bool = False) -> None:
    """Raises DataError unless a folder's files are regular, complete as far as its index says, and plain data.

    If the model is `trusted` to run its own code, its files may name other classes and programs.
    """
    folder = Path(path)
    if not folder.is_dir():
        return
    for file in (*folder.iterdir(), *folder.glob("additional_chat_templates/*")):
        if file.is_dir():
            continue
        if file.suffix in _COPIED:
            opened = open_regular(file, within=hub_folder(folder), largest=LARGEST_JSON)
        else:
            opened = open_regular(file, within=None, largest=None)
        opened.close()
    if (folder / CONFIG).exists() and (folder / _ADAPTER).exists():
        raise DataError(
            f"{folder / _ADAPTER} would change the model whose {CONFIG} is beside it; merge the adapter into the model, or "
            "move it to a folder of its own"
        )
    if (folder / _MISTRAL).exists() and not trusted:
        raise DataError(
            f"{folder / _MISTRAL} would be read in place of {TOKENIZER}, with patterns of its own; remove it"
        )
    files = {name: read_json(folder / name, dict) for name in _CHECKED if (folder / name).exists()}
    config = files.get(CONFIG, {})
    for name, tree in files.items():
        _check_names(folder / name, tree, config, trusted=trusted)
    _check_values(folder, files, config, trusted=trusted)
    check_index(folder)


def check_index(folder: Path) -> None:
    """Raises DataError unless the folder's index, if there is one, maps weights to files of the folder that have them."""
    from safetensors import SafetensorError, safe_open

    index = folder / WEIGHTS_INDEX
    if not index.exists():
        return
    weights_of_files = _weights_of_files(read_json(index, dict).get("weight_map"))
    if not weights_of_files:
        raise DataError(f"{index} does not map weights to files of its folder")
    for file, weights in sorted(weights_of_files.items()):
        if not file.endswith(".safetensors"):
            raise DataError(f"{index} names {file[:100]!a}, which is no file of safetensors")
        try:
            with safe_open(folder / file, "pt") as tensors:
                missing = sorted(weights - {*tensors.keys(), _TIED})
        except (OSError, SafetensorError, ValueError) as error:
            raise DataError(f"{folder / file}, which {WEIGHTS_INDEX} names, cannot be read: {error}") from error
        if missing:
            raise DataError(f"{folder / file} lacks {len(missing)} weights of the index, such as {missing[0][:100]!a}")


def _weights_of_files(file_of_weight: object) -> dict[str, set[str]]:
    """Returns the weights of each file of an index; none if it does not map weights to files of its own folder."""
    weights_of_files: dict[str, set[str]] = {}
    if not is_mapping(file_of_weight):
        return {}
    for weight, file in file_of_weight.items():
        is_inside = isinstance(file, str) and Path(file).name == file
        if not is_inside:
            return {}
        weights_of_files.setdefault(file, set()).add(weight)
    return weights_of_files


def _check_names(file: Path, tree: Fields, config: Fields, *, trusted: bool) -> None:
    """Refuses entries that name files, programs and classes."""
    for name, value in entries(tree):
        if value is None or name == "chat_template":
            continue
        # Phi-3 brings code for programs without its classes. transformers has its own for the supported families.
        is_unused = value is config.get("auto_map") and config.get("model_type") in _SUPPORTED
        if name in _NAMES_OF_CODE and not trusted and not is_unused:
            raise DataError(f"{file}: {name} names code that comes with the model; trust_remote_code is off")
        if not trusted:
            _check_class(file, name, value, config)
        if _HARMLESS_NAMES.fullmatch(name):
            continue
        if name.endswith("_implementation") and not trusted and re.fullmatch(r"\w*", str(value)) is None:
            raise DataError(f"{file}: {name} is {str(value)[:100]!a}, which names code to download")
        if _NAMES_OF_FILES.fullmatch(name):
            raise DataError(
                f"{file}: {name} names a file to open; remove it, since the folder's own files are found by name"
            )
        texts = value if is_list(value) else [value]
        for text in texts:
            if isinstance(text, str) and _PATH.match(text):
                raise DataError(f"{file}: {name} is {text[:100]!a}, which leads out of the folder; remove it")


def _check_class(file: Path, name: str, value: object, config: Fields) -> None:
    """Refuses an entry that names another class than those of the supported families."""
    if name in _READERS:
        known = []
        for start in processors_of(config.get("model_type")):
            known += [start + end for end in _READERS[name]]
    elif name == "tokenizer_class":
        known = list(TOKENIZERS)
    elif name == "backend":
        known = ["tokenizers"]
    else:
        return
    # transformers has variants of a class under names with these endings.
    is_known = isinstance(value, str) and re.sub("(Fast|Pil)$", "", value) in known
    if not is_known:
        raise DataError(
            f"{file}: {name} is {str(value)[:100]!a}, which no supported family has; accepted: {', '.join(known)}"
        )


def _check_values(folder: Path, files: Fields, config: Fields, *, trusted: bool) -> None:
    if CONFIG in files:
        folder_values.check_config(folder / CONFIG, config)
        if not trusted:
            _check_parts(folder / CONFIG, config)
    if GENERATION_CONFIG in files:
        folder_values.check_generation(folder / GENERATION_CONFIG, files[GENERATION_CONFIG], config)
    for name in _PROCESSORS:
        if name in files:
            folder_values.check_processor(folder / name, files[name], config)
    if _TOKENIZER_CONFIG in files:
        folder_values.check_tokenizer_config(folder / _TOKENIZER_CONFIG, files[_TOKENIZER_CONFIG])
    if _SPECIAL_TOKENS in files:
        strange = [name for name in files[_SPECIAL_TOKENS] if not str(name).endswith(("_token", "_tokens"))]
        if strange:
            raise DataError(f"{folder / _SPECIAL_TOKENS}: {strange[0][:100]!a} is not the name of a token")
    for index in files.get(_ADDED_TOKENS, {}).values():
        if type(index) is not int:
            raise DataError(f"{folder / _ADDED_TOKENS} does not map tokens to their numbers")


def _check_parts(file: Path, config: Fields) -> None:
    """Refuses other text models and towers in a model of a supported family; `family_of` refuses other families."""
    if config.get("model_type") not in _SUPPORTED:
        return
    for name, part in config.items():
        kind = part.get("model_type") if is_mapping(part) else None
        is_supported = isinstance(kind, str) and is_part(kind)
        if kind is not None and not is_supported:
            raise DataError(f"{file}: {name}.model_type is {str(kind)[:100]!a}, which no supported family has")


def entries(tree: object) -> Iterator[tuple[str, Any]]:
    """Yields the entries of all mappings in a JSON file."""
    if is_mapping(tree):
        for name, value in tree.items():
            yield str(name), value
            yield from entries(value)
    elif is_list(tree):
        for value in tree:
            yield from entries(value)


def mappings(tree: object) -> Iterator[Tree]:
    """Yields all mappings in a JSON file."""
    values: Iterable[object] = ()
    if is_mapping(tree):
        yield dict(tree)
        values = tree.values()
    elif is_list(tree):
        values = tree
    for value in values:
        yield from mappings(value)
