"""Implements `cepo init`: copies the shipped configurations, templates, examples and launchers."""

from __future__ import annotations

import shutil
from pathlib import Path

from cepo.config.paths import SHIPPED_FOLDER
from cepo.errors import ConfigError


def copy_shipped(folder: Path) -> tuple[str, ...]:
    """Copies the shipped files to a new folder and returns their names; raises `ConfigError` if the folder has files."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} exists and is not an empty folder; name a new one")
    names = ("configs", "examples", "scripts/geo3k", "scripts/common.sh")
    for name in names:
        source = SHIPPED_FOLDER / name
        copy = folder / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, copy, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, copy)
    return names
