"""Claims a folder for one measurement, which can then be resumed with the same settings only."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from cepo.config import RunConfig
from cepo.errors import ConfigError, ForeignFileError
from cepo.foreign_files import damaged_as, irregular_file, read_json
from cepo.tracking.run_folder import write_atomically
from cepo.trees import leaves

FILE = "measurement.json"


def claim_folder(folder: Path, own: Mapping[str, Any], config: RunConfig) -> None:
    """Writes the settings that the folder's samples depend on, or compares them with those that the folder has.

    Raises:
        ConfigError: the settings differ, or the folder holds something other than a measurement.
        DataError: the folder's settings cannot be read.
    """
    worker = config.worker
    settings = {
        **own,
        "data": dataclasses.asdict(config.data),
        "worker.actor.model": dataclasses.asdict(worker.actor.model),
        "worker.rollout": dataclasses.asdict(worker.rollout),
        "worker.reward": dataclasses.asdict(worker.reward),
        "trainer.seed": config.trainer.seed,
    }
    flat = json.loads(json.dumps(dict(leaves(settings)), default=str))
    path = folder / FILE
    if (irregular := irregular_file(folder)) is not None:
        raise ForeignFileError(irregular, "is a link, a pipe or a device; give a new folder (--out)")
    if path.is_file():
        with read_whole(path):
            before: dict[str, Any] = read_json(path, dict, within=folder)
        other = [key for key in sorted({*flat, *before}) if flat.get(key) != before.get(key)]
        if other:
            raise ConfigError(
                f"--out {folder} holds a measurement with other settings: {', '.join(other[:5])}; give the same settings "
                "to resume it, or a new folder"
            )
        return
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"--out {folder} does not hold a measurement; give a new folder")
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(flat, indent=1) + "\n")


def read_whole(path: Path) -> AbstractContextManager[None]:
    """Returns a context for reading a file of the folder, which raises `DataError` if the file is damaged."""
    return damaged_as(path, "is damaged, and its measurement cannot go on; give a new folder (--out)")
