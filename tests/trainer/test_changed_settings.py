"""Which settings of a run count as changed since its checkpoint: spellings of one file do not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cepo.config import load_config
from cepo.config.paths import PACKAGE_FOLDER, shipped_name
from cepo.config.record import decisive_settings, dump_for_record
from cepo.run_folder.layout import STATE_FILE
from cepo.trainer.checkpoints import CheckpointStore

REWARD = "worker.reward.reward_function"
SETTINGS = ["config=microgeo/grpo", "data.format_prompt=configs/format_prompt/geo3k.jinja"]


def changes(folder: Path, recorded: dict[str, Any], *settings: str) -> list[str]:
    """Compares the settings of a run, loaded in the working directory, with those of a checkpoint."""
    folder.mkdir(exist_ok=True)
    (folder / STATE_FILE).write_text(json.dumps({"settings": recorded}), encoding="utf-8")
    config = load_config([*SETTINGS, *settings])
    store = CheckpointStore(folder.parent, keep=1, identity={}, settings=decisive_settings(config))
    return store.changes(folder)


def test_the_same_command_from_another_folder_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does a record with the absolute path of a shipped file, as one made by hand may have."""
    monkeypatch.chdir(PACKAGE_FOLDER.parent)
    in_checkout = decisive_settings(load_config(SETTINGS))
    monkeypatch.chdir(tmp_path)
    elsewhere = decisive_settings(load_config(SETTINGS))
    assert in_checkout == elsewhere
    with_absolute_path = in_checkout | {REWARD: f"{PACKAGE_FOLDER}/rewards/math.py:compute_score"}
    for folder in (tmp_path, PACKAGE_FOLDER.parent):
        monkeypatch.chdir(folder)
        assert changes(tmp_path / "global_step_1", in_checkout) == []
        assert changes(tmp_path / "global_step_1", with_absolute_path) == []


def test_a_record_names_shipped_files_without_their_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a run goes on in another checkout, or on another machine."""
    monkeypatch.chdir(tmp_path)
    plugin = "examples/custom_method/my_method.py"
    config = load_config([*SETTINGS, f"trainer.plugins=[{plugin}]"])
    assert config.trainer.plugins == [str(PACKAGE_FOLDER.parent / plugin)]
    record = dump_for_record(config)
    assert f"- {plugin}" in record
    assert "cepo/rewards/math.py:compute_score" in record
    assert str(PACKAGE_FOLDER.parent) not in record
    assert decisive_settings(config)[REWARD] == "cepo/rewards/math.py:compute_score"


def test_a_record_keeps_the_path_of_a_model_in_the_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model is not looked for among shipped files, and `examples/eyes` could be a name on the hub."""
    monkeypatch.chdir(tmp_path)
    model = PACKAGE_FOLDER.parent / "examples" / "eyes"
    config = load_config([*SETTINGS, f"worker.actor.model.model_path={model}"])
    assert f"model_path: {model}" in dump_for_record(config)


def test_two_functions_are_compared_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text("def score(samples): return []\n", encoding="utf-8")
    two_functions = f"{REWARD}=[cepo/rewards/math.py:compute_score,own.py:score]"
    recorded = decisive_settings(load_config([*SETTINGS, two_functions]))
    absolute = f"{REWARD}=[cepo/rewards/math.py:compute_score,{tmp_path}/own.py:score]"
    assert changes(tmp_path / "global_step_1", recorded, absolute) == []
    for changed_functions in (
        "[own.py:score,cepo/rewards/math.py:compute_score]",
        "[cepo/rewards/math.py:compute_score,own.py:main]",
    ):
        assert len(changes(tmp_path / "global_step_1", recorded, f"{REWARD}={changed_functions}")) == 1


def test_a_relative_file_of_ones_own_is_another_one_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "own.py").write_text("def score(samples): return []\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path / "one")
    recorded = decisive_settings(load_config([*SETTINGS, f"{REWARD}={tmp_path}/one/own.py:score"]))
    assert changes(tmp_path / "global_step_1", recorded, f"{REWARD}=own.py:score") == []
    monkeypatch.chdir(tmp_path / "two")
    assert len(changes(tmp_path / "global_step_1", recorded, f"{REWARD}=own.py:score")) == 1


def test_shipped_files_have_names_and_others_keep_their_path(tmp_path: Path) -> None:
    assert shipped_name(str(PACKAGE_FOLDER / "rewards" / "math.py")) == "cepo/rewards/math.py"
    assert shipped_name(str(tmp_path / "cepo" / "rewards" / "math.py")).startswith(str(tmp_path))
