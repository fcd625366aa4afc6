"""A checkpoint that is no longer needed and cannot be deleted is named in a warning; it never ends a training."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from cepo.run_folder.layout import CHECKPOINT_TRACKER_FILE, checkpoint_folders
from cepo.trainer.checkpoints import CheckpointStore, TrainerState
from cepo.trainer.protocol import Backend


class Weights:
    """Writes one small file as the policy's weights."""

    def save(self, folder: Path) -> None:
        (folder / "actor").mkdir()
        (folder / "actor" / "weights").write_bytes(b"weights")


WEIGHTS = cast("Backend", Weights())


def refuse(monkeypatch: pytest.MonkeyPatch, name: str, part: str) -> None:
    """Lets a call of `os` fail for paths that contain `part`, as a network file system does for files in use."""
    real: Callable[..., Any] = getattr(os, name)

    def call(path: Any, *arguments: Any, **options: Any) -> Any:
        if part in str(path):
            raise OSError(errno.EBUSY, "Device or resource busy", str(path))
        return real(path, *arguments, **options)

    monkeypatch.setattr(os, name, call)


@pytest.mark.parametrize("call", ["rmdir", "unlink", "rename"])
def test_an_old_checkpoint_in_use_is_named_and_deleted_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, call: str
) -> None:
    """Each step writes its checkpoint; once the old one is free, it goes with the next ones."""
    store = CheckpointStore(tmp_path, keep=1, identity={})
    with monkeypatch.context() as busy:
        part = "weights" if call == "unlink" else "global_step_1"
        for step in (1, 2, 3):
            if step == 2:
                refuse(busy, call, part)
            store.save(TrainerState(step=step), WEIGHTS)
        assert caplog.text.count("global_step_1") >= 1
        assert "cannot be deleted ([Errno 16] Device or resource busy" in caplog.text
        assert len([line for line in caplog.messages if line.startswith(f"{tmp_path}/.global_step_1")]) <= 1, "once"
        last = store.find_last()
        assert last == tmp_path / "global_step_3"
    store.save(TrainerState(step=4), WEIGHTS)
    assert sorted(path.name for path in tmp_path.iterdir()) == [CHECKPOINT_TRACKER_FILE, "global_step_4"]


def test_what_remains_of_a_checkpoint_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of a checkpoint would be taken for a damaged one, or without its state never be deleted."""

    def save_by_a_new_run(step: int) -> None:
        store = CheckpointStore(tmp_path, keep=1, identity={})
        store.save(TrainerState(step=step), WEIGHTS)

    save_by_a_new_run(1)
    with monkeypatch.context() as busy:
        refuse(busy, "unlink", "weights")
        save_by_a_new_run(2)
        assert list(checkpoint_folders(tmp_path)) == [2]
    save_by_a_new_run(3)
    assert sorted(path.name for path in tmp_path.iterdir()) == [CHECKPOINT_TRACKER_FILE, "global_step_3"]


def test_a_run_without_an_intact_checkpoint_starts_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = CheckpointStore(tmp_path, keep=2, identity={})
    starts_again = f"{tmp_path} has no intact checkpoint: the run starts from its model again"
    for step in (1, 2):
        store.save(TrainerState(step=step), WEIGHTS)
    for step, last in ((2, tmp_path / "global_step_1"), (1, None)):
        (tmp_path / f"global_step_{step}" / "actor" / "weights").write_bytes(b"cut")
        assert starts_again not in caplog.text
        assert store.find_last() == last
        assert f"global_step_{step} is damaged" in caplog.text
    assert starts_again in caplog.text


def test_a_checkpoint_behind_a_link_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It was moved to a larger disk: the run must not start from its model without a word."""
    store = CheckpointStore(tmp_path / "run", keep=2, identity={})
    moved = store.save(TrainerState(step=2), WEIGHTS).rename(tmp_path / "moved")
    link = tmp_path / "run" / "global_step_2"
    link.symlink_to(moved)
    assert store.find_last() is None
    assert f"{link} is a link" in caplog.text
    assert store.read(link).step == 2


@pytest.mark.parametrize("left_behind", [".global_step_2.partial", "global_step_2"])
def test_a_killed_write_in_use_does_not_stop_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, left_behind: str
) -> None:
    """The checkpoint is written whole, without the old folder's files."""
    (tmp_path / left_behind / "actor").mkdir(parents=True)
    (tmp_path / left_behind / "actor" / "old").write_text("")
    store = CheckpointStore(tmp_path, keep=2, identity={})
    refuse(monkeypatch, "unlink", "old")
    target = store.save(TrainerState(step=2), WEIGHTS)
    assert sorted(path.name for path in (target / "actor").iterdir()) == ["weights"]
    assert store.find_last() == target
    assert "global_step_2" in caplog.text
