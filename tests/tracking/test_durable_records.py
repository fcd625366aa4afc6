"""Records are on the disk before anything that claims them, and carry a format number that an older cepo refuses."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import pytest
from run_folders import group, rollout

from cepo.errors import CepoError
from cepo.tracking.run_folder import RECORDS_FORMAT, read_environment, write_atomically
from cepo.tracking.sinks import RunDescription, Tracker, build_tracker
from cepo.tracking.trace import Trace


def tracked(folder: Path, resumed_step: int | None = None) -> Tracker:
    return build_tracker(
        ["file"], RunDescription(folder=folder, config_text="", max_steps=3, resumed_step=resumed_step)
    )


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was put on the disk, and which renames there were, in order."""
    seen: list[str] = []
    replace = os.replace

    def noted_replace(source: Path, target: Path) -> None:
        seen.append(f"rename {source.name} {target.name}")
        replace(source, target)

    monkeypatch.setattr(
        os, "fsync", lambda number: seen.append(f"fsync {Path(f'/proc/self/fd/{number}').readlink().name}")
    )
    monkeypatch.setattr(os, "replace", noted_replace)
    return seen


def test_a_new_file_is_on_the_disk_before_and_after_its_rename(tmp_path: Path, calls: list[str]) -> None:
    write_atomically(tmp_path / "state.json", "{}")
    assert calls == ["fsync .state.json.new", "rename .state.json.new state.json", f"fsync {tmp_path.name}"]


def test_a_steps_row_is_on_the_disk_when_it_is_logged(tmp_path: Path, calls: list[str]) -> None:
    tracker = tracked(tmp_path)
    for name in ("reward/mean", "val/accuracy"):
        calls.clear()
        tracker.log_metrics(1, {name: 0.5})
        assert calls == ["fsync metrics.jsonl"]


def test_images_are_on_the_disk_before_rollouts_that_name_them(tmp_path: Path, calls: list[str]) -> None:
    """An image is named by its content, so that a later run would keep an empty one of that name for good."""
    Trace(tmp_path, max_bytes=1_000_000).write([group(1, [rollout(right=True)], images=[b"image"])])
    image = f"{hashlib.sha256(b'image').hexdigest()[:32]}.png"
    assert calls[:3] == [f"fsync .{image}.new", f"rename .{image}.new {image}", "fsync images"]
    assert calls[-1] == "fsync rollouts"


def test_records_of_a_later_format_are_refused_and_kept(tmp_path: Path) -> None:
    tracked(tmp_path, resumed_step=1).close()
    file = tmp_path / "environment.json"
    (entry,) = json.loads(file.read_text())
    assert entry["format"] == RECORDS_FORMAT == 1
    later = json.dumps([entry | {"format": 2}])
    file.write_text(later)
    words = r"the records in .* have format 2, but this cepo reads formats up to 1; use the version that wrote them"
    for read in (read_environment, lambda folder: tracked(folder, resumed_step=1)):
        with pytest.raises(CepoError, match=words):
            read(tmp_path)
    assert file.read_text() == later
    file.write_text(json.dumps([{"started": "earlier than there was a number"}]))
    assert len(read_environment(tmp_path)) == 1
