"""Checks that the files, data and models that settings name exist, and explains which do not."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cepo.config.paths import HUB_NAME, MICROGEO_DATA, MICROGEO_MODELS, find_path, searched, split_source
from cepo.errors import ConfigError, ForeignFileError, did_you_mean
from cepo.files.foreign import read_text
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
    found = find_path(str(path))
    if found is None or not found.is_file():
        raise ConfigError(f"{key}={path}: there is no such file ({searched(str(path))}).")
    try:
        read_text(found)
    except ForeignFileError as error:
        raise ConfigError(f"{key}={path}: this file {error.fault}; accepted: text in UTF-8.") from error


def require_folder(key: str, path: str | None) -> None:
    if path is not None and not ((found := find_path(path)) and found.is_dir()):
        raise ConfigError(f"{key}={path}: there is no such folder.")


def _is_embedded(key: str, name: str, known: Sequence[str]) -> bool:
    """Returns whether a part of the built-in toy task is named; raises `ConfigError` if it has none of that name."""
    if not name.startswith("microgeo:"):
        return False
    if name not in known:
        near = did_you_mean(name, known)
        raise ConfigError(f"{key}={name}: unknown part of the built-in toy task.{near} Known: {', '.join(known)}.")
    return True


def require_data(key: str, name: str) -> None:
    if _is_embedded(key, name, MICROGEO_DATA) or (name and find_path(name) is not None):
        return
    path, split = split_source(name)
    if (split is not None and (not split or "@" in split)) or not path:
        raise ConfigError(
            f"{key}={name!r} must have the form name@split with one '@', or be a path; single commas separate several."
        )
    if find_path(path) is None and (path.endswith(_DATA_ENDINGS) or not HUB_NAME.fullmatch(path)):
        raise ConfigError(f"{key}={name}: not found ({searched(path)}); it is also not a hub name (org/name@split).")


def require_model(key: str, name: str | None) -> None:
    """Raises `ConfigError` if a model does not exist, is a file, a checkpoint of a run, or an adapter alone."""
    if name is None or _is_embedded(key, name, MICROGEO_MODELS):
        return
    found = find_path(name)
    if found is None:
        if not HUB_NAME.fullmatch(name):
            raise ConfigError(f"{key}={name}: not found ({searched(name)}); it is also not a hub name (org/name).")
        return
    if not found.is_dir():
        raise ConfigError(f"{key}={name} is a file; a model is a folder with config.json and weights.")
    checkpoint, is_adapter = last_checkpoint(found), (found / "adapter_config.json").is_file()
    is_model = key.endswith("tokenizer_path") or (found / "config.json").is_file()
    if not is_model and (checkpoint is not None or is_adapter):
        kind = "an adapter without its model" if checkpoint is None else "a checkpoint of a run, not a model"
        resume = "" if checkpoint is None else f", or continue that run with trainer.load_checkpoint_path={checkpoint}"
        raise ConfigError(
            f"{key}={name} is {kind}. Export it with `cepo merge --checkpoint {checkpoint or found} --out FOLDER` and give "
            f"FOLDER{resume}."
        )


def require_weights(model_path: str) -> None:
    """Raises `ConfigError` if a local model has no configuration or no weights. A check of the settings needs neither."""
    folder = find_path(model_path)
    if folder is None:
        return
    kinds = {"config.json": ("config.json",), "weights (*.safetensors or *.bin)": ("*.safetensors", "*.bin")}
    for what, patterns in kinds.items():
        if not any(True for pattern in patterns for _ in folder.glob(pattern)):
            raise ConfigError(
                f"worker.actor.model.model_path={model_path} has no {what}; give a folder with a whole Hugging Face checkpoint, "
                "or a hub name org/name."
            )
