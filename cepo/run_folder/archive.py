"""Moves the records of an earlier run out of a folder that a new run uses."""

from __future__ import annotations

import itertools
import logging
from pathlib import Path

from cepo.run_folder.layout import (
    CONFIG_FILE,
    ENVIRONMENT_FILE,
    RECORDS,
    TENSORBOARD_FOLDER,
    TRACKERS_FILE,
    checkpoint_folders,
)

_log = logging.getLogger(__name__)
# The folders of external trackers may hold several runs, so they remain; only this run's identifiers are moved.
_RECORDS = (*RECORDS, CONFIG_FILE, ENVIRONMENT_FILE, TENSORBOARD_FOLDER, TRACKERS_FILE)


def set_aside_earlier_run(folder: Path, *, resumed_step: int | None) -> None:
    """Moves what this run does not continue into a new subfolder `earlier_run_<n>`, so that no run resumes from it.

    These are the checkpoints after `resumed_step` and, if it is None, all checkpoints and records.
    """
    last_own_step = resumed_step or 0
    discontinued = [path for step, path in checkpoint_folders(folder).items() if step > last_own_step]
    if resumed_step is None:
        discontinued += [folder / name for name in _RECORDS if (folder / name).exists()]
    if not discontinued:
        return
    aside = _new_folder(folder)
    for path in discontinued:
        path.rename(aside / path.name)
    _log.info(
        "%d records and checkpoints of an earlier run in %s were moved to %s", len(discontinued), folder, aside.name
    )


def _new_folder(run_folder: Path) -> Path:
    for number in itertools.count(1):
        folder = run_folder / f"earlier_run_{number}"
        if not folder.exists():
            folder.mkdir()
            return folder
    raise AssertionError("the numbers do not end")
