"""Finds the files that settings name, from any folder, in a checkout or in a wheel."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator

import cepo
from cepo.errors import did_you_mean

PACKAGE_FOLDER = Path(cepo.__file__).resolve().parent
_IN_WHEEL = PACKAGE_FOLDER / "shipped"
SHIPPED_FOLDER = _IN_WHEEL if _IN_WHEEL.is_dir() else PACKAGE_FOLDER.parent
"""The folder with `configs/`, `examples/` and `scripts/`: inside an installed wheel, else the checkout."""
MICROGEO_MODELS = ("microgeo:model",)
MICROGEO_DATA = ("microgeo:train", "microgeo:validation")
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")

# Folders whose files can be named by relative paths from any working directory, and what lies around them.
_SHIPPED_FOLDERS = {"configs": SHIPPED_FOLDER, "examples": SHIPPED_FOLDER, "cepo": PACKAGE_FOLDER.parent}


def find_path(path: str) -> Path | None:
    """Returns the file or folder that `path` names, or None.

    A path is relative to the working directory. If it does not exist there and starts with `configs/`, `cepo/` or
    `examples/`, the file that was shipped with the package is taken.
    """
    in_working_directory = without_user(path)
    if _exists(in_working_directory):
        return in_working_directory
    parts = in_working_directory.parts
    if not parts or parts[0] not in _SHIPPED_FOLDERS:
        return None
    shipped = _SHIPPED_FOLDERS[parts[0]] / in_working_directory
    return shipped if _exists(shipped) else None


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
    place = find_path(path)
    if place is None or place == Path(path):
        return path
    return str(place)


def shipped_name(path: str) -> str:
    """Returns the name by which `find_path` finds a shipped file from any folder; other paths are unchanged."""
    for folder, parent in _SHIPPED_FOLDERS.items():
        if Path(path).is_relative_to(parent / folder):
            return Path(path).relative_to(parent).as_posix()
    return path


def with_file(name: str, change: Callable[[str], str]) -> str:
    """Returns the name of a file, or `file.py:function`, with `change` applied to the file."""
    file, colon, function = name.rpartition(":")
    if not file.endswith(".py"):
        return change(name)
    return change(file) + colon + function


def portable(names: str) -> str:
    """Returns a setting's text with shipped files, also in `file.py:function` or between commas, under their `shipped_name`.

    A record with such names holds in any checkout and on any machine. Folders keep their path: a model's is not looked for
    among the shipped files.
    """

    def shipped_file(path: str) -> str:
        return shipped_name(path) if os.path.isfile(path) else path

    return ",".join(with_file(name, shipped_file) for name in names.split(","))


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
    return _first_file(without_user(path), SHIPPED_FOLDER / path, *_shipped_configs(path))


def find_base_file(folder: Path, name: str) -> Path | None:
    """Returns the file that a configuration in `folder` names by its key `base`: relative to it, else a shipped one."""
    return _first_file(folder / name, *_shipped_configs(name))


def _shipped_configs(name: str) -> tuple[Path, Path]:
    folder = SHIPPED_FOLDER / "configs"
    return folder / name, folder / f"{name}.yaml"


def _first_file(*candidates: Path) -> Path | None:
    return next((path for path in candidates if _exists(path) and path.is_file()), None)


def config_names() -> list[str]:
    """Returns the names of the shipped configurations, such as `geo3k/cepo`."""
    folder = SHIPPED_FOLDER / "configs"
    return sorted(file.relative_to(folder).with_suffix("").as_posix() for file in folder.rglob("*.yaml"))


def near_config_name(path: str) -> str:
    """Returns " Did you mean 'NAME'?" for a shipped configuration whose name is near; else empty."""
    name = path.removeprefix("configs/").removesuffix(".yaml")
    return did_you_mean(name, config_names())


def searched(path: str) -> str:
    """Describes for an error message where a path was looked up."""
    if without_user(path).is_absolute():
        return f"looked for {without_user(path)}" if path.startswith("~") else "an absolute path"
    if Path(path).parts[:1] and Path(path).parts[0] in _SHIPPED_FOLDERS:
        return f"looked in the working directory {Path.cwd()} and among the shipped files in {SHIPPED_FOLDER}"
    return f"looked in the working directory {Path.cwd()}"


def split_function(name: str) -> tuple[str, str]:
    """Splits `file.py:function` into file and function; the function is `main` if none is named."""
    if name.endswith(".py"):
        return name, "main"
    file, _, function = name.rpartition(":")
    return file, function
