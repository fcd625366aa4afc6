"""Writes and finds the checkpoints of a run; a crash while one is written harms no other."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import os
import shutil
import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pydantic import ConfigDict, FiniteFloat, NonNegativeInt, StrictInt, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from cepo.config.paths import find_path, shipped_name, with_file
from cepo.errors import CheckpointError, ForeignFileError
from cepo.files.safe_files import irregular_file, read_json
from cepo.files.trees import Tree, is_dict
from cepo.run_folder.layout import (
    ACTOR_FOLDER,
    CHECKPOINT_PREFIX,
    CHECKPOINT_TRACKER_FILE,
    FILES_FILE,
    STATE_FILE,
    checkpoint_folders,
)
from cepo.run_folder.writing import to_disk, write_atomically
from cepo.trainer.protocol import Backend

logger = logging.getLogger(__name__)
FORMAT_VERSION = 2
"""Version of a checkpoint's layout; one that names none has version 1, whose shards are pickles."""
_REMOVED = ".removed"
_FILES = TypeAdapter(dict[str, tuple[StrictInt, StrictInt]])
_ANEW = (
    "trainer.find_last_checkpoint=false or another trainer.experiment_name starts a new run; to train its weights further, "
    "leave out trainer.load_checkpoint_path and give the output of `cepo merge` as worker.actor.model.model_path"
)


@dataclass(kw_only=True, config=ConfigDict(strict=True, extra="forbid"))
class TrainerState:
    """The trainer's own part of a checkpoint. All its other state is a function of the number of steps done, `step`.

    `rounds` is the number of batches of problems taken from the data; it exceeds `step` if online filtering repeats
    rounds. `kl_coefficient` is the weight of the KL in the reward, which an adaptive controller changes.
    """

    step: NonNegativeInt = 0
    rounds: NonNegativeInt = 0
    kl_coefficient: FiniteFloat = 0.0


class CheckpointStore:
    """Stores `<run folder>/global_step_<N>/{actor/, trainer_state.json, files.json}` and `checkpoint_tracker.json`.

    The names are EasyR1's. The trainer writes its `TrainerState`; the backend writes weights, optimizer, teacher
    weights and random state. The tracker file names the last checkpoint and the best one, the earliest of those with
    the highest validation reward.

    Args:
        identity: values that a resuming run must share with the checkpoint.
        settings: other settings that decide what is trained; `changes` compares them.
        keep: number of checkpoints to keep: the last, the best (also if it is 1) and the most recent others; -1 keeps all.
        weights_only: the backend writes only weights, so no run can continue from the checkpoints.
    """

    def __init__(
        self,
        folder: Path,
        *,
        keep: int,
        identity: Mapping[str, object],
        settings: Mapping[str, object] | None = None,
        weights_only: bool = False,
    ) -> None:
        self.folder = folder
        self._keep = keep
        self._identity = identity
        self._weights_only = weights_only
        self._undeletable: set[Path] = set()  # of which a warning has been given
        self.settings: Tree = json.loads(json.dumps(settings or {}))

    def save(self, state: TrainerState, backend: Backend, *, val_reward_score: float | None = None) -> Path:
        """Saves a checkpoint after `state.step` steps, then deletes the oldest checkpoints beyond `keep`.

        One that cannot be deleted, such as a folder of a network file system that a process reads, is named in a warning.
        `val_reward_score` is the mean reward of a validation of exactly these weights; None if there was none. Raises
        `CheckpointError`: it cannot be written, for lack of space or permission. Earlier checkpoints are unchanged.
        """
        step = state.step
        target = self._write(state, backend, val_reward_score)
        scores = self._scores()
        best = max(sorted(scores), key=lambda step: scores[step], default=None)
        tracker = {
            "best_global_step": best,
            "best_val_reward_score": None if best is None else round(scores[best], 4),
            "last_global_step": step,
            "last_actor_path": str((target / ACTOR_FOLDER).absolute()),
        }
        try:
            write_atomically(self.folder / CHECKPOINT_TRACKER_FILE, json.dumps(tracker, indent=2) + "\n")
        except OSError as error:  # resuming does not read this file, and the checkpoint itself is complete
            logger.warning(
                "%s could not be updated after step %d: %s", self.folder / CHECKPOINT_TRACKER_FILE, step, error
            )
        if self._keep >= 0:
            self._set_oldest_aside(always_kept={step} if best is None else {step, best})
        self._delete_set_aside()
        return target

    def _set_oldest_aside(self, *, always_kept: set[int]) -> None:
        checkpoints = self._whole()
        candidates = sorted(checkpoints.keys() - always_kept, reverse=True)
        num_others = max(self._keep - len(always_kept), 0)
        for step in candidates[num_others:]:
            self._set_aside(checkpoints[step])

    def _delete_set_aside(self) -> None:
        for folder in self.folder.glob(f".*{_REMOVED}"):
            try:
                shutil.rmtree(folder)
            except OSError as error:
                self._warn_once(folder, error)

    def _set_aside(self, folder: Path) -> None:
        """Renames a folder that is to be deleted, so that nothing takes what remains of it for a checkpoint."""
        number = 0
        while (aside := folder.with_name(f".{folder.name.lstrip('.')}.{number}{_REMOVED}")).exists():
            number += 1
        try:
            folder.rename(aside)
        except OSError as error:
            self._warn_once(folder, error)

    def _warn_once(self, folder: Path, error: OSError) -> None:
        if folder not in self._undeletable:
            self._undeletable.add(folder)
            logger.warning(
                "%s, which is no longer needed, cannot be deleted (%s); the run goes on, and each later checkpoint tries it "
                "again",
                folder, error,
            )  # fmt: skip

    def _write(self, state: TrainerState, backend: Backend, val_reward_score: float | None) -> Path:
        target = self.folder / f"{CHECKPOINT_PREFIX}{state.step}"
        partial = target.with_name(f".{target.name}.partial")
        content = {
            "global_step": state.step,
            "state": dataclasses.asdict(state),
            "val_reward_score": val_reward_score,
            **self._identity,
            "format": FORMAT_VERSION,
            "settings": self.settings,
            "weights_only": self._weights_only,
        }
        if partial.exists():  # an earlier process was killed while it wrote
            self._set_aside(partial)
            self._delete_set_aside()
        try:
            partial.mkdir(parents=True)
            backend.save(partial)
            (partial / STATE_FILE).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
            (partial / FILES_FILE).write_text(json.dumps(written_files(partial), indent=2) + "\n", encoding="utf-8")
            for path in (*partial.rglob("*"), partial):  # the content must be on disk before the rename
                to_disk(path)
        except (OSError, CheckpointError) as error:
            shutil.rmtree(partial, ignore_errors=True)  # on a full disk the next attempt needs its space
            free = shutil.disk_usage(self.folder).free / 1e9
            raise CheckpointError(
                f"the checkpoint of step {state.step} cannot be written to {self.folder} ({free:.1f} GB are free there): "
                f"{error}"
            ) from error
        if target.exists():
            self._set_aside(target)
        partial.rename(target)
        to_disk(self.folder)
        return target

    def find_last(self, *, after: int = -1) -> Path | None:
        """Returns the run folder's last intact checkpoint of a step later than `after`; skips damaged ones, with a warning."""
        is_damaged = False
        for step, path in sorted(self._whole().items(), reverse=True):
            if step <= after:
                break
            damage = damaged_file(path)
            if damage is None:
                return path
            logger.warning("%s is damaged (%s) and is left out", path, damage)
            is_damaged = True
        for path in self.folder.glob(f"{CHECKPOINT_PREFIX}*"):
            if path.is_symlink():
                logger.warning(
                    "%s is a link, which no run writes, and is left out; trainer.load_checkpoint_path=%s goes on from it",
                    path,
                    path,
                )
        if is_damaged and after < 0:
            logger.warning("%s has no intact checkpoint: the run starts from its model again", self.folder)
        return None

    def read(self, folder: Path) -> TrainerState:
        """Reads the trainer's part of a checkpoint, and checks all of it before any model is loaded.

        Raises `CheckpointError`: it is incomplete or damaged, holds only weights, has another format, or was written by a
        run with another `identity`.
        """
        another = "give another folder global_step_<N>"
        irregular = irregular_file(folder)
        if irregular is not None:
            raise CheckpointError(f"{irregular} is not a regular file; {another}")
        try:
            state = _state(folder)
        except ForeignFileError as error:
            raise CheckpointError(f"{folder} is not a complete checkpoint ({error}); {another}") from error
        version = state.get("format", 1)
        if version != FORMAT_VERSION:
            raise CheckpointError(
                f"{folder} has format {version!r}, but this cepo reads format {FORMAT_VERSION}; use the version that wrote it"
            )
        for key, value in self._identity.items():
            if _comparable(key, state.get(key)) != _comparable(key, value):
                raise CheckpointError(
                    f"{folder} was written with {key}={state.get(key)}, but this run has {value}; set it to {state.get(key)} to "
                    f"continue from there. {_ANEW}"
                )
        if state.get("weights_only"):
            raise CheckpointError(
                f"{folder} holds only weights (trainer.save_model_only), so no run can continue from it. {_ANEW}"
            )
        damage = damaged_file(folder)
        if damage is not None:
            raise CheckpointError(f"{folder} is damaged ({damage}); {another}")
        try:
            return TrainerState(**state["state"])
        except (KeyError, TypeError, ValidationError) as error:
            raise CheckpointError(f"{folder / STATE_FILE} has no valid trainer state ({error!r}); {another}") from error

    def changes(self, folder: Path) -> list[str]:
        """Lists the settings, among those that this run and the checkpoint's run both have, whose values differ."""
        written = _state(folder).get("settings")
        if not is_dict(written):
            return []
        changes: list[str] = []
        for key, value in self.settings.items():
            if key in written and _comparable(key, written[key]) != _comparable(key, value):
                changes.append(f"{key}: was {json.dumps(written[key])}, is {json.dumps(value)}")
        return changes

    def is_validated(self, folder: Path) -> bool:
        """Returns whether the weights of a checkpoint had been validated when it was written."""
        return _state(folder).get("val_reward_score") is not None

    def _whole(self) -> dict[int, Path]:
        folders = checkpoint_folders(self.folder)
        return {step: path for step, path in folders.items() if (path / STATE_FILE).is_file()}

    def _scores(self) -> dict[int, float]:
        scores: dict[int, float] = {}
        for step, path in self._whole().items():
            try:
                score = _state(path).get("val_reward_score")
                if isinstance(score, float) and math.isfinite(score):
                    scores[step] = score
            except ForeignFileError as error:
                logger.warning("%s cannot be read (%s); it cannot be chosen as the best checkpoint", path, error)
        return scores


def _comparable(key: str, value: object) -> object:
    """Returns a setting such that two spellings of one path are equal."""
    if not isinstance(value, str):
        return value
    names = value.split(",")
    if key == "data.train_files":  # a checksum of their content is compared too
        return [os.path.basename(name.strip()) for name in names]
    return [_place_of(name) for name in names]


def _place_of(name: str) -> str:
    """Returns the same text for all spellings of one file, also of `file.py:function`, from any working directory."""
    return with_file(name.strip(), lambda file: shipped_name(os.path.abspath(find_path(file) or file)))


def _state(folder: Path) -> Tree:
    return read_json(folder / STATE_FILE, dict, within=folder)


def written_files(folder: Path) -> dict[str, list[int]]:
    """Returns the size and CRC-32 of every file below `folder`, by relative path."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    with ThreadPoolExecutor(max_workers=8) as pool:  # zlib releases the GIL
        checksums = list(pool.map(_checksum, files))
    entries: dict[str, list[int]] = {}
    for path, checksum in zip(files, checksums, strict=True):
        entries[str(path.relative_to(folder))] = [path.stat().st_size, checksum]
    return entries


def damaged_file(folder: Path) -> str | None:
    """Describes the first file that differs from what was written, was not, or is no regular one; None if there is none."""
    irregular = irregular_file(folder)
    if irregular is not None:
        return f"{irregular.relative_to(folder)} is not a regular file"
    try:
        expected = _FILES.validate_python(read_json(folder / FILES_FILE, dict, within=folder))
    except ForeignFileError as error:
        return f"{FILES_FILE} {error.fault}"
    except ValidationError:
        expected = {}
    if STATE_FILE not in expected:
        return f"{FILES_FILE} does not list the checkpoint's files"
    present = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    unlisted = present - expected.keys() - {FILES_FILE}
    if unlisted:
        return f"{min(unlisted)} is not listed in {FILES_FILE}"
    for name, (size, checksum) in expected.items():
        if name not in present or name == FILES_FILE:  # that file cannot list itself
            return f"{name} is missing, {size} were written"
        present_size = (folder / name).stat().st_size
        if present_size != size:
            return f"{name} has {present_size} bytes, {size} were written"
        if _checksum(folder / name) != checksum:
            return f"{name}: other bytes than were written"
    return None


def _checksum(path: Path) -> int:
    checksum = 0
    with path.open("rb") as file:
        while block := file.read(1 << 16):
            checksum = zlib.crc32(block, checksum)
    return checksum
