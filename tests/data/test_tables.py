"""What a file says is what a row says, in every format."""

from __future__ import annotations

import datetime
import decimal
import gzip
import io
import json
import os
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy
import pandas
import pyarrow
import pyarrow.parquet
import pytest
from case_files import cases
from fuzzing import only_our_errors
from hypothesis import given
from hypothesis import strategies as st

from cepo.data.json_text import WrittenFloat, json_text, number_text, read_object, without_spelling
from cepo.data.row_parser import read_cells
from cepo.data.row_settings import CellRules
from cepo.data.tables import read_source, rows_of
from cepo.errors import ConfigError, DataError

CELLS = CellRules()
GOOD = '{"prompt": "q", "answer": "1"}'
FILES: list[Any] = cases(__file__, "text_files.yaml")


def write(folder: Path, name: str, content: str | bytes) -> str:
    file = folder / name
    if isinstance(content, str):
        content = content.encode()
    file.write_bytes(content)
    return str(file)


def answers(table: Any) -> list[str]:
    return [read_cells(row, CELLS).answer for row in table]


def fault(table: Any, number: int) -> str | None:
    """The fault of a row, None for a good one."""
    try:
        read_cells(table[number], CELLS)
    except DataError as error:
        return str(error)
    return None


def require_faults(table: Any, expected: Sequence[str | None]) -> None:
    assert len(table) == len(expected)
    for number, words in enumerate(expected):
        if words is None:
            assert fault(table, number) is None
            continue
        with pytest.raises(DataError, match=words.replace("\\", r"\\")):
            read_cells(table[number], CELLS)


@pytest.mark.parametrize("case", FILES, ids=lambda case: case["name"])
def test_a_file_of_text_is_read_as_it_is_written(tmp_path: Path, case: Any) -> None:
    source = write(tmp_path, case["file"], case["content"].replace("{row}", GOOD))
    if "error" in case:
        with pytest.raises(ConfigError, match=case["error"]):
            read_source(source)
    elif "answers" in case:
        assert answers(read_source(source)) == case["answers"]
    else:
        require_faults(read_source(source), case["faults"])


# JSON

SPELLED = [
    "0.50", "5.0", "5", "-0.0", "1e-5", "1E+3", "5e-05", "0.1234567890123456789", "12345678901234567890123",
    '"2024-01-02"', '"2024-01-02T03:04:05Z"', '"007"', '"None"', '"nan"', '"1,000"', '" x "', '"true"',
]  # fmt: skip


@pytest.mark.parametrize("form", ["lines", "array"])
def test_json_cells_are_spelled_as_in_the_file(tmp_path: Path, form: str) -> None:
    lines = [f'{{"prompt": "q", "answer": {text}, "other": {text}}}' for text in SPELLED]
    content = "\n".join(lines)
    if form == "array":
        content = "[" + ",\n".join(lines) + "]"
    table = read_source(write(tmp_path, "a.json", content))
    assert answers(table) == [text.strip('"').strip() for text in SPELLED]
    values = [without_spelling(row["other"]) for row in table]
    assert values == [json.loads(text) for text in SPELLED]
    assert {type(value) for value in values} == {int, float, str}


@given(number=st.floats(allow_nan=False, allow_infinity=False), count=st.integers(-(10**40), 10**40))
def test_any_json_number_keeps_its_text_and_value(number: float, count: int) -> None:
    row = read_object(f'{{"a": {number!r}, "b": [{count}, {{"c": {number!r}}}]}}'.encode())
    assert number_text(row["a"]) == repr(number)
    assert number_text(row["b"][0]) == str(count)
    assert json_text(row["b"]) == f'[{count}, {{"c": {number!r}}}]'
    plain = without_spelling(row)
    assert plain == {"a": number, "b": [count, {"c": number}]}
    assert type(plain["b"][1]["c"]) is float


def test_a_negative_zero_keeps_its_sign() -> None:
    row = read_object(b'{"a": -0, "b": [-0, -0.0]}')
    assert number_text(row["a"]) == "-0"
    assert json_text(row["b"]) == "[-0, -0.0]"


def test_a_written_number_survives_a_process_boundary() -> None:
    number = pickle.loads(pickle.dumps(WrittenFloat("0.50")))
    assert number.text == "0.50"
    assert number == 0.5


def test_rows_with_other_keys_and_types_are_read(tmp_path: Path) -> None:
    lines = [
        '{"prompt": "a", "answer": 1, "x": 1}',
        '{"answer": "2", "prompt": "b", "y": [1, "t", null]}',
        '{"prompt": "c", "answer": 2.50, "x": {"z": true}}',
        '{"prompt": 4, "answer": true}',
    ]
    table = read_source(write(tmp_path, "a.jsonl", "\n".join(lines)))
    assert table.column_names == ["prompt", "answer", "x", "y"]
    assert answers(table) == ["1", "2", "2.50", "true"]
    assert [row["x"] for row in table] == [1, None, {"z": True}, None]
    assert [row["y"] for row in table] == [None, [1, "t", None], None, None]
    assert read_cells(table[3], CELLS).turns[0].text == "4"


def test_a_file_for_each_row_is_one_table(tmp_path: Path) -> None:
    """No file stays open."""
    for number in range(300):
        row = {"prompt": "q", "answer": number, f"x{number % 3}": 1}
        write(tmp_path, f"{number:03d}.json", json.dumps(row))
    write(tmp_path, "150.json", "damaged")
    num_open_files = len(os.listdir("/dev/fd"))
    table = read_source(str(tmp_path))
    assert len(os.listdir("/dev/fd")) == num_open_files
    assert "line 1 of 150.json" in str(fault(table, 150))
    assert answers(table[:150]) == [str(number) for number in range(150)]
    assert answers(table[151:]) == [str(number) for number in range(151, 300)]
    write(tmp_path, "299.json", json.dumps({"prompt": "q", "answer": "changed"}))
    assert answers(read_source(f"{tmp_path}@train[-1:]")) == ["changed"]


@pytest.mark.parametrize("bad", [b"\xff\xfe", b"\xc3(", "\u4e2d\u6587".encode("gbk"), b"\xed\xa0\xbd"])
def test_text_in_another_encoding_is_a_bad_row(tmp_path: Path, bad: bytes) -> None:
    lines = GOOD.encode() + b'\n{"prompt": "' + bad + b'", "answer": "1"}'
    table = b'prompt,answer\nq,1\n"' + bad + b'",1'
    for name, content in (("a.jsonl", lines), ("a.csv", table)):
        require_faults(read_source(write(tmp_path, name, content)), [None, "is not text in UTF-8"])
    array = b"[" + lines.replace(b"\n", b",") + b"]"
    with pytest.raises(ConfigError, match=r"a\.json is not text in UTF-8 \(at byte"):
        read_source(write(tmp_path, "a.json", array))


@pytest.mark.parametrize("ending", ["jsonl", "json", "csv"])
@pytest.mark.parametrize("content", [gzip.compress(GOOD.encode()), GOOD.encode("utf-16")], ids=["gzip", "UTF-16"])
def test_a_file_that_is_no_text_is_refused(tmp_path: Path, ending: str, content: bytes) -> None:
    with pytest.raises(ConfigError, match=rf"a\.{ending}.*is not text in UTF-8"):
        read_source(write(tmp_path, f"a.{ending}", content))


@pytest.mark.parametrize(
    ("content", "remedy"),
    [
        (GOOD.encode("utf-16"), "save as CSV UTF-8"),
        ("prompt,answer\ncaf\u00e9,1\n".encode("cp1252"), "save as CSV UTF-8"),
        (b"sep=,\nprompt,answer\nq,1\n", "delete this line"),
    ],
    ids=["UTF-16", "Windows-1252", "Excel's separator"],
)
def test_a_file_of_excels_is_refused_with_the_way_out(tmp_path: Path, content: bytes, remedy: str) -> None:
    with pytest.raises(ConfigError, match=remedy):
        read_source(write(tmp_path, "a.csv", content))


def test_a_file_that_changed_under_the_same_time_is_read_anew(tmp_path: Path) -> None:
    for answer in ("old", "new"):
        source = write(tmp_path, "a.jsonl", json.dumps({"prompt": "q", "answer": answer}))
        os.utime(source, (1e9, 1e9))
        assert answers(read_source(source)) == [answer]


def test_files_of_one_content_are_read_by_their_formats(tmp_path: Path) -> None:
    """The copy in the cache is found by the content and the format."""
    content = "prompt,answer\tother\nq,1\t2\n"
    assert read_source(write(tmp_path, "a.csv", content)).column_names == ["prompt", "answer\tother"]
    assert read_source(write(tmp_path, "a.tsv", content)).column_names == ["prompt,answer", "other"]


# Parquet and Arrow

DAY = datetime.date(2024, 1, 2)
MOMENT = datetime.datetime(2024, 1, 2, 3, 4, 5)
TYPED = {
    "float32": (pyarrow.array([34.6, 0.1], pyarrow.float32()), ["34.6", "0.1"]),
    "float16": (pyarrow.array(numpy.array([34.6, 0.1], numpy.float16)), ["34.6", "0.1"]),
    "small": (pyarrow.array([0.00005, 1e-7]), ["0.00005", "0.0000001"]),
    "large": (pyarrow.array([1e22, 5.0]), ["1" + 22 * "0", "5"]),
    "NaN": (pyarrow.array([float("nan"), 1.5]), ["", "1.5"]),
    "decimal": (pyarrow.array([decimal.Decimal("70.00"), None], pyarrow.decimal128(9, 2)), ["70.00", ""]),
    "uint64": (pyarrow.array([2**64 - 1, 0], pyarrow.uint64()), ["18446744073709551615", "0"]),
    "date": (pyarrow.array([DAY, None]), ["2024-01-02", ""]),
    "timestamp": (pyarrow.array([MOMENT] * 2, pyarrow.timestamp("s")), ["2024-01-02T03:04:05"] * 2),
    "zone": (pyarrow.array([MOMENT] * 2, pyarrow.timestamp("us", "+02:00")), ["2024-01-02T05:04:05+02:00"] * 2),
    "time": (pyarrow.array([datetime.time(3, 4)] * 2), ["03:04:00"] * 2),
    "bool": (pyarrow.array([True, False]), ["true", "false"]),
    "dictionary": (pyarrow.array(["a", "b"]).dictionary_encode(), ["a", "b"]),
    "large_string": (pyarrow.array(["a", "2024-01-02"], pyarrow.large_string()), ["a", "2024-01-02"]),
    "string_view": (pyarrow.array(["a", "b"], pyarrow.string_view()), ["a", "b"]),
    "list": (pyarrow.array([[0.1, 0.5], None], pyarrow.list_(pyarrow.float32())), ["[0.1, 0.5]", ""]),
    "fixed list": (pyarrow.array([[1, 2], [3, 4]], pyarrow.list_(pyarrow.int8(), 2)), ["[1, 2]", "[3, 4]"]),
    "null": (pyarrow.nulls(2), ["", ""]),
}


def parquet_of(table: Any) -> bytes:
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(table, buffer)
    return buffer.getvalue()


def write_arrow(file: Path, table: Any, *, form: str = "file", compression: str | None = None) -> str:
    options = pyarrow.ipc.IpcWriteOptions(compression=compression)
    open_writer = pyarrow.ipc.new_file if form == "file" else pyarrow.ipc.new_stream
    with open_writer(file, table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=1)
    return str(file)


@pytest.mark.parametrize("kind", TYPED)
def test_a_typed_cell_is_the_shortest_text_of_its_type(tmp_path: Path, kind: str) -> None:
    values, texts = TYPED[kind]
    table = pyarrow.table({"prompt": ["a", "b"], "answer": values})
    sources = [
        write_arrow(tmp_path / "file.arrow", table),
        write_arrow(tmp_path / "stream.arrow", table, form="stream"),
        write_arrow(tmp_path / "zstd.arrow", table, compression="zstd"),
        write(tmp_path, "a.parquet", parquet_of(table)),
    ]
    for source in sources:
        assert answers(read_source(source)) == texts


@pytest.mark.parametrize(
    "values",
    [pyarrow.array([b"7", b"8"]), pyarrow.array([datetime.timedelta(1)] * 2), pyarrow.array([{"a": 1}] * 2)],
    ids=["bytes", "duration", "struct"],
)
def test_a_cell_without_a_text_is_a_bad_row(tmp_path: Path, values: Any) -> None:
    table = pyarrow.table({"prompt": ["a", "b"], "answer": values})
    source = write(tmp_path, "a.parquet", parquet_of(table))
    require_faults(read_source(source), ["accepted: text or a number"] * 2)


def test_a_column_of_a_type_that_rows_cannot_have_is_named(tmp_path: Path) -> None:
    """Spark and DuckDB write maps. The column's own name was in no message of the library's."""
    kind: Any = pyarrow.map_(pyarrow.string(), pyarrow.int64())
    table = pyarrow.table({"prompt": ["a"], "answer": ["1"], "tags": pyarrow.array([[("k", 1)]], kind)})
    source = write(tmp_path, "a.parquet", parquet_of(table))
    with pytest.raises(ConfigError, match=r"column 'tags' has the type map<string, int64.*write it as text"):
        read_source(source)


def test_classes_and_nested_json_are_read_by_the_files_features(tmp_path: Path) -> None:
    """-1 is the datasets library's missing class; a class in a list or a struct has its name too."""
    kind = datasets.ClassLabel(names=["yes", "no"])
    features = datasets.Features(
        {
            "prompt": datasets.Value("string"),
            "answer": kind,
            "several": datasets.List(kind),
            "inner": datasets.List({"kind": kind}),
            "free": datasets.Json(),
        }
    )
    columns = {
        "prompt": ["a", "b", "c"],
        "answer": [1, 0, -1],
        "several": [[0, 1], [], None],
        "inner": [[{"kind": 1}], [], []],
        "free": [1, {"x": [0.5]}, "text"],
    }
    dataset = datasets.Dataset.from_dict(columns, features=features)
    dataset.to_parquet(str(tmp_path / "a.parquet"))
    dataset.save_to_disk(str(tmp_path / "saved"))
    for table in (read_source(str(tmp_path / "a.parquet")), read_source(str(tmp_path / "saved")), rows_of(dataset)):
        assert answers(table) == ["no", "yes", ""]
        assert [row["several"] for row in table] == [["yes", "no"], [], None]
        assert table[0]["inner"] == [{"kind": "no"}]
        assert [without_spelling(row["free"]) for row in table] == [1, {"x": [0.5]}, "text"]
    assert answers(rows_of(dataset.select([2, 0]))) == ["", "no"]


def test_parts_of_other_types_are_one_source(tmp_path: Path) -> None:
    for number, answer in enumerate([["7"], [8], [9.0]]):
        columns: dict[str, Any] = {"prompt": ["q"], "answer": answer}
        if number > 0:
            columns["x"] = [1]
        write(tmp_path, f"part-{number}.parquet", parquet_of(pyarrow.table(columns)))
    table = read_source(str(tmp_path))
    assert answers(table) == ["7", "8", "9"]
    assert [row["x"] for row in table] == [None, 1, 1]


def test_row_numbers_that_pandas_wrote_are_no_column(tmp_path: Path) -> None:
    frame = pandas.DataFrame({"prompt": ["a", "b", "c"], "answer": ["1", "2", "3"]}, index=[0, 1, 2])[::2]
    frame.to_parquet(tmp_path / "a.parquet")
    table = read_source(str(tmp_path / "a.parquet"))
    assert table.column_names == ["prompt", "answer"]
    assert answers(table) == ["1", "3"]


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    table = pyarrow.Table.from_arrays([pyarrow.array(["a"]), pyarrow.array(["b"])], names=["answer", "answer"])
    with pytest.raises(ConfigError, match=r"a\.arrow cannot be read: .*answer"):
        read_source(write_arrow(tmp_path / "a.arrow", table))


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
@given(changes=st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), max_size=4), cut=st.integers(0, 40))
def test_changed_bytes_of_a_typed_file_are_our_error(
    tmp_path_factory: pytest.TempPathFactory, name: str, changes: list[tuple[int, int]], cut: int
) -> None:
    folder = tmp_path_factory.mktemp("changed")
    table = pyarrow.table({"prompt": ["a", "b"], "answer": [34.5, 1.0], "list": [["x"], ["y", "z"]]})
    write_arrow(folder / "a.arrow", table)
    write(folder, "a.parquet", parquet_of(table))
    content = bytearray((folder / name).read_bytes())
    for position, value in changes:
        content[position % len(content)] = value
    (folder / name).write_bytes(content[: len(content) - cut])
    with only_our_errors():
        rows = read_source(str(folder / name))
        for number in range(len(rows)):
            fault(rows, number)
