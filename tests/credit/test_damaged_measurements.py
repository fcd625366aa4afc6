"""A damaged folder of an ended measurement is one error that names the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest

from cepo.config import load_config
from cepo.credit.truth import CONTINUATIONS_FILE, SETTINGS_FILE, Continuations, claim_folder
from cepo.errors import ConfigError, DataError

WHOLE = {"prefix": "0/3", "length": 3, "right": "0110", "entropy": 0.5, "num_tokens": 40}


@pytest.mark.parametrize("text", [b"", b"{", b"[1]", b"null", b"\xff\xfe"])
def test_settings_that_cannot_be_read_are_named(tmp_path: Path, text: bytes) -> None:
    (tmp_path / SETTINGS_FILE).write_bytes(text)
    config = load_config(["config=configs/microgeo/base.yaml"])
    with pytest.raises(DataError, match=rf"{tmp_path}/{SETTINGS_FILE} is damaged, .*give a new folder \(--out\)"):
        claim_folder(tmp_path, {}, config)


@pytest.mark.parametrize(
    "change", [{"prefix": None}, {"right": None}, {"right": "01x0"}, {"entropy": "much"}, {"num_tokens": [4]}]
)
def test_continuations_that_cannot_be_read_are_named(tmp_path: Path, change: dict[str, Any]) -> None:
    row = {key: value for key, value in (WHOLE | change).items() if value is not None}
    (tmp_path / CONTINUATIONS_FILE).write_text(f"{json.dumps(WHOLE)}\n{json.dumps(row)}\n")
    nothing = cast("Any", None)  # reading asks no engine
    with pytest.raises(DataError, match=f"{CONTINUATIONS_FILE} is damaged"):
        Continuations(tmp_path, nothing, nothing, number=4)
    (tmp_path / CONTINUATIONS_FILE).write_text(f"{json.dumps(WHOLE)}\n")
    assert Continuations(tmp_path, nothing, nothing, number=4).done["0/3"].right == "0110"


@pytest.mark.parametrize("change", ["algorithm.correct_key=overall", "algorithm.correct_threshold=0.9"])
def test_verdicts_by_another_rule_are_not_mixed(tmp_path: Path, change: str) -> None:
    command = ["config=configs/microgeo/base.yaml"]
    claim_folder(tmp_path / "m", {}, load_config(command))
    claim_folder(tmp_path / "m", {}, load_config(command))
    with pytest.raises(ConfigError, match=f"other settings: {change.partition('=')[0]};"):
        claim_folder(tmp_path / "m", {}, load_config([*command, change]))
