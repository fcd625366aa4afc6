"""Checks a model folder, which may be a stranger's, before transformers reads it.

Its files are data: they run no code, read no other file, and open no host. They name no other file, address or program,
and no class but those of the supported families, each of which reads its own files alone. A folder may waste time or
memory, as any file may. Names of the hub are not checked: the user has chosen such a name, and the hub's client writes
only regular files.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cepo.errors import DataError
from cepo.files.safe_files import LARGEST_JSON, hub_folder, open_regular, read_json
from cepo.files.trees import Fields, is_list, is_mapping
from cepo.models.families import FAMILIES, TOKENIZERS, is_part, processors_of

CONFIG = "config.json"
WEIGHTS_INDEX = "model.safetensors.index.json"
_ADAPTER = "adapter_config.json"
_CHECKED = (
    CONFIG, "generation_config.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json", "chat_template.json",
    "audio_tokenizer_config.json",
)  # fmt: skip
"""The JSON files that transformers reads, except the tokenizer's own."""
_COPIED = (".json", ".jinja", ".txt", ".model")
"""Files whose content a merge copies into its own folder. Weights may be links to another disk."""
_TOKENIZER_FILES = {"tokenizer.json", "vocab.json", "tekken.json"}
"""One of which a tokenizer has, or a file that ends in .model."""
_PROCESSOR_FILES = {"preprocessor_config.json", "processor_config.json"}
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")

_NAMES_OF_FILES = re.compile(
    r".*_(file|files|path|paths|dir|folder)|init_inputs|transformers_weights|vocab|merges|audio_tokenizer\w*"
)
"""Entries that make transformers open a file or another model."""
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
    """Raises DataError unless a folder's files are regular and plain data.

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
    if not (folder / CONFIG).exists():
        is_adapter = (folder / _ADAPTER).exists()
        remedy = "; it is an adapter: merge it into its base (cepo merge)" if is_adapter else ""
        raise DataError(f"the folder lacks {CONFIG}{remedy}")
    files = {name: read_json(folder / name, dict) for name in _CHECKED if (folder / name).exists()}
    config = files.get(CONFIG, {})
    for name, tree in files.items():
        _check_names(folder / name, tree, config, trusted=trusted)
    if not trusted:
        _check_parts(folder / CONFIG, config)
    _check_index(folder)


def require_reading_files(folder: Path, *, of_images: bool) -> None:
    """Raises DataError for a folder, such as one of weights alone, that lacks the files of tokenizer or image processor.

    Without them transformers makes a tokenizer that knows no words.
    """
    names = {file.name for file in folder.iterdir()}
    lacking: list[str] = []
    if not names & _TOKENIZER_FILES and not any(name.endswith(".model") for name in names):
        lacking.append("tokenizer.json")
    if of_images and not names & _PROCESSOR_FILES:
        lacking.append("preprocessor_config.json")
    if lacking:
        raise DataError(f"the folder lacks {' and '.join(lacking)}; copy what its model was published with")


def require_weights(folder: Path) -> None:
    """Raises DataError for a folder that lacks weights, or whose weights are pickles alone, which are programs."""
    if (folder / "model.safetensors").exists():  # which transformers prefers to the files of an index
        return
    index = folder / WEIGHTS_INDEX
    names = set(read_json(index, dict)["weight_map"].values()) if index.exists() else set[str]()
    lacking = sorted(name for name in names if not (folder / name).exists())
    if lacking:
        raise DataError(f"the folder lacks {len(lacking)} of {len(names)} files of weights: {', '.join(lacking[:3])}")
    pickles = sorted(file.name for file in folder.iterdir() if file.suffix in _PICKLES)
    if pickles and not names:
        raise DataError(
            f"its weights are pickles ({pickles[0]}), which can run code. Load the model where you trust it, and write it "
            "with save_pretrained, or set worker.actor.model.trust_remote_code=true"
        )
    if not names:
        raise DataError("the folder lacks model.safetensors")


def _check_index(folder: Path) -> None:
    """Raises DataError if the folder's index, which need not exist, names other files than the folder's safetensors."""
    index = folder / WEIGHTS_INDEX
    if not index.exists():
        return
    file_of_weight = read_json(index, dict).get("weight_map")
    if not is_mapping(file_of_weight):
        raise DataError(f"{index} does not map weights to files of its folder")
    for file in file_of_weight.values():
        if not isinstance(file, str) or Path(file).name != file:
            raise DataError(f"{index} does not map weights to files of its folder")
        if not file.endswith(".safetensors"):
            raise DataError(f"{index} names {file[:100]!a}, which is no file of safetensors")


def _check_names(file: Path, tree: Fields, config: Fields, *, trusted: bool) -> None:
    """Refuses entries that name files, programs and classes."""
    for name, value in _entries(tree):
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


def _check_parts(file: Path, config: Fields) -> None:
    """Refuses other text models and towers in a model of a supported family; `family_of` refuses other families."""
    if config.get("model_type") not in _SUPPORTED:
        return
    for name, part in config.items():
        kind = part.get("model_type") if is_mapping(part) else None
        is_supported = isinstance(kind, str) and is_part(kind)
        if kind is not None and not is_supported:
            raise DataError(f"{file}: {name}.model_type is {str(kind)[:100]!a}, which no supported family has")


def _entries(tree: object) -> Iterator[tuple[str, Any]]:
    """Yields the entries of all mappings in a JSON file."""
    if is_mapping(tree):
        for name, value in tree.items():
            yield str(name), value
            yield from _entries(value)
    elif is_list(tree):
        for value in tree:
            yield from _entries(value)
