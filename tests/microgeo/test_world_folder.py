"""The embedded world as files: built once, whole or not at all, and apart from what is the user's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cepo.microgeo.world import build_world

pytestmark = pytest.mark.heavy


def test_a_world_is_built_once(tmp_path: Path) -> None:
    world = build_world(tmp_path / "world", num_train=12, num_validation=4)
    assert (world.model_path / "model.safetensors").stat().st_size < 10_000_000
    stamp = world.train_file.stat().st_mtime_ns
    assert build_world(tmp_path / "world", num_train=12, num_validation=4) == world
    assert world.train_file.stat().st_mtime_ns == stamp
    assert build_world(tmp_path / "world", num_train=13, num_validation=4).train_file.stat().st_mtime_ns != stamp
    assert [path.name for path in tmp_path.iterdir()] == ["world"]


def test_an_interrupted_build_leaves_no_half_world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("cepo.microgeo.world.shutil.copytree", interrupt)
    with pytest.raises(KeyboardInterrupt):
        build_world(tmp_path / "world", num_train=4, num_validation=4)
    assert list(tmp_path.iterdir()) == []


def test_the_default_folder_lies_in_the_users_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    world = build_world(num_train=4, num_validation=4)
    assert world.model_path.parent.parent == tmp_path / "cepo"
    assert world.model_path.parent.name.startswith("microgeo-")
    manifest = json.loads((world.model_path.parent / "world.json").read_text())
    assert manifest["fingerprint"].startswith(world.model_path.parent.name.removeprefix("microgeo-"))
