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
    found = [path for step, path in checkpoint_folders(folder).items() if step > (resumed_step or 0)]
    if resumed_step is None:
        found += [folder / name for name in _RECORDS if (folder / name).exists()]
    if not found:
        return
    names = (folder / f"earlier_run_{number}" for number in itertools.count(1))
    aside = next(name for name in names if not name.exists())
    aside.mkdir()
    for path in found:
        path.rename(aside / path.name)
    _log.info("%d records and checkpoints of an earlier run in %s were moved to %s", len(found), folder, aside.name)
