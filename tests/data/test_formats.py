"""What a file says is what a row says, in every format; hostile rows are bad rows and never more than that."""

from __future__ import annotations

import bz2
import datetime
import decimal
import gzip
import io
import json
import lzma
import os
import pickle
import time
import zipfile
from pathlib import Path
from typing import Any

import datasets
import numpy
import pandas
import pyarrow
import pyarrow.parquet
import pytest
from fuzzing import only_our_errors
from hypothesis import given
from hypothesis import strategies as st

from cepo.data.json_text import WrittenFloat, json_text, number_text, read_object, without_spelling
from cepo.data.reading import read_source
from cepo.data.row_parser import read_cells
from cepo.data.row_settings import CellRules
from cepo.data.table import rows_of
from cepo.errors import ConfigError, DataError

CELLS = CellRules()
GOOD = '{"prompt": "q", "answer": "1"}'


def rows(folder: Path, name: str, content: str | bytes) -> Any:
    file = folder / name
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    return read_source(str(file))


def answers(table: Any) -> list[str]:
    return [read_cells(row, CELLS).answer for row in table]


def faults(table: Any) -> list[str | None]:
    """The fault of each row, None for a good one."""
    found: list[str | None] = []
    for number in range(len(table)):
        try:
            read_cells(table[number], CELLS)
            found.append(None)
        except DataError as error:
            found.append(str(error))
    return found


# JSON

SPELLED = [
    *("0.50", "5.0", "5", "-0.0", "1e-5", "1E+3", "5e-05", "0.1234567890123456789", "12345678901234567890123"),
    *('"2024-01-02"', '"2024-01-02T03:04:05Z"', '"007"', '"None"', '"nan"', '"1,000"', '" x "', '"true"'),
]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "array.json"])
def test_json_cells_are_spelled_as_in_the_file(tmp_path: Path, name: str) -> None:
    lines = [f'{{"prompt": "q", "answer": {text}, "other": {text}}}' for text in SPELLED]
    table = rows(tmp_path, name, "[" + ",\n".join(lines) + "]" if name == "array.json" else "\n".join(lines))
    assert answers(table) == [text.strip('"').strip() for text in SPELLED]
    others = [without_spelling(row["other"]) for row in table]
    assert others == [json.loads(text) for text in SPELLED]
    assert {type(other) for other in others} == {int, float, str}


@given(number=st.floats(allow_nan=False, allow_infinity=False), count=st.integers(-(10**40), 10**40))
def test_any_json_number_keeps_its_text_and_value(number: float, count: int) -> None:
    row = read_object(f'{{"a": {number!r}, "b": [{count}, {{"c": {number!r}}}]}}'.encode())
    assert (number_text(row["a"]), number_text(row["b"][0])) == (repr(number), str(count))
    assert json_text(row["b"]) == f'[{count}, {{"c": {number!r}}}]'
    assert without_spelling(row) == {"a": number, "b": [count, {"c": number}]}
    assert type(without_spelling(row)["b"][1]["c"]) is float


def test_a_written_number_survives_a_process_boundary() -> None:
    number = pickle.loads(pickle.dumps(WrittenFloat("0.50")))
    assert (number.text, number) == ("0.50", 0.5)


def test_rows_with_other_keys_and_types_are_read(tmp_path: Path) -> None:
    lines = [
        '{"prompt": "a", "answer": 1, "x": 1}',
        '{"answer": "2", "prompt": "b", "y": [1, "t", null]}',
        '{"prompt": "c", "answer": 2.50, "x": {"z": true}}',
        '{"prompt": 4, "answer": true}',
    ]
    table = rows(tmp_path, "a.jsonl", "\n".join(lines))
    assert table.column_names == ["prompt", "answer", "x", "y"]
    assert answers(table) == ["1", "2", "2.50", "true"]
    assert [row["x"] for row in table] == [1, None, {"z": True}, None]
    assert [row["y"] for row in table] == [None, [1, "t", None], None, None]
    assert read_cells(table[3], CELLS).turns[0].text == "4"


def test_objects_over_several_lines_are_rows(tmp_path: Path) -> None:
    good = json.dumps({"prompt": "}{", "answer": "1", "x": {"y": [1]}}, indent=4)
    assert answers(rows(tmp_path, "one.json", good)) == ["1"]
    assert answers(rows(tmp_path, "two.jsonl", f"{good}\n\n{good}\n")) == ["1", "1"]
    found = faults(rows(tmp_path, "bad.json", f"{good}\n{good.replace(':', '=')}\n{good}"))
    assert [found[0], found[2]] == [None, None]
    assert "the row, line 10 of bad.json, is not valid JSON" in str(found[1])
    assert rows(tmp_path, "whole.json", json.dumps({"data": [1]}, indent=1)).column_names == ["data"]


def test_a_file_for_each_row_is_one_table(tmp_path: Path) -> None:
    """300 files need no 300 copies, and no file stays open."""
    for number in range(300):
        (tmp_path / f"{number:03d}.json").write_text(json.dumps({"prompt": "q", "answer": number, f"x{number % 3}": 1}))
    (tmp_path / "150.json").write_text("damaged")
    before = len(os.listdir("/dev/fd"))
    table = read_source(str(tmp_path))
    assert len(os.listdir("/dev/fd")) == before
    assert answers(table.select(number for number in range(300) if number != 150)) == [
        str(number) for number in range(300) if number != 150
    ]
    assert "line 1 of 150.json" in str(faults(table)[150])
    assert len(table.files) == 300
    (tmp_path / "299.json").write_text(json.dumps({"prompt": "q", "answer": "changed"}))
    assert answers(read_source(f"{tmp_path}@train[-1:]")) == ["changed"]


@pytest.mark.parametrize("text", ["null", "NaN", '""', '"  "', "[]"])
def test_null_nan_and_blank_are_an_empty_answer(tmp_path: Path, text: str) -> None:
    assert answers(rows(tmp_path, "a.jsonl", f'{{"prompt": "q", "answer": {text}}}\n{GOOD}')) == ["", "1"]


@pytest.mark.parametrize("text", ["Infinity", "-Infinity", "1e999"])
def test_an_infinite_answer_is_refused(tmp_path: Path, text: str) -> None:
    found = faults(rows(tmp_path, "a.jsonl", f'{{"prompt": "q", "answer": {text}}}\n{GOOD}'))
    assert found == ["column 'answer' is infinite; accepted: text or a finite number", None]


def test_bom_blank_lines_and_line_ends_are_no_content(tmp_path: Path) -> None:
    for name, content in (
        ("a.jsonl", f"\ufeff\n  {GOOD}\r\n\r\n\t{GOOD}"),
        ("b.json", f"\ufeff\n [\n{GOOD}\n ,{GOOD} ]\n\n"),
        ("c.jsonl", f"[{GOOD}, {GOOD}]"),
        ("d.json", json.dumps([json.loads(GOOD)] * 2, indent=4)),
    ):
        assert answers(rows(tmp_path, name, content)) == ["1", "1"]


HOSTILE = [
    ('{"prompt": ' + "[" * 200_000 + "]" * 200_000 + "}", "nested too deeply"),
    ('{"a":' * 200_000 + "1" + "}" * 200_000, "nested too deeply"),
    ('{"prompt": "q", "answer": ' + "9" * 5_000 + "}", "an integer of 5,000 digits"),
    ('{"prompt": "q", "answer": "1", "answer": "2"}', "has the key 'answer' twice"),
    ('{"prompt": "q", "x": {"y": 1, "y": 2}}', "has the key 'y' twice"),
    ('{"prompt": "q\\ud83d", "answer": "1"}', r"has the text \ud83d, half of a pair"),
    ('{"prompt": "q\0", "answer": "1"}', "not valid JSON"),
    ("{'prompt': 'q'}", "not valid JSON"),
    ("null", "is null; accepted: one JSON object per row"),
    ("[1, 2]", "is a list; accepted: one JSON object per row"),
    ('"text"', "is a text; accepted"),
    ("7.5", "is a number; accepted"),
]
UNCLOSED = [
    ("[" * 200_000, "nested too deeply"),
    ('{"prompt": "q", "answer": "1"', "not valid JSON"),
    ('"' * 99_999, "JSON"),
]


@pytest.mark.parametrize(("line", "fault"), [*HOSTILE, *UNCLOSED])
def test_a_hostile_line_is_one_bad_row(tmp_path: Path, line: str, fault: str) -> None:
    begin = time.process_time()
    first, second, third = faults(rows(tmp_path, "a.jsonl", f"{GOOD}\n{line}\n{GOOD}\n"))
    assert (first, third) == (None, None)
    assert second is not None
    assert "the row, line 2 of a.jsonl, " in second
    assert fault in second
    assert time.process_time() - begin < 5


@pytest.mark.parametrize(("element", "fault"), HOSTILE)
def test_a_hostile_element_of_an_array_is_one_bad_row(tmp_path: Path, element: str, fault: str) -> None:
    first, second, third = faults(rows(tmp_path, "a.json", f"[\n{GOOD},\n\n{element},{GOOD}]"))
    assert (first, third) == (None, None)
    assert second is not None
    assert "the row, line 4 of a.json, " in second
    assert fault in second


def test_a_line_beyond_the_limit_is_a_bad_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cepo.data.formats.LARGEST_LINE", 1_000)
    long = json.dumps({"prompt": "x" * 5_000, "answer": "1"})
    for name, content in (("a.jsonl", f"{long}\n{GOOD}"), ("b.json", f"[{long},{GOOD}]")):
        found = faults(rows(tmp_path, name, content))
        assert found == [f"the row, line 1 of {name}, has more than 1,000 bytes", None]


@pytest.mark.parametrize("bad", [b"\xff\xfe", b"\xc3(", "\u4e2d\u6587".encode("gbk"), b"\xed\xa0\xbd"])
@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv"])
def test_text_in_another_encoding_is_a_bad_row(tmp_path: Path, name: str, bad: bytes) -> None:
    good, line = GOOD.encode(), b'{"prompt": "' + bad + b'", "answer": "1"}'
    content = {"a.jsonl": good + b"\n" + line, "a.json": b"[" + good + b",\n" + line + b"]"}
    content["a.csv"] = b'prompt,answer\nq,1\n"' + bad + b'",1'
    found = faults(rows(tmp_path, name, content[name]))
    assert found[0] is None
    assert found[1] is not None
    assert "is not text in UTF-8" in found[1]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (f"[{GOOD}", "is not closed; it may be incomplete"),
        (f"[{GOOD}] {GOOD}", "text follows after the end of its array"),
        (
            "{'a': 1}",
            "no readable row.*one JSON object in each line, or one array of objects",
        ),
        ("[]", "has no rows"),
        ("\n\n", "has no rows"),
        ("", "is empty"),
    ],
)
def test_a_file_without_a_row_is_refused_as_a_whole(tmp_path: Path, content: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        rows(tmp_path, "a.json", content)


def zipped() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("a.jsonl", GOOD)
    return buffer.getvalue()


def parquet_of(table: Any) -> bytes:
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(table, buffer)
    return buffer.getvalue()


OTHERS = {
    "gzip": gzip.compress(GOOD.encode()), "bzip2": bz2.compress(GOOD.encode()), "xz": lzma.compress(GOOD.encode()),
    "zip": zipped(), "zstd": b"\x28\xb5\x2f\xfd" + bytes(9), "Parquet": parquet_of(pyarrow.table({"a": [1]})),
    "UTF-16": GOOD.encode("utf-16"), "Git LFS": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
}  # fmt: skip


@pytest.mark.parametrize("ending", ["jsonl", "json", "csv", "tsv"])
@pytest.mark.parametrize("kind", OTHERS)
def test_another_format_under_a_texts_name_is_refused(tmp_path: Path, kind: str, ending: str) -> None:
    """An archive is not even begun to be unpacked: one of 3 MB can hold 3 GB."""
    with pytest.raises(ConfigError, match=rf"a\.{ending} is .*{kind}.* under the name of a"):
        rows(tmp_path, f"a.{ending}", OTHERS[kind])


def test_a_file_that_changed_under_the_same_time_is_read_anew(tmp_path: Path) -> None:
    for answer in ("old", "new"):
        (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": "q", "answer": answer}))
        os.utime(tmp_path / "a.jsonl", (1e9, 1e9))
        assert answers(read_source(str(tmp_path / "a.jsonl"))) == [answer]


def test_a_damaged_copy_is_written_again(tmp_path: Path) -> None:
    assert answers(rows(tmp_path, "a.jsonl", GOOD)) == ["1"]
    cache = Path(os.environ["XDG_CACHE_HOME"]) / "cepo" / "data" / "rows"
    newest = max(cache.glob("*-json-*.arrow"), key=lambda file: file.stat().st_mtime_ns)
    for content in (newest.read_bytes()[:100], b"", b"x" * 500):
        newest.write_bytes(content)
        assert answers(rows(tmp_path, "a.jsonl", GOOD)) == ["1"]


def test_a_cache_that_cannot_be_used_costs_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert answers(rows(tmp_path, "a.jsonl", GOOD)) == ["1"]


# CSV


def test_csv_fields_are_texts(tmp_path: Path) -> None:
    """The comma of the first row's prompt is in quotes, so the same text with tabs is the same table."""
    lines = ["prompt,answer", '"a, ""b""\nc",None', "x,NA", "", '"",0.50', "y,007", 'z," 1e5 "', "w,"]
    content = "\r\n".join(lines)
    separated = content.replace(",", "\t").replace("a\t", "a,")
    for table in (rows(tmp_path, "a.csv", content), rows(tmp_path, "b.tsv", separated)):
        assert answers(table) == ["None", "NA", "0.50", "007", "1e5", ""]
        assert [row["prompt"] for row in table] == ['a, "b"\nc', "x", None, "y", "z", "w"]


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        ("prompt,answer\nFind x, then y,5\nq,1\n", "line 2 of a.csv, has 3 fields, and the header has 2"),
        ("prompt,answer,z\nq,1\nq,1,2\n", "line 2 of a.csv, has 2 fields, and the header has 3"),
        (
            "prompt,answer,\nFind x, then y,5\nq,1,\n",
            "line 2 of a.csv, has the field '5' in a column that the header does not",
        ),
        (",prompt,answer\nFind x, then y,5\n0,q,1\n", "has the field 'Find x' in a column that the header does not"),
        ('prompt,answer\n"q" x,1\nq,1\n', "line 2 of a.csv, is not valid CSV"),
        ("prompt,answer\nq\0,1\nq,1\n", "line 2 of a.csv, has a null byte"),
    ],
)
def test_a_shifted_csv_row_is_bad_and_named_by_its_line(tmp_path: Path, content: str, fault: str) -> None:
    found = faults(rows(tmp_path, "a.csv", content))
    assert found[0] is not None
    assert fault in found[0]
    assert found[1:] == [None]


def test_a_row_of_too_many_keys_is_a_bad_row(tmp_path: Path) -> None:
    good, many = '{"prompt": "q", "answer": "1"}\n', {f"k{number}": 1 for number in range(2_001)}
    found = faults(rows(tmp_path, "a.jsonl", good + json.dumps(many) + "\n" + good))
    assert found[::2] == [None, None]
    assert "line 2 of a.jsonl, has 2,001 keys" in str(found[1])


def test_a_pointer_under_the_name_of_a_parquet_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is a pointer of Git LFS .*git lfs pull.* of a Parquet file"):
        rows(tmp_path, "a.parquet", "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")


def test_a_negative_zero_keeps_its_sign() -> None:
    row = read_object(b'{"a": -0, "b": [-0, -0.0]}')
    assert (number_text(row["a"]), json_text(row["b"])) == ("-0", "[-0, -0.0]")


@pytest.mark.parametrize("end", ["csv", "tsv"])
def test_a_quote_that_takes_in_all_later_rows_is_an_error(tmp_path: Path, end: str) -> None:
    """As a bad row it would be one of a thousand that are left out, and the rows behind it would be lost unseen."""
    text = 'prompt,answer\nq,1\n"a,2\nb,3\n'.replace(",", "," if end == "csv" else "\t")
    with pytest.raises(
        ConfigError, match=r"line 3: a quotation mark opens a field .* line 4, so that all rows between"
    ):
        rows(tmp_path, f"a.{end}", text)


def test_a_last_line_that_is_cut_within_quotes_is_a_bad_row(tmp_path: Path) -> None:
    found = faults(rows(tmp_path, "a.csv", 'prompt,answer\nq,1\n"a'))
    assert found[0] is None
    assert "line 3 of a.csv, is not valid CSV (unexpected end of data)" in str(found[1])


def test_a_bad_row_of_several_lines_says_which(tmp_path: Path) -> None:
    found = faults(rows(tmp_path, "a.csv", 'prompt,answer\n"a,2\nb,3\n"c,4\nd,5\n'))
    assert "line 2 of a.csv" in str(found[0])
    assert "it takes in all lines to 4, because of an open quotation mark" in str(found[0])
    assert found[1] is None


@pytest.mark.parametrize(
    ("header", "words"),
    [
        ("prompt,answer,answer", "names the column 'answer' twice"),
        (",,", "names no column"),
        ('"prompt" x,answer', "is not valid CSV"),
        ("\xff,answer", "is not text in UTF-8"),
        (",".join(map(str, range(3000))), "names 3,000 columns"),
    ],
)
def test_a_bad_csv_header_is_refused(tmp_path: Path, header: str, words: str) -> None:
    with pytest.raises(ConfigError, match=f"the header, {words}"):
        rows(tmp_path, "a.csv", f"{header}\n1,2,3\n".encode("latin-1"))


def test_row_numbers_that_pandas_wrote_are_no_column(tmp_path: Path) -> None:
    frame = pandas.DataFrame({"prompt": ["a", "b", "c"], "answer": ["1", "2", "3"]}, index=[0, 1, 2])[::2]
    frame.to_csv(tmp_path / "a.csv")
    frame.to_parquet(tmp_path / "a.parquet")
    for name in ("a.csv", "a.parquet"):
        table = read_source(str(tmp_path / name))
        assert table.column_names == ["prompt", "answer"]
        assert answers(table) == ["1", "3"]


# Parquet and Arrow

DAY = datetime.date(2024, 1, 2)
MOMENT = datetime.datetime(2024, 1, 2, 3, 4, 5)
TYPED = {
    "float32": (pyarrow.array([34.6, 0.1], pyarrow.float32()), ["34.6", "0.1"]),
    "float16": (pyarrow.array(numpy.array([34.6, 0.1], numpy.float16)), ["34.6", "0.1"]),
    "small": (pyarrow.array([0.00005, 1e-7]), ["0.00005", "0.0000001"]),
    "large": (pyarrow.array([1e22, 5.0]), ["1" + 22 * "0", "5"]),
    "NaN": (pyarrow.array([float("nan"), 1.5]), ["", "1.5"]),
    "decimal": (pyarrow.array([decimal.Decimal("70.00"), decimal.Decimal("1E-2")], pyarrow.decimal128(9, 2)), ["70.00", "0.01"]),
    "uint64": (pyarrow.array([2**64 - 1, 0], pyarrow.uint64()), ["18446744073709551615", "0"]),
    "date": (pyarrow.array([DAY, None]), ["2024-01-02", ""]),
    "timestamp": (pyarrow.array([MOMENT] * 2, pyarrow.timestamp("s")), ["2024-01-02T03:04:05"] * 2),
    "nanoseconds": (pyarrow.array([1, 0], pyarrow.timestamp("ns")), ["1970-01-01T00:00:00.000000001", "1970-01-01T00:00:00"]),
    "zone": (pyarrow.array([MOMENT] * 2, pyarrow.timestamp("us", "+02:00")), ["2024-01-02T05:04:05+02:00"] * 2),
    "time": (pyarrow.array([datetime.time(3, 4)] * 2), ["03:04:00"] * 2),
    "bool": (pyarrow.array([True, False]), ["true", "false"]),
    "dictionary": (pyarrow.array(["a", "b"]).dictionary_encode(), ["a", "b"]),
    "large_string": (pyarrow.array(["a", "2024-01-02"], pyarrow.large_string()), ["a", "2024-01-02"]),
    "string_view": (pyarrow.array(["a", "b"], pyarrow.string_view()), ["a", "b"]),
    "list": (pyarrow.array([[0.1, 0.5], None], pyarrow.list_(pyarrow.float32())), ["[0.1, 0.5]", ""]),
    "fixed list": (pyarrow.array([[1, 2], [3, 4]], pyarrow.list_(pyarrow.int8(), 2)), ["[1, 2]", "[3, 4]"]),
    "null": (pyarrow.nulls(2), ["", ""]),
}  # fmt: skip


def write_arrow(file: Path, table: Any, *, form: str = "file", compression: str | None = None) -> Path:
    options = pyarrow.ipc.IpcWriteOptions(compression=compression)
    open_writer = pyarrow.ipc.new_file if form == "file" else pyarrow.ipc.new_stream
    with open_writer(file, table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=1)
    return file


@pytest.mark.parametrize("kind", TYPED)
def test_a_typed_cell_is_the_shortest_text_of_its_type(tmp_path: Path, kind: str) -> None:
    values, texts = TYPED[kind]
    table = pyarrow.table({"prompt": ["a", "b"], "answer": values})
    files = [write_arrow(tmp_path / f"{form}.arrow", table, form=form) for form in ("file", "stream")]
    files.append(write_arrow(tmp_path / "zstd.arrow", table, compression="zstd"))
    (tmp_path / "a.parquet").write_bytes(parquet_of(table))
    for file in (*files, tmp_path / "a.parquet"):
        assert answers(read_source(str(file))) == texts


@pytest.mark.parametrize(
    "values",
    [pyarrow.array([b"7", b"8"]), pyarrow.array([datetime.timedelta(1)] * 2), pyarrow.array([{"a": 1}] * 2)],
    ids=["bytes", "duration", "struct"],
)
def test_a_cell_without_a_text_is_a_bad_row(tmp_path: Path, values: Any) -> None:
    (tmp_path / "a.parquet").write_bytes(parquet_of(pyarrow.table({"prompt": ["a", "b"], "answer": values})))
    found = faults(read_source(str(tmp_path / "a.parquet")))
    assert all(fault is not None and "accepted: text or a number" in fault for fault in found)


def test_classes_and_nested_json_are_read_by_the_files_features(tmp_path: Path) -> None:
    """-1 is the datasets library's missing class; a class in a list or a struct has its name too."""
    answer = datasets.ClassLabel(names=["yes", "no"])
    features = datasets.Features(
        {
            "prompt": datasets.Value("string"), "answer": answer, "several": datasets.List(answer),
            "inner": datasets.List({"kind": answer}), "free": datasets.Json(),
        }
    )  # fmt: skip
    columns = {
        "prompt": ["a", "b", "c"], "answer": [1, 0, -1], "several": [[0, 1], [], None],
        "inner": [[{"kind": 1}], [], []], "free": [1, {"x": [0.5]}, "text"],
    }  # fmt: skip
    made = datasets.Dataset.from_dict(columns, features=features)
    made.to_parquet(str(tmp_path / "a.parquet"))
    made.save_to_disk(str(tmp_path / "saved"))
    for table in (read_source(str(tmp_path / "a.parquet")), read_source(str(tmp_path / "saved")), rows_of(made)):
        assert answers(table) == ["no", "yes", ""]
        assert [row["several"] for row in table] == [["yes", "no"], [], None]
        assert table[0]["inner"] == [{"kind": "no"}]
        assert [without_spelling(row["free"]) for row in table] == [1, {"x": [0.5]}, "text"]
    assert answers(rows_of(made.select([2, 0]))) == ["", "no"]


def test_parts_of_other_types_are_one_source(tmp_path: Path) -> None:
    for number, answer in enumerate([["7"], [8], [9.0]]):
        columns = {"prompt": ["q"], "answer": answer} | ({"x": [1]} if number else {})
        (tmp_path / f"part-{number}.parquet").write_bytes(parquet_of(pyarrow.table(columns)))
    table = read_source(str(tmp_path))
    assert answers(table) == ["7", "8", "9"]
    assert [row["x"] for row in table] == [None, 1, 1]


@pytest.mark.parametrize("offsets", [[0, 2**30, 3], [0, -5, 3], [5, 2, 6]])
@pytest.mark.parametrize("depth", [0, 2])
def test_wild_offsets_in_an_arrow_file_are_refused(tmp_path: Path, offsets: list[int], depth: int) -> None:
    """Following one would end the process."""
    buffers = [None, pyarrow.py_buffer(numpy.array(offsets, numpy.int32).tobytes()), pyarrow.py_buffer(b"abcdef")]
    values = pyarrow.Array.from_buffers(pyarrow.string(), 2, buffers)
    for _ in range(depth):
        values = pyarrow.StructArray.from_arrays([pyarrow.ListArray.from_arrays([0, 1, 2], values)], ["x"])
    table = pyarrow.table({"prompt": ["a", "b"], "answer": values})
    with pyarrow.ipc.new_stream(tmp_path / "a.arrow", table.schema) as writer:
        writer.write_table(table)
    with pytest.raises(ConfigError, match=r"a\.arrow cannot be read: ArrowInvalid"):
        read_source(str(tmp_path / "a.arrow"))


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    table = pyarrow.Table.from_arrays([pyarrow.array(["a"]), pyarrow.array(["b"])], names=["answer", "answer"])
    with pytest.raises(DataError, match="two columns are named 'answer'"):
        read_source(str(write_arrow(tmp_path / "a.arrow", table)))


@pytest.mark.parametrize("metadata", [b"{", b"[]", b'{"info": 7}', b'{"info": {"features": []}}', b"[" * 100_000])
def test_metadata_of_another_form_count_as_none(tmp_path: Path, metadata: bytes) -> None:
    table = pyarrow.table({"prompt": ["a"], "answer": [1]}).replace_schema_metadata({b"huggingface": metadata})
    (tmp_path / "a.parquet").write_bytes(parquet_of(table))
    assert answers(read_source(str(tmp_path / "a.parquet"))) == ["1"]


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
@given(changes=st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), max_size=4), cut=st.integers(0, 40))
def test_changed_bytes_of_a_typed_file_are_our_error(
    tmp_path_factory: pytest.TempPathFactory, name: str, changes: list[tuple[int, int]], cut: int
) -> None:
    folder = tmp_path_factory.mktemp("changed")
    table = pyarrow.table({"prompt": ["a", "b"], "answer": [34.5, 1.0], "list": [["x"], ["y", "z"]]})
    content = bytearray(
        parquet_of(table) if name == "a.parquet" else write_arrow(folder / "a.arrow", table).read_bytes()
    )
    for position, value in changes:
        content[position % len(content)] = value
    (folder / name).write_bytes(content[: len(content) - cut])
    with only_our_errors():
        assert len(faults(read_source(str(folder / name)))) > 0
