"""Checkpoints of a run: written beside and renamed, so that a crash at any moment leaves the previous one whole."""

from __future__ import annotations

import dataclasses
import itertools
import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any

from cepo.errors import CheckpointError
from cepo.trainer.backend import Backend
from cepo.trainer.state import TrainerState

logger = logging.getLogger(__name__)

TRACKER_FILE = "checkpoint_tracker.json"
STATE_FILE = "trainer_state.json"


class CheckpointStore:
    """`<run folder>/global_step_<N>/{actor/, trainer_state.json}` and `checkpoint_tracker.json`, EasyR1's names.

    The trainer keeps its `TrainerState`; weights, optimizer, teacher weights and random state are the backend's.

    Args:
        keep: how many checkpoints stay; -1 for all.
    """

    def __init__(self, folder: Path, *, keep: int, identity: dict[str, Any]) -> None:
        self.folder, self._keep, self._identity = folder, keep, identity

    def save(self, state: TrainerState, backend: Backend) -> Path:
        """Writes the state after `state.step` steps and then forgets the oldest ones beyond `keep`."""
        step = state.step
        target = self.folder / f"global_step_{step}"
        partial = self.folder / f".global_step_{step}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        backend.save(partial)
        _write_json(partial / STATE_FILE, {"global_step": step, "state": dataclasses.asdict(state), **self._identity})
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)
        _write_json(self.folder / TRACKER_FILE, {"last_global_step": step, "last_actor_path": str(target / "actor")})
        self._prune(newest=step)
        return target

    def find_last(self) -> Path | None:
        """The newest whole checkpoint of this run folder, None if there is none."""
        whole = self._whole()
        return whole[max(whole)] if whole else None

    def load(self, folder: Path, backend: Backend) -> TrainerState:
        """Restores a checkpoint and returns the trainer's part of it.

        Raises:
            CheckpointError: it is incomplete, or was written by a run with other settings.
        """
        try:
            state = json.loads((folder / STATE_FILE).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{folder} is not a whole checkpoint ({error}); give a folder global_step_<N>"
            ) from error
        for key, value in self._identity.items():
            if state.get(key) != value:
                raise CheckpointError(
                    f"{folder} was written with {key}={state.get(key)}, this run has {value}; "
                    "set trainer.find_last_checkpoint=false or another trainer.experiment_name to start anew"
                )
        backend.load(folder)
        return TrainerState(**state["state"])

    def set_aside(self, *, after: int, folder: Path | None) -> None:
        """Moves checkpoints of later steps, which another run wrote here, so that nothing resumes from them by mistake.

        Args:
            after: the step this run starts from.
            folder: where that run's records were put; None: a new folder `earlier_run_<N>`.
        """
        later = [path for step, path in self._folders().items() if step > after]
        if not later:
            return
        if folder is None:
            names = (self.folder / f"earlier_run_{number}" for number in itertools.count(1))
            folder = next(name for name in names if not name.exists())
            folder.mkdir()
        for path in later:
            path.rename(folder / path.name)
        logger.info("%d checkpoints of an earlier run in %s now lie in %s", len(later), self.folder, folder.name)

    def _whole(self) -> dict[int, Path]:
        return {step: path for step, path in self._folders().items() if (path / STATE_FILE).is_file()}

    def _folders(self) -> dict[int, Path]:
        found = self.folder.glob("global_step_*") if self.folder.is_dir() else []
        numbered = ((path.name.removeprefix("global_step_"), path) for path in found)
        return {int(number): path for number, path in numbered if number.isdecimal()}

    def _prune(self, *, newest: int) -> None:
        whole = self._whole()
        for step in sorted(whole)[: -self._keep] if self._keep > 0 else []:
            if step != newest:
                shutil.rmtree(whole[step])


def _write_json(path: Path, content: dict[str, Any]) -> None:
    beside = path.with_name(path.name + ".partial")
    beside.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    os.replace(beside, path)
