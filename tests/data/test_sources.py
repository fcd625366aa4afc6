"""Which files a local source names: names are names, and where a folder leaves a choice, it is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pytest
from case_files import cases

from cepo.config.loader import load_config
from cepo.config.path_checks import require_data
from cepo.config.paths import located_data, split_source
from cepo.data.tables import read_source
from cepo.errors import ConfigError, DataError

FOLDERS: list[Any] = cases(__file__, "folders.yaml")
NAMES = [
    "r[12]/t.jsonl", "run[a].jsonl", "*.jsonl", "?.jsonl", "{a}.jsonl", "[!a]/**/t.jsonl", "me@corp/t.jsonl",
    "x@train.jsonl", "a@b@c/t@1.jsonl", "zip::a.jsonl", "file:t.jsonl", "a%20b.jsonl", "sp ace.jsonl", "#t.jsonl",
    ".hidden.jsonl", "~t.jsonl", "$HOME.jsonl", "é☃.jsonl", "-t.jsonl", "T.JSONL", "test.jsonl",
]  # fmt: skip


def make(folder: Path, *names: str) -> Path:
    """A folder with these files, each of one row that has the file's name."""
    for name in names:
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({"prompt": name, "answer": "1"}) + "\n", encoding="utf-8")
    return folder


def names_in(folder: Path, split: str = "") -> list[str]:
    return [row["prompt"] for row in read_source(f"{folder}@{split}" if split else str(folder))]


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_the_file_of_that_name_and_no_other(tmp_path: Path, name: str) -> None:
    make(tmp_path, "r1/t.jsonl", "a/t.jsonl", "a.jsonl", "t.jsonl", "corp/t.jsonl", "me/t.jsonl", name)
    source = str(tmp_path / name)
    for spelled in (source, f"{source}@train[:1]"):
        assert [row["prompt"] for row in read_source(spelled)] == [name]
        require_data("data.train_files", spelled)
        assert located_data(spelled) == spelled


def test_a_list_of_sources_is_that_of_their_names() -> None:
    names = ["microgeo:train", "microgeo:validation"]
    config = load_config(["config=configs/microgeo/base.yaml", f"data.train_files={json.dumps(names)}"])
    assert config.data.train_sources == names


def test_the_split_follows_the_last_at_sign_of_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path, "a@b", "org/name")
    monkeypatch.chdir(tmp_path)
    assert split_source("a@b") == ("a@b", None)
    assert split_source("a@b@train") == ("a@b", "train")
    assert split_source("org/name@test[:5]") == ("org/name", "test[:5]")
    assert split_source("org/absent@test") == ("org/absent", "test")
    assert split_source("org/absent") == ("org/absent", None)


@pytest.mark.parametrize("case", FOLDERS, ids=lambda case: case["name"])
def test_a_split_of_a_folder_is_clear_or_refused(tmp_path: Path, case: Any) -> None:
    make(tmp_path, *case["files"])
    if "chosen" in case:
        assert names_in(tmp_path, case.get("split", "")) == case["chosen"]
        return
    with pytest.raises(ConfigError, match=case["refused"]):
        names_in(tmp_path, case.get("split", ""))


def test_a_split_of_which_parts_are_missing_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    names = ["train-00000-of-00003.jsonl", "train-00002-of-00003.jsonl"]
    assert names_in(make(tmp_path, *names)) == names
    assert "2 of the 3 files of 'train' are there" in caplog.text


def save(folder: Path, **splits: int) -> Path:
    tables = datasets.DatasetDict()
    for name, count in splits.items():
        tables[name] = datasets.Dataset.from_list([{"prompt": f"{name} {number}"} for number in range(count)])
    tables.save_to_disk(str(folder))
    return folder


def test_a_saved_set_is_what_its_own_list_names(tmp_path: Path) -> None:
    """A cache that `map` left doubles no row, and neither does a stray copy of a part."""
    saved = save(tmp_path / "saved", train=3, Test=2)
    content = (saved / "train" / "data-00000-of-00001.arrow").read_bytes()
    (saved / "train" / "cache-0123456789abcdef.arrow").write_bytes(content)
    (saved / "train" / "data-00001-of-00002.arrow").write_bytes(content)
    rows = ["train 0", "train 1", "train 2"]
    assert names_in(saved) == names_in(saved, "Train") == names_in(saved / "train") == rows
    assert names_in(saved, "test") == ["Test 0", "Test 1"]
    assert names_in(saved, "train[1:]") == rows[1:]
    with pytest.raises(ConfigError, match=r"no split there is named 'validation'\. There are: train, Test"):
        read_source(f"{saved}@validation")
    with pytest.raises(ConfigError, match=r"no split there is named 'train'\. There are: test"):
        read_source(str(save(tmp_path / "alone", test=2)))
    with pytest.raises(ConfigError, match="this saved data set is the split 'train', got 'test'"):
        read_source(f"{saved / 'train'}@test")


@pytest.mark.parametrize("name", ["../secret.arrow", "/etc/passwd", "", 7])
def test_a_saved_set_names_no_file_elsewhere(tmp_path: Path, name: object) -> None:
    saved = save(tmp_path / "saved", train=1) / "train"
    (saved / "state.json").write_text(json.dumps({"_data_files": [{"filename": name}]}), encoding="utf-8")
    with pytest.raises(DataError, match="which is no name of a file beside it"):
        read_source(str(saved))


@pytest.mark.parametrize(
    ("part", "numbers"),
    cases(__file__, "slices.yaml"),
)
def test_a_slice_counts_rows_or_percent(tmp_path: Path, part: str, numbers: list[int]) -> None:
    """Shares are rounded to whole rows as the datasets library does: 25 % and 45 % of 10 are 2 and 4."""
    for name, start in (("0.jsonl", 0), ("1.jsonl", 5)):
        lines = [json.dumps({"n": number}) for number in range(start, start + 5)]
        (tmp_path / name).write_text("\n".join(lines))
    assert [row["n"] for row in read_source(f"{tmp_path}@train{part}")] == numbers


def test_a_slice_without_rows_is_refused(tmp_path: Path) -> None:
    make(tmp_path, "a.jsonl")
    for part in ("[5:2]", "[1:]", "[:0]"):
        with pytest.raises(ConfigError, match="have no rows"):
            read_source(f"{tmp_path}@train{part}")


def test_the_file_of_a_spreadsheet_is_named_with_the_way_out(tmp_path: Path) -> None:
    """Its ending is the fault, and not that there would be several formats."""
    (tmp_path / "rows.xlsx").write_bytes(b"PK")
    with pytest.raises(ConfigError, match=r"the ending '\.xlsx' is none that is read.*Save a sheet as \.csv"):
        read_source(str(tmp_path / "rows.xlsx"))
