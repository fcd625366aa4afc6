"""Where a file named in the configuration lies, so that a command gives the same run from any folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator

import cepo

PACKAGE_FOLDER = Path(cepo.__file__).resolve().parent
REPOSITORY_FOLDER = PACKAGE_FOLDER.parent

# The folders of the repository whose files may be named without their location.
_SHIPPED_FOLDERS = ("configs", "cepo", "examples")


def find_path(path: str) -> Path | None:
    """The file or folder that `path` names, or None.

    A path is relative to the working directory. One that does not exist there and starts with `configs/`, `cepo/` or
    `examples/` is looked up in the repository.
    """
    given = without_user(path)
    if _exists(given):
        return given
    shipped = given.parts[:1] and given.parts[0] in _SHIPPED_FOLDERS
    if shipped and _exists(REPOSITORY_FOLDER / given):
        return REPOSITORY_FOLDER / given
    return None


def without_user(path: str) -> Path:
    """The path with `~` resolved; as it is where that names an unknown user."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


def _exists(path: Path) -> bool:
    """Whether there is such a file or folder; a path that no file system takes (too long, a null byte) names none."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def located(path: str) -> str:
    """`path` itself where it exists or cannot be found; the absolute path where only the repository has it."""
    found = find_path(path)
    return path if found is None or found == Path(path) else str(found)


File = Annotated[str, AfterValidator(located)]
"""A setting that names a file or a folder; a shipped one that the working directory does not have by its whole path."""


def located_data(name: str) -> str:
    """`located` for a data set, which may have a split behind an `@`; hub names and embedded ones stay as they are."""
    if find_path(name) is not None:
        return located(name)
    path, separator, split = name.partition("@")
    return f"{located(path)}{separator}{split}"


def find_config_file(path: str) -> Path | None:
    """The YAML file of `config=`: relative to the working directory, else to the repository; None where neither has it."""
    for candidate in (without_user(path), REPOSITORY_FOLDER / path):
        if _exists(candidate) and candidate.is_file():
            return candidate
    return None


def searched(path: str) -> str:
    """The places in which a path was looked for, in words for an error."""
    if Path(path).is_absolute():
        return "an absolute path"
    return f"looked in the working directory {Path.cwd()} and, for shipped files, in {REPOSITORY_FOLDER}"


def split_function(name: str) -> tuple[str, str]:
    """The file and the function of `file.py:function`; the function is `main` where none is named."""
    if name.endswith(".py"):
        return name, "main"
    file, _, function = name.rpartition(":")
    return file, function
