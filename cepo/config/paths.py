"""Finds the files, data and models that a configuration names, from any folder, and explains which do not exist."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator

import cepo
from cepo.errors import ConfigError, ForeignFileError, did_you_mean
from cepo.files.foreign import read_text
from cepo.run_folder.layout import last_checkpoint

PACKAGE_FOLDER = Path(cepo.__file__).resolve().parent
_IN_WHEEL = PACKAGE_FOLDER / "shipped"
SHIPPED_FOLDER = _IN_WHEEL if _IN_WHEEL.is_dir() else PACKAGE_FOLDER.parent
"""The folder with `configs/`, `examples/` and `scripts/`: inside an installed wheel, else the checkout."""
MICROGEO_MODELS = ("microgeo:model",)
MICROGEO_DATA = ("microgeo:train", "microgeo:validation")
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_DATA_ENDINGS = (".parquet", ".json", ".jsonl", ".csv", ".tsv", ".arrow")

# Folders whose files can be named by relative paths from any working directory, and what lies around them.
_SHIPPED_FOLDERS = {"configs": SHIPPED_FOLDER, "examples": SHIPPED_FOLDER, "cepo": PACKAGE_FOLDER.parent}


def find_path(path: str) -> Path | None:
    """Returns the file or folder that `path` names, or None.

    A path is relative to the working directory. If it does not exist there and starts with `configs/`, `cepo/` or
    `examples/`, the file that was shipped with the package is taken.
    """
    given = without_user(path)
    if _exists(given):
        return given
    around = _SHIPPED_FOLDERS.get(given.parts[0]) if given.parts else None
    return around / given if around is not None and _exists(around / given) else None


def without_user(path: str) -> Path:
    """Returns the path with `~` resolved; unchanged if it names an unknown user."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


def _exists(path: Path) -> bool:
    """Returns whether the path exists; False for a path that no file system accepts (too long, a null byte)."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def located(path: str) -> str:
    """Returns an absolute path if only the package has the file or folder, else `path` itself."""
    found = find_path(path)
    return path if found is None or found == Path(path) else str(found)


def shipped_name(path: str) -> str:
    """Returns the name by which `find_path` finds a shipped file from any folder; other paths are unchanged."""
    for folder, around in _SHIPPED_FOLDERS.items():
        if Path(path).is_relative_to(around / folder):
            return Path(path).relative_to(around).as_posix()
    return path


File = Annotated[str, AfterValidator(located)]
"""A setting that names a file or a folder, made absolute if only the package has it."""


def located_data(name: str) -> str:
    """Applies `located` to a data set, which may have a split after an `@`; hub and embedded names are unchanged."""
    if find_path(name) is not None:
        return located(name)
    path, split = split_source(name)
    return located(path) if split is None else f"{located(path)}@{split}"


def split_source(name: str) -> tuple[str, str | None]:
    """Returns the path or hub name of a data set and its split, which may stand after an `@`; None without one.

    A path that exists may have an `@` in it; the split is then what follows the last one behind the path.
    """
    if find_path(name) is not None:
        return name, None
    path, separator, split = name.rpartition("@")
    if separator and find_path(path) is not None:
        return path, split
    path, separator, split = name.partition("@")
    return path, split if separator else None


def find_config_file(path: str) -> Path | None:
    """Returns the YAML file of `config=path`, or None.

    It is looked up relative to the working directory, then among the shipped files, there also by its name below
    `configs/` without the ending: `geo3k/cepo`.
    """
    shipped = SHIPPED_FOLDER / "configs"
    for candidate in (without_user(path), SHIPPED_FOLDER / path, shipped / path, shipped / f"{path}.yaml"):
        if _exists(candidate) and candidate.is_file():
            return candidate
    return None


def searched(path: str) -> str:
    """Describes for an error message where a path was looked up."""
    if Path(path).is_absolute():
        return "an absolute path"
    return (
        f"looked in the working directory {Path.cwd()} and among the shipped files in {SHIPPED_FOLDER}, whose names are such "
        "as geo3k/cepo"
    )


def split_function(name: str) -> tuple[str, str]:
    """Splits `file.py:function` into file and function; the function is `main` if none is named."""
    if name.endswith(".py"):
        return name, "main"
    file, _, function = name.rpartition(":")
    return file, function


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
    """Returns whether a part of the embedded world is named; raises `ConfigError` if it has none of that name."""
    if not name.startswith("microgeo:"):
        return False
    if name not in known:
        near = did_you_mean(name, known)
        raise ConfigError(f"{key}={name}: unknown part of the embedded world.{near} Known: {', '.join(known)}.")
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
        raise ConfigError(
            f"{key}={name}: there is no such file or folder ({searched(path)}), or hub name org/name@split."
        )


def require_model(key: str, name: str | None) -> None:
    """Raises `ConfigError` if a model does not exist, is a file, a checkpoint of a run, or an adapter alone."""
    if name is None or _is_embedded(key, name, MICROGEO_MODELS):
        return
    found = find_path(name)
    if found is None:
        if not HUB_NAME.fullmatch(name):
            raise ConfigError(
                f"{key}={name}: there is no such folder ({searched(name)}), and it is no hub name org/name."
            )
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


def copy_shipped(folder: Path) -> tuple[str, ...]:
    """Copies the shipped files to a new folder and returns their names; raises `ConfigError` if the folder has files."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} exists and is not an empty folder; name a new one")
    names = ("configs", "examples", "scripts/geo3k", "scripts/common.sh")
    for name in names:
        source, copy = SHIPPED_FOLDER / name, folder / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, copy, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, copy)
    return names
