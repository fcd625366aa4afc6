"""Which files a local source names: names are names, splits are named, and what is not data is left alone."""

from __future__ import annotations

import json
from pathlib import Path

import datasets
import pytest

from cepo.config.loader import load_config
from cepo.config.path_checks import require_data
from cepo.config.paths import located_data, split_source, split_sources
from cepo.data.sources import local_source
from cepo.data.tables import read_source
from cepo.errors import ConfigError, DataError


def make(folder: Path, *names: str) -> Path:
    """A folder with these files, each of one row that has the file's name."""
    for name in names:
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({"prompt": name, "answer": "1"}) + "\n", encoding="utf-8")
    return folder


def names_in(folder: Path, split: str = "") -> list[str]:
    return [row["prompt"] for row in read_source(f"{folder}@{split}" if split else str(folder))]


@pytest.mark.parametrize(
    "name",
    [
        *("r[12]/t.jsonl", "run[a].jsonl", "*.jsonl", "?.jsonl", "{a}.jsonl", "[!a]/**/t.jsonl", "me@corp/t.jsonl"),
        *(
            "x@train.jsonl",
            "a@b@c/t@1.jsonl",
            "zip::a.jsonl",
            "file:t.jsonl",
            "a%20b.jsonl",
            "sp ace.jsonl",
            "#t.jsonl",
        ),
        *(".hidden.jsonl", "~t.jsonl", "$HOME.jsonl", "é☃.jsonl", "-t.jsonl", "T.JSONL", "test.jsonl"),
    ],
)
def test_a_name_is_the_file_of_that_name_and_no_other(tmp_path: Path, name: str) -> None:
    make(tmp_path, "r1/t.jsonl", "a/t.jsonl", "a.jsonl", "t.jsonl", "corp/t.jsonl", "me/t.jsonl", name)
    source = str(tmp_path / name)
    assert names_in(tmp_path / name) == [name]
    assert [row["prompt"] for row in read_source(f"{source}@train[:1]")] == [name]
    for spelled in (source, f"{source}@train[:1]"):
        require_data("data.train_files", spelled)
        assert located_data(spelled) == spelled


@pytest.mark.parametrize(
    ("text", "sources"),
    [
        ("a,b.jsonl", ["a,b.jsonl"]),
        ("c.jsonl,a,b.jsonl@train[:1], d, 1/t.jsonl", ["c.jsonl", "a,b.jsonl@train[:1]", "d, 1/t.jsonl"]),
        ("c.jsonl, org/name@x,missing,c.jsonl", ["c.jsonl", "org/name@x", "missing", "c.jsonl"]),
        ("mathvista:a,b.jsonl,c.jsonl", ["mathvista:a,b.jsonl", "c.jsonl"]),
        ("c.jsonl,mathvista:c.jsonl,MathVerse:a,b.jsonl", ["c.jsonl", "mathvista:c.jsonl", "MathVerse:a,b.jsonl"]),
        ("c.jsonl,", ["c.jsonl", ""]),
    ],
)
def test_a_comma_in_a_path_that_exists_separates_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, sources: list[str]
) -> None:
    make(tmp_path, "a,b.jsonl", "c.jsonl", "d, 1/t.jsonl")
    monkeypatch.chdir(tmp_path)
    assert split_sources(text) == sources


def test_a_list_of_sources_may_have_names_with_commas(tmp_path: Path) -> None:
    make(tmp_path, "a,b.jsonl", "c.jsonl")
    names = [str(tmp_path / "a,b.jsonl"), str(tmp_path / "c.jsonl")]
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


@pytest.mark.parametrize(
    ("names", "split", "chosen"),
    [
        (["train.jsonl", "test.jsonl"], "", ["train.jsonl"]),
        (["TRAIN.JSONL", "Val.jsonl"], "", ["TRAIN.JSONL"]),
        (["Training.jsonl", "dev.jsonl"], "", ["Training.jsonl"]),
        (["training_set.jsonl", "test.jsonl"], "", ["training_set.jsonl"]),
        (["geo_train.jsonl", "geo_test.jsonl"], "", ["geo_train.jsonl"]),
        (["Train/a.jsonl", "Test/a.jsonl"], "", ["Train/a.jsonl"]),
        (["data/train-0-of-2.jsonl", "data/train-1-of-2.jsonl", "data/test-0-of-1.jsonl"], "",
         ["data/train-0-of-2.jsonl", "data/train-1-of-2.jsonl"]),
        (["train_algebra.jsonl", "train_geometry.jsonl", "test_all.jsonl"], "", ["train_algebra.jsonl", "train_geometry.jsonl"]),
        (["train/val.jsonl", "train/a.jsonl"], "", ["train/a.jsonl"]),
        (["train2017.jsonl", "val2017.jsonl"], "", ["train2017.jsonl"]),
        (["part-0.jsonl", "part-1.jsonl"], "", ["part-0.jsonl", "part-1.jsonl"]),
        (["a/x.jsonl", "b/y.jsonl"], "train", ["a/x.jsonl", "b/y.jsonl"]),
        (["train.jsonl", "val.jsonl"], "validation", ["val.jsonl"]),
        (["train.jsonl", "Dev.jsonl"], "valid", ["Dev.jsonl"]),
        (["train.jsonl", "test.jsonl"], "TEST", ["test.jsonl"]),
        (["test_hard.jsonl", "test_easy.jsonl"], "test_hard", ["test_hard.jsonl"]),
    ],
)  # fmt: skip
def test_a_split_is_found_by_its_name_in_any_case(
    tmp_path: Path, names: list[str], split: str, chosen: list[str]
) -> None:
    assert names_in(make(tmp_path, *names), split) == chosen


@pytest.mark.parametrize(
    "held_out",
    [
        *(
            "test.jsonl",
            "Test.jsonl",
            "geo_test.jsonl",
            "myTest.jsonl",
            "TestData.jsonl",
            "testset.jsonl",
            "tests/a.jsonl",
        ),
        *(
            "val.jsonl",
            "valid-0.jsonl",
            "validation/a.jsonl",
            "dev.jsonl",
            "eval2.jsonl",
            "val2017.jsonl",
            "testmini.jsonl",
        ),
        *("heldout.jsonl", "held-out.jsonl", "hold_out_set.jsonl", "train_test_split.jsonl", "测试集.jsonl"),
    ],
)
def test_a_held_out_file_is_never_trained_on_by_a_guess(tmp_path: Path, held_out: str) -> None:
    make(tmp_path, "problems.jsonl", held_out)
    with pytest.raises(ConfigError) as caught:
        local_source(str(tmp_path))
    assert f"named after another split: {held_out}." in str(caught.value)
    assert "problems.jsonl" in str(caught.value)


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["main/train.jsonl", "other/train.jsonl"], "in several folders"),
        (["train.jsonl", "archive/train.jsonl"], "in several folders"),
        (["train.jsonl", "train.json"], "not clear which files"),
        (["train.jsonl", "train.csv"], "not clear which files"),
        (["train.jsonl", "train_more.jsonl"], "not clear which files"),
        (["train.jsonl", "train-0-of-1.jsonl"], "not clear which files"),
        (["train-0-of-2.jsonl", "train-0-of-3.jsonl"], "not clear which files"),
        (["train_v1.jsonl", "train_v2.jsonl"], "versions of the same rows"),
        (["train_1k.jsonl", "train_10k.jsonl"], "versions of the same rows"),
        (["geometry.jsonl", "geometry_filtered.jsonl"], "versions of the same rows"),
        (["geo-v1.jsonl", "geo-v2.jsonl", "other.jsonl"], "versions of the same rows"),
        (["train_full.jsonl", "train_small.jsonl"], "versions of the same rows"),
        (["a.jsonl", "a.json"], "files of one name may hold the same rows"),
        (["a.jsonl", "b.csv"], "no data of a single format there: a.jsonl, b.csv"),
        (["notes.txt"], "no data of a single format there"),
    ],
)
def test_where_a_choice_is_due_nothing_is_chosen(tmp_path: Path, names: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        local_source(str(make(tmp_path, *names)))


@pytest.mark.parametrize(
    "names",
    [
        ["part_0.jsonl", "part_1.jsonl"],
        ["train_easy.jsonl", "train_hard.jsonl"],
        ["algebra.jsonl", "geometry.jsonl"],
        ["news.jsonl", "small_talk.jsonl"],
        ["train-00000-of-00002.jsonl", "train-00001-of-00002.jsonl"],
        ["en/a_clean.jsonl", "de/a_clean.jsonl"],
    ],
)
def test_parts_of_one_whole_are_read_together(tmp_path: Path, names: list[str]) -> None:
    assert sorted(names_in(make(tmp_path, *names))) == sorted(names)


def test_a_split_of_which_parts_are_missing_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    names = ["train-00000-of-00003.jsonl", "train-00002-of-00003.jsonl"]
    assert names_in(make(tmp_path, *names)) == names
    assert "2 of the 3 files of 'train' are there" in caplog.text


def test_a_folder_that_names_several_splits_decides_nothing(tmp_path: Path) -> None:
    make(tmp_path, "train_test_split/train.jsonl", "train_test_split/test.jsonl")
    assert names_in(tmp_path) == ["train_test_split/train.jsonl"]
    assert names_in(tmp_path, "test") == ["train_test_split/test.jsonl"]


@pytest.mark.parametrize(
    "stray",
    [
        *(".ipynb_checkpoints/train-checkpoint.jsonl", ".train.jsonl", "._train.jsonl", ".git/train.jsonl"),
        *("__MACOSX/train.jsonl", "__pycache__/train.jsonl", "train.jsonl~", ".train.jsonl.swp", "#train.jsonl#"),
        *("train-Copy1.jsonl", "train (1).jsonl", "train copy.jsonl", "train - Copy.jsonl", "Copy of train.jsonl"),
        *("train - Kopie.jsonl", "train copie.jsonl", "train - copia (2).jsonl", "train - 副本.jsonl"),
        *("train_old.jsonl", "train.bak.jsonl", "train_backup.jsonl", "train-checkpoint.jsonl", "train.jsonl.bak"),
        *("dataset_info.json", "dataset_infos.json", "cache-0123456789abcdef.arrow", "README.json"),
    ],
)
def test_what_programs_leave_beside_data_is_no_data(tmp_path: Path, stray: str) -> None:
    for name in ("train.jsonl", "rows.jsonl"):
        folder = make(tmp_path / name, name, stray.replace("train", name.partition(".")[0]))
        assert names_in(folder) == [name]


def test_a_copy_alone_is_the_data(tmp_path: Path) -> None:
    assert names_in(make(tmp_path, "train-Copy1.jsonl")) == ["train-Copy1.jsonl"]


def save(folder: Path, **splits: int) -> Path:
    tables = {
        name: datasets.Dataset.from_list([{"prompt": f"{name} {i}"} for i in range(n)]) for name, n in splits.items()
    }
    datasets.DatasetDict(tables).save_to_disk(str(folder))
    return folder


def test_a_saved_set_is_what_its_own_list_names(tmp_path: Path) -> None:
    """A cache that `map` left doubles no row, and neither does a stray copy of a part."""
    saved = save(tmp_path / "saved", train=3, Test=2)
    (saved / "train" / "cache-0123456789abcdef.arrow").write_bytes(
        (saved / "train" / "data-00000-of-00001.arrow").read_bytes()
    )
    (saved / "train" / "data-00001-of-00002.arrow").write_bytes(
        (saved / "train" / "data-00000-of-00001.arrow").read_bytes()
    )
    rows = [f"train {i}" for i in range(3)]
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
    [
        ("[:3]", [0, 1, 2]), ("[7:]", [7, 8, 9]), ("[2:4]", [2, 3]), ("[-2:]", [8, 9]), ("[:-8]", [0, 1]),
        ("[:50%]", [0, 1, 2, 3, 4]), ("[80%:]", [8, 9]), ("[25%:45%]", [2, 3]), ("[:99]", [*range(10)]),
    ],
)  # fmt: skip
def test_a_slice_counts_rows_or_percent(tmp_path: Path, part: str, numbers: list[int]) -> None:
    """Shares are rounded to whole rows as the datasets library does: 25 % and 45 % of 10 are 2 and 4."""
    for name, start in (("a.jsonl", 0), ("b.jsonl", 5)):
        (tmp_path / name).write_text("".join(json.dumps({"n": n}) + "\n" for n in range(start, start + 5)))
    assert [row["n"] for row in read_source(f"{tmp_path}@train{part}")] == numbers


def test_a_slice_without_rows_is_refused(tmp_path: Path) -> None:
    make(tmp_path, "a.jsonl")
    for part in ("[5:2]", "[1:]", "[:0]"):
        with pytest.raises(ConfigError, match="have no rows"):
            read_source(f"{tmp_path}@train{part}")
