"""Trains a run of a study once, under one seed for everything that is random."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cepo.train import main as train

DONE = "done"
"""The file that marks the folder of a finished run."""


def is_done(folder: Path) -> bool:
    """Returns whether the run of this folder is finished."""
    return (folder / DONE).exists()


def train_once(settings: Sequence[str], *, seed: int, folder: Path) -> int:
    """Trains the run in `folder` from `settings`, or goes on with it; returns the exit code of `cepo train`.

    The seed is that of weights, order of data and sampling, unless `settings` say otherwise. A run that is done is left
    alone.
    """
    if is_done(folder):
        return 0
    print(folder, flush=True)
    exit_code = train(
        [
            f"trainer.seed={seed}",
            f"data.seed={seed}",
            f"worker.rollout.seed={seed}",
            f"trainer.save_checkpoint_path={folder}",
            "trainer.logger=[file]",
            *settings,
        ]
    )
    if exit_code == 0:
        (folder / DONE).touch()
    return exit_code
