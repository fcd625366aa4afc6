"""Data files of a stranger: rows that cannot be read are bad rows, and no file's metadata choose a decoder."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from cepo.config.schema import DataConfig
from cepo.data.dataset import ProblemSet
from cepo.data.reading import read_source
from cepo.errors import ConfigError, DataError
from cepo.microgeo.world import ASSETS
from cepo.models.processing import Processing

PROCESSING = Processing(str(ASSETS))
EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n%%EOF\n"


def problems(file: Path, *, skip: bool) -> ProblemSet:
    columns = {"prompt_key": "problem", "answer_key": "answer"}
    config = DataConfig(train_files=str(file), skip_bad_rows=skip, filter_overlong_prompts=False, **columns)
    return ProblemSet(str(file), config, PROCESSING)


def with_invalid_utf8(folder: Path) -> Path:
    lines = [b'{"problem": "1 + %d", "answer": "2"}\n' % number for number in range(4)]
    lines[2] = b'{"problem": "1 + \xff\xfe", "answer": "2"}\n'
    (folder / "rows.jsonl").write_bytes(b"".join(lines))
    return folder / "rows.jsonl"


def parquet_with_invalid_utf8(folder: Path) -> Path:
    validity, offsets, _ = pyarrow.array(["1 +", "2 +", "__3", "4 +"]).buffers()
    texts = pyarrow.py_buffer(b"1 +2 +\xff\xfe34 +")
    broken = pyarrow.Array.from_buffers(pyarrow.string(), 4, [validity, offsets, texts])
    table = pyarrow.table({"problem": broken, "answer": ["1", "2", "3", "4"]})
    pyarrow.parquet.write_table(table, folder / "rows.parquet")
    return folder / "rows.parquet"


@pytest.mark.parametrize("write", [with_invalid_utf8, parquet_with_invalid_utf8])
def test_a_row_that_is_not_utf8_is_a_bad_row(tmp_path: Path, write: Callable[[Path], Path]) -> None:
    file = write(tmp_path)
    assert [problem.prompt_id for problem in problems(file, skip=True)] == ["0", "1", "3"]
    with pytest.raises(DataError, match=r"row 2: the row cannot be read .*data\.skip_bad_rows=true"):
        problems(file, skip=False)


@pytest.mark.parametrize("kind", ["Pdf", "Audio", "Image", "Video", "Nifti"])
@pytest.mark.parametrize("nested", [False, True])
def test_metadata_of_a_file_choose_no_decoder(tmp_path: Path, kind: str, *, nested: bool) -> None:
    media = pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])
    value: object = {"bytes": EPS, "path": None}
    feature: object = {"_type": kind}
    if nested:
        media, value, feature = pyarrow.list_(media), [value], {"feature": feature, "_type": "List"}
    columns = {"problem": ["1 + 1"], "answer": ["2"], "further": pyarrow.array([value], type=media)}
    text = {"dtype": "string", "_type": "Value"}
    features = {"problem": text, "answer": text, "further": feature}
    table = pyarrow.table(columns).replace_schema_metadata(
        {"huggingface": json.dumps({"info": {"features": features}})}
    )
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    (problem,) = problems(tmp_path / "rows.parquet", skip=True)
    assert problem.columns["further"] == value


@pytest.mark.parametrize("name", ["pipe", "device", "link out of the folder"])
def test_data_files_of_a_folder_are_regular(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    if name == "pipe":
        os.mkfifo(folder / "train.jsonl")
    else:
        (tmp_path / "secret.jsonl").write_text('{"problem": "s3cret", "answer": "1"}\n')
        target = "/dev/zero" if name == "device" else str(tmp_path / "secret.jsonl")
        (folder / "train.jsonl").symlink_to(target)
    with pytest.raises((ConfigError, DataError), match=r"is not a regular file|lies outside of"):
        read_source(str(folder))


def test_a_snapshot_in_the_hubs_cache_is_read_through_its_links(tmp_path: Path) -> None:
    snapshot = tmp_path / "datasets--a--b" / "snapshots" / "0123"
    blobs = tmp_path / "datasets--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (blobs / "4567").write_text('{"problem": "1 + 1", "answer": "2"}\n')
    (snapshot / "train.jsonl").symlink_to("../../blobs/4567")
    assert len(read_source(str(snapshot))) == 1
