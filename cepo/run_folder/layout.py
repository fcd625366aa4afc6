"""Names the files and folders of a run folder, finds its checkpoints, and sets an earlier run's aside.

| name | content |
| --- | --- |
| `metrics.jsonl` | one object per step: `{"step": 1, "reward/mean": 0.5, ...}`; step 0 is before training |
| `rollouts/`, `images/` | recorded rollouts and their images, see `cepo.run_folder.trace` |
| `generations.jsonl` | one object per recorded validation sample |
| `config.yaml` | the resolved configuration |
| `environment.json` | a list: versions, commit, devices and command of the start and of every resume |
| `trackers.json` | the identifiers that external trackers gave the run, for resuming |
| `global_step_<N>/` | the checkpoint after step N |
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from pathlib import Path

from cepo.errors import ForeignFileError
from cepo.files.safe_files import irregular_file

logger = logging.getLogger(__name__)

ROLLOUTS_FOLDER = "rollouts"
IMAGES_FOLDER = "images"

CHECKPOINT_TRACKER_FILE = "checkpoint_tracker.json"
CHECKPOINT_PREFIX = "global_step_"
"""The beginning of a checkpoint's folder; its step follows."""
ACTOR_FOLDER = "actor"
"""The folder of a checkpoint with the policy's weights."""
STATE_FILE = "trainer_state.json"
FILES_FILE = "files.json"

LOCK_FILE = "run.lock"
LOGS_FOLDER = "logs"
RECORDS_FORMAT = 1
"""The version of the run folder's format; entries of `environment.json` without a version have 1."""
METRICS_FILE = "metrics.jsonl"
GENERATIONS_FILE = "generations.jsonl"
CONFIG_FILE = "config.yaml"
ENVIRONMENT_FILE = "environment.json"
TENSORBOARD_FOLDER = "tensorboard"
TRACKERS_FILE = "trackers.json"
MLFLOW_FOLDER = "mlflow"
SWANLAB_FOLDER = "swanlab"
_WANDB_FOLDER = "wandb"
RECORDS = (METRICS_FILE, GENERATIONS_FILE, ROLLOUTS_FOLDER, IMAGES_FOLDER)
# The folders of external trackers may hold several runs, so they remain; only this run's identifiers are moved.
_SET_ASIDE = (*RECORDS, CONFIG_FILE, ENVIRONMENT_FILE, TENSORBOARD_FOLDER, TRACKERS_FILE)
_WRITTEN = (LOCK_FILE, LOGS_FOLDER, *RECORDS, TENSORBOARD_FOLDER, MLFLOW_FOLDER, SWANLAB_FOLDER, _WANDB_FOLDER)
STAGES = ("read", "generate", "reward", "score", "teachers", "estimate", "update", "sync", "validate", "save")
"""The stages of a step in the order in which they run; each has a metric `timing_s/<stage>`."""


def require_own_records(folder: Path, names: Sequence[str] = _WRITTEN) -> None:
    """Raises `ForeignFileError` if a run would write through a link, into a pipe or into a device in its folder.

    Files that are replaced as a whole do not count, and neither do the links that W&B makes in its folder.
    """
    for name in names:
        path = folder / name
        is_regular = path.is_file() or path.is_dir() or not path.exists()
        irregular = None if is_regular and not path.is_symlink() else path
        if irregular is None and name != _WANDB_FOLDER:
            irregular = irregular_file(path)
        if irregular is not None:
            raise ForeignFileError(irregular, "is a link, a pipe or a device, and the run would write there; remove it")


def run_folder_of(path: Path) -> Path:
    """Returns the run folder that a path in it names, such as `global_step_20` or `metrics.jsonl`; else the path itself."""
    is_inside = path.name.startswith(CHECKPOINT_PREFIX) or path.name == METRICS_FILE
    if is_inside and (path.parent / METRICS_FILE).is_file():
        return path.parent
    return path


def missing_checkpoint(path: Path) -> str:
    """Says for an error that a checkpoint's folder does not exist, and which ones its run has."""
    if path.is_file():
        return f"{path} is a file; give the checkpoint, a folder {CHECKPOINT_PREFIX}<N>"
    existing = [folder.name for folder in checkpoint_folders(path.parent).values()]
    if existing:
        return f"{path} does not exist; the checkpoints of {path.parent} are {', '.join(existing)}"
    return f"{path} does not exist; give a checkpoint of a run, a folder {CHECKPOINT_PREFIX}<N>"


def last_checkpoint(folder: Path) -> Path | None:
    """Returns the checkpoint that `folder` is, or the last one of the run folder that it is; None if it is neither."""
    if (folder / STATE_FILE).is_file():
        return folder
    steps = checkpoint_folders(folder)
    return steps[max(steps)] if steps else None


def checkpoint_folders(folder: Path) -> dict[int, Path]:
    """Returns the folders `global_step_<N>` of a run by N, in order. Two names of one number, or a link, are not from a run."""
    folders: dict[int, Path] = {}
    for path in folder.glob(f"{CHECKPOINT_PREFIX}*"):
        number = path.name.removeprefix(CHECKPOINT_PREFIX)
        if not path.is_symlink() and number.isdecimal() and str(int(number)) == number:
            folders[int(number)] = path
    return dict(sorted(folders.items()))


def set_aside_earlier_run(folder: Path, *, resumed_step: int | None) -> None:
    """Moves what this run does not continue into a new subfolder `earlier_run_<n>`, so that no run resumes from it.

    These are the checkpoints after `resumed_step` and, if it is None, all checkpoints and records.
    """
    last_own_step = resumed_step or 0
    discontinued = [path for step, path in checkpoint_folders(folder).items() if step > last_own_step]
    if resumed_step is None:
        discontinued += [folder / name for name in _SET_ASIDE if (folder / name).exists()]
    if not discontinued:
        return
    numbered = (folder / f"earlier_run_{number}" for number in itertools.count(1))
    aside = next(place for place in numbered if not place.exists())
    aside.mkdir()
    for path in discontinued:
        path.rename(aside / path.name)
    logger.info(
        "%d records and checkpoints of an earlier run in %s were moved to %s", len(discontinued), folder, aside.name
    )
