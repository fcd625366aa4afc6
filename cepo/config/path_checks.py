"""Checks that the files, data and models that settings name exist, and explains which do not."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cepo.config.paths import HUB_NAME, MICROGEO_DATA, MICROGEO_MODELS, find_path, searched, split_source
from cepo.errors import ConfigError, ForeignFileError, near_path
from cepo.files.safe_files import is_lfs_pointer, read_text
from cepo.run_folder.layout import last_checkpoint

_DATA_ENDINGS = (".parquet", ".json", ".jsonl", ".csv", ".tsv", ".arrow")


def check_model_and_data(model_path: str, sources: Sequence[str]) -> None:
    """Raises `ConfigError` if the model or a data set neither exists nor has the form of a hub name."""
    require_model("worker.actor.model.model_path", model_path)
    for source in sources:
        require_data("data", source)


def require_file(key: str, path: str | Path | None) -> None:
    """Raises `ConfigError` if `path` is given and is no file with text in UTF-8; `key` names the setting."""
    if path is None:
        return
    file = find_path(str(path))
    if file is None or not file.is_file():
        raise ConfigError(f"{key}={path}: there is no such file ({searched(str(path))}).{near_path(path)}")
    try:
        read_text(file)
    except ForeignFileError as error:
        raise ConfigError(f"{key}={path}: this file {error.fault}; accepted: text in UTF-8.") from error


def require_folder(key: str, path: str | None) -> None:
    if path is None:
        return
    folder = find_path(path)
    if folder is not None and folder.is_file():
        raise ConfigError(f"{key}={path} is a file; give a folder, such as {folder.absolute().parent}.")
    if folder is None or not folder.is_dir():
        raise ConfigError(f"{key}={path}: there is no such folder ({searched(path)}).{near_path(path)}")


def _is_embedded(key: str, name: str, known: Sequence[str]) -> bool:
    """Returns whether a part of the built-in toy task is named; raises `ConfigError` if it has none of that name."""
    if not name.startswith("microgeo:"):
        return False
    if name not in known:
        slices = " It has no slices: trainer.val_max_samples bounds a validation." if "[" in name else ""
        raise ConfigError(f"{key}={name}: unknown part of the built-in toy task. Known: {', '.join(known)}.{slices}")
    return True


def require_data(key: str, name: str) -> None:
    if _is_embedded(key, name, MICROGEO_DATA) or (name and find_path(name) is not None):
        return
    path, split = split_source(name)
    has_bad_split = split is not None and (not split or "@" in split)
    if has_bad_split or not path:
        raise ConfigError(
            f"{key}={name!r} must have the form name@split with one '@', or be a path; single commas separate several."
        )
    is_hub_name = HUB_NAME.fullmatch(path) is not None and not path.endswith(_DATA_ENDINGS)
    if find_path(path) is None and not is_hub_name:
        hint = near_path(path)
        if "*" in path:
            hint = " A name is no pattern; give a folder, or a list of files."
        elif path.endswith("]"):
            hint = f" A slice stands behind the split: {path.replace('[', '@train[', 1)}."
        raise ConfigError(
            f"{key}={name}: not found ({searched(path)}); it is also not a hub name (org/name@split).{hint}"
        )


def require_model(key: str, name: str | None) -> None:
    """Raises `ConfigError` if a model does not exist, is a file, a checkpoint of a run, or an adapter alone."""
    if name is None or _is_embedded(key, name, MICROGEO_MODELS):
        return
    folder = find_path(name)
    if folder is None:
        if not HUB_NAME.fullmatch(name):
            raise ConfigError(
                f"{key}={name}: not found ({searched(name)}); it is also not a hub name (org/name).{near_path(name)}"
            )
        return
    if not folder.is_dir():
        raise ConfigError(f"{key}={name} is a file; a model is a folder with config.json and weights.")
    if key.endswith("tokenizer_path") or (folder / "config.json").is_file():
        return
    checkpoint = last_checkpoint(folder)
    if checkpoint is not None:
        raise ConfigError(
            f"{key}={name} is a checkpoint of a run, not a model. Export it with `cepo merge --checkpoint {checkpoint} "
            f"--out FOLDER` and give FOLDER, or continue that run with trainer.load_checkpoint_path={checkpoint}."
        )
    if (folder / "adapter_config.json").is_file():
        raise ConfigError(
            f"{key}={name} is an adapter without its model. Export it with `cepo merge --checkpoint {folder} "
            "--out FOLDER` and give FOLDER."
        )


def require_weights(model_path: str) -> None:
    """Raises `ConfigError` if a local model has no configuration or no weights. A check of the settings needs neither."""
    folder = find_path(model_path)
    if folder is None:
        return
    weights = [*folder.glob("*.safetensors"), *folder.glob("*.bin")]
    missing: str | None = None
    if not list(folder.glob("config.json")):
        missing = "config.json"
    elif not weights:
        missing = "weights (*.safetensors or *.bin)"
    pointer = next((file for file in weights if file.is_file() and is_lfs_pointer(file)), None)
    if pointer is not None:
        raise ConfigError(f"{pointer} is a pointer of Git LFS to a file that is not here; git lfs pull gets it.")
    if missing is not None:
        raise ConfigError(
            f"worker.actor.model.model_path={model_path} has no {missing}; give a folder with a whole Hugging Face "
            "checkpoint, or a hub name org/name."
        )
