"""Any rows of a data set are problems that can be asked, or an error of this package: no traceback, hang or decoder."""

from __future__ import annotations

import datetime
import decimal
import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from fuzzing import only_our_errors
from hypothesis import assume, given
from hypothesis import strategies as st
from PIL import Image

from cepo.algorithms.settings import TeacherConfig
from cepo.config.schema import DataConfig
from cepo.data.dataset import ProblemSet
from cepo.data.images import load_rgb, verify_image
from cepo.data.messages import ROLES, read_turns
from cepo.data.prompts import ContextBuilder
from cepo.data.row_settings import ProblemRules
from cepo.data.sources import FORMATS, LocalSource, local_source
from cepo.data.tables import read_source
from cepo.errors import ConfigError, DataError
from cepo.models.processing import Processing
from cepo.models.text_codec import IMAGE_MARK, VIDEO_MARK

LONGEST = 200
"""Tokens of the longest prompt, so that some rows are overlong."""


def encoded(kind: str, size: tuple[int, int] = (24, 20), mode: str = "RGB") -> bytes:
    buffer = io.BytesIO()
    Image.new(mode, size, 7).save(buffer, format=kind)
    return buffer.getvalue()


FILES = {kind: encoded(kind) for kind in ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")}
FILES |= {"palette": encoded("PNG", mode="P"), "bits": encoded("TIFF", mode="1"), "CMYK": encoded("JPEG", mode="CMYK")}
NO_IMAGES = (b"", b"no image", b"%!PS-Adobe-3.0 EPSF-3.0\n%%EOF\n", b"\x89PNG\r\n\x1a\n", b"GIF89a", b"P6 9 9 255\n")


@st.composite
def damaged_files(draw: st.DrawFn) -> bytes:
    """An image file in which bytes were replaced, removed from its end, or added."""
    content = bytearray(draw(st.sampled_from(list(FILES.values()))))
    for _ in range(draw(st.integers(0, 3))):
        content[draw(st.integers(0, len(content) - 1))] = draw(st.integers(0, 255))
    return bytes(content[: draw(st.integers(0, len(content)))] + draw(st.binary(max_size=4)))


WHOLE_FILES = st.sampled_from(list(FILES.values()))
IMAGE_BYTES = WHOLE_FILES | damaged_files() | st.sampled_from(NO_IMAGES) | st.binary(max_size=30)
PATHS = st.sampled_from(["", ".", "..", "/dev/null", "/dev/zero", "absent.png", "\0", "x" * 5000, "~", "a.png/b"])
IMAGE_CELLS = st.fixed_dictionaries({"bytes": st.none() | IMAGE_BYTES, "path": st.none() | PATHS})
MARKS = st.sampled_from([IMAGE_MARK, VIDEO_MARK, "<|image_pad|>", "<|im_end|>", "{{ x }}", "Find x. ", "\0", "7"])
MARKED = st.lists(MARKS | st.text(), max_size=6).map("".join)
KEYS = st.sampled_from(["role", "content", "type", "text", "é", ""])
ODD_TEXTS = st.sampled_from(["", " ", "\ufeff", "9" * 5000, IMAGE_MARK * 300])
ODD_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats() | MARKED | ODD_TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=6,
)
PARTS = st.fixed_dictionaries({"type": st.sampled_from(["text", "image", "video", "audio"])}, optional={"text": MARKED})
MESSAGES = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from([*ROLES, "tool"]), "content": MARKED | st.lists(PARTS, max_size=3)}),
    max_size=4,
)
PLAIN = {
    "prompt": st.text("xyz7 é?", min_size=1),
    "answer": st.sampled_from(["70", "7.50", " x = 2 "]) | st.floats(1, 9),
}
ODD_COLUMNS = st.fixed_dictionaries(
    {},
    optional={
        "prompt": MARKED | MESSAGES | ODD_VALUES,
        "answer": MARKED | ODD_VALUES,
        "images": st.just([]) | ODD_VALUES,
        "videos": st.just([]) | PATHS | ODD_VALUES,
        "solution": ODD_VALUES,
    },
)
ROWS = st.lists(st.fixed_dictionaries(PLAIN) | st.fixed_dictionaries(PLAIN | {"prompt": MESSAGES}), max_size=3)
"""Rows of which most can be asked."""


@st.composite
def odd_rows(draw: st.DrawFn) -> list[Any]:
    """Rows of which one or two have odd cells, or are no rows."""
    rows: list[Any] = draw(ROWS)
    for _ in range(draw(st.integers(0, 2))):
        row = draw(st.fixed_dictionaries(PLAIN)) | draw(ODD_COLUMNS)
        shuffled = {key: row[key] for key in draw(st.permutations(list(row)))}
        rows.append(shuffled if draw(st.integers(0, 7)) else draw(ODD_VALUES))
    return rows


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("rows")


@pytest.fixture(scope="module")
def contexts(tiny_processing: Processing) -> ContextBuilder:
    return ContextBuilder(tiny_processing, TeacherConfig(), max_context_length=LONGEST)


def config_of(source: Path, **settings: Any) -> DataConfig:
    limits = {"min_pixels": None, "max_pixels": 4096, "max_prompt_length": LONGEST}
    return DataConfig(train_files=str(source), **(limits | settings))


def asked(source: Path, processing: Processing, contexts: ContextBuilder, *, rows: Any = None, **settings: Any) -> int:
    """Reads a source and encodes each usable row; returns the number of problems, all of which agree with their checks."""
    problems: ProblemSet | None = None
    with only_our_errors():
        problems = ProblemSet(str(source), ProblemRules.of(config_of(source, **settings)), processing, rows=rows)
    if problems is None:
        return 0
    names = [problem.prompt_id for problem in problems]
    assert names == sorted(set(names), key=int), "a row was read twice or out of order"
    for problem in problems:  # nothing that was accepted may fail later, in the middle of a run
        text = "".join(turn.text for turn in (*problem.history,)) + problem.text
        assert text.count(IMAGE_MARK) == len(problem.images)
        assert problem.ground_truth == problem.ground_truth.strip() != ""
        assert problem.solution is None or problem.solution.strip()
        assert 0 < len(contexts.student(problem).token_ids) <= LONGEST
        assert {"images", "answer", "videos"}.isdisjoint(problem.columns)
    assert len(problems) > 0, "a source without a usable row is an error"
    return len(problems)


@pytest.mark.heavy
@given(rows=odd_rows(), skip=st.booleans())
def test_any_lines_of_json_are_problems_or_our_error(
    folder: Path, tiny_processing: Processing, contexts: ContextBuilder, rows: list[Any], skip: bool
) -> None:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked(file, tiny_processing, contexts, skip_bad_rows=skip)


@pytest.mark.heavy
@given(content=st.binary(max_size=200), name=st.sampled_from([f"bytes{ending}" for ending in FORMATS]))
def test_any_bytes_as_a_data_file_are_our_error(
    folder: Path, tiny_processing: Processing, contexts: ContextBuilder, content: bytes, name: str
) -> None:
    (folder / name).write_bytes(content)
    asked(folder / name, tiny_processing, contexts, skip_bad_rows=True)


MESSAGE_TYPE = pyarrow.struct([("role", pyarrow.string()), ("content", pyarrow.string())])
MESSAGE = st.fixed_dictionaries({"role": st.sampled_from(ROLES), "content": MARKED})
TYPED_VALUES: dict[pyarrow.DataType, st.SearchStrategy[Any]] = {
    pyarrow.string(): MARKED,
    pyarrow.large_string(): MARKED,
    pyarrow.binary(): st.binary(max_size=9),
    pyarrow.int8(): st.integers(-128, 127),
    pyarrow.float64(): st.floats(),
    pyarrow.bool_(): st.booleans(),
    pyarrow.null(): st.none(),
    pyarrow.decimal128(9, 2): st.decimals(-999, 999, places=2) | st.just(decimal.Decimal("70.00")),
    pyarrow.date32(): st.dates(),
    pyarrow.timestamp("us"): st.datetimes(datetime.datetime(1900, 1, 1), datetime.datetime(2100, 1, 1)),
    pyarrow.list_(pyarrow.string()): st.lists(MARKED, max_size=2),
    MESSAGE_TYPE: MESSAGE,
    pyarrow.list_(MESSAGE_TYPE): st.lists(MESSAGE, max_size=3),
    pyarrow.map_(pyarrow.string(), pyarrow.int8()): st.lists(
        st.tuples(st.text(max_size=3), st.integers(0, 9)), max_size=2
    ),
    pyarrow.list_(pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])): st.lists(
        IMAGE_CELLS, max_size=2
    ),
}
USUAL = {
    "prompt": (pyarrow.string(), PLAIN["prompt"]),
    "answer": (pyarrow.large_string(), st.sampled_from(["7", "7.50"])),
}


@st.composite
def tables(draw: st.DrawFn) -> pyarrow.Table:
    """A table whose columns have any type; all of them may hold nothing."""
    count = draw(st.integers(1, 3))
    columns: dict[str, pyarrow.Array] = {}
    for name in ("prompt", "answer", "images", "extra"):
        kind, values = USUAL.get(name, (pyarrow.null(), st.none()))
        if draw(st.integers(0, 3)) == 0:
            kind = draw(st.sampled_from(list(TYPED_VALUES)))
            values = st.none() | TYPED_VALUES[kind]
        if draw(st.integers(0, 19)):
            columns[name] = pyarrow.array(draw(st.lists(values, min_size=count, max_size=count)), kind)
    assume(columns)
    return pyarrow.table(columns)


@pytest.mark.heavy
@given(table=tables(), skip=st.booleans())
def test_columns_of_any_type_are_problems_or_our_error(
    folder: Path, tiny_processing: Processing, contexts: ContextBuilder, table: pyarrow.Table, skip: bool
) -> None:
    file = folder / "rows.parquet"
    pyarrow.parquet.write_table(table, file)
    found = asked(file, tiny_processing, contexts, skip_bad_rows=skip)
    kinds = [table.schema.field(name).type for name in table.column_names if name in ("prompt", "answer")]
    assert found == 0 or (len(kinds) == 2 and pyarrow.binary() not in kinds), "bytes are no text"


@pytest.mark.parametrize(
    ("content", "line"),
    [("null\n", 1), ('\ufeff null\n{"prompt": "x"}', 1), ('\n\n  null {"a": 1}', 3), ('{"a": 1}\nnull\n', 2), ("[\n null]", 2)],
)  # fmt: skip
def test_a_row_of_null_is_named(folder: Path, content: str, line: int) -> None:
    file = folder / "null.jsonl"
    file.write_text(content, encoding="utf-8")
    fault = rf"line {line} of null\.jsonl, is null; accepted: one JSON object|data file .*/null\.jsonl has no readable row: "
    with pytest.raises((ConfigError, DataError), match=fault):
        [*read_source(str(file))]


@given(content=st.lists(IMAGE_BYTES, max_size=3), marks=st.integers(0, 3))
def test_rows_with_any_images_are_problems_or_our_error(
    folder: Path, tiny_processing: Processing, contexts: ContextBuilder, content: list[bytes], marks: int
) -> None:
    images = [{"bytes": each, "path": None} for each in content]
    features = datasets.Features(
        {"prompt": datasets.Value("string"), "answer": datasets.Value("string"), "images": datasets.List(datasets.Image())}
    )  # fmt: skip
    rows = datasets.Dataset.from_list(
        [
            {"prompt": IMAGE_MARK * marks + "?", "answer": "1", "images": images},
            {"prompt": "Find x.", "answer": "2", "images": []},
        ],
        features=features,
    )
    found = asked(folder, tiny_processing, contexts, rows=rows, skip_bad_rows=True)
    assert found == 1 or marks == len(content)


@given(value=IMAGE_BYTES | PATHS | ODD_VALUES | IMAGE_CELLS)
def test_an_image_that_passes_its_check_can_be_decoded(value: Any) -> None:
    size: tuple[int, int] | None = None
    with only_our_errors():
        size = verify_image(value, None)
    if size is not None:
        image = load_rgb(value, None)
        assert image.mode == "RGB"
        assert image.size == size


@given(messages=MESSAGES | st.lists(ODD_VALUES, max_size=3))
def test_any_messages_are_turns_or_our_error(messages: Any) -> None:
    turns = None
    with only_our_errors():
        turns = read_turns(messages)
    if turns is None:
        return
    assert [turn.role for turn in turns] == [message["role"] for message in messages]
    assert turns[-1].role == "user"
    for turn, message in zip(turns, messages, strict=True):
        content = message["content"]
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        texts = [part["text"] for part in parts if part["type"] == "text"]
        marks = [part["type"] for part in parts].count("image")
        assert turn.text.count(IMAGE_MARK) == marks + sum(text.count(IMAGE_MARK) for text in texts)
        assert len(turn.text) == sum(map(len, texts)) + sum(
            len(f"<{part['type']}>") for part in parts if part["type"] != "text"
        )


NAMES = st.lists(
    st.sampled_from(["train", "test", "train-00000-of-00002", "retrain", "train2", "val_1", "state", "é", ".hidden"]),
    min_size=1, max_size=3, unique=True,
)  # fmt: skip
KNOWN_SPLITS = ["", "train", "test", "val_1", "train[:1]", "train[1:]", "test[50%:]", "[", "a b"]
SPLITS = st.sampled_from(KNOWN_SPLITS) | st.text(max_size=6)


@given(names=NAMES, endings=st.lists(st.sampled_from([*FORMATS, ".txt", ""]), min_size=3, max_size=3), split=SPLITS)
def test_the_files_of_a_split_are_of_one_format_or_our_error(
    tmp_path_factory: pytest.TempPathFactory, names: list[str], endings: list[str], split: str
) -> None:  # fmt: skip
    assume("\0" not in split)
    place = tmp_path_factory.mktemp("split")
    for name, ending in zip(names, endings, strict=False):
        (place / f"{name}{ending}").touch()
    found: LocalSource | None = None
    with only_our_errors():
        found = local_source(f"{place}@{split}" if split else str(place))
    if found is not None:
        files = found.files
        assert len({FORMATS[file.suffix] for file in files}) == 1
        assert files == sorted(set(files))
        wanted = (split or "train").partition("[")[0]
        if wanted == "train":
            assert not [file for file in files if file.stem in ("test", "val_1")]
        else:
            assert all(file.stem.lower().startswith(wanted.lower()) for file in files)
        begin, end = found.bounds(10)
        assert 0 <= begin <= end <= 10


def test_the_guard_sees_other_errors() -> None:
    for error in (KeyError("prompt"), RecursionError("deep")):
        with pytest.raises(type(error)), only_our_errors():
            raise error
    with pytest.raises(AssertionError, match="does not name anything"), only_our_errors():
        raise DataError(" ")


def with_invalid_utf8(folder: Path) -> Path:
    lines = [b'{"prompt": "1 + %d", "answer": "2"}\n' % number for number in range(4)]
    lines[2] = b'{"prompt": "1 + \xff\xfe", "answer": "2"}\n'
    (folder / "rows.jsonl").write_bytes(b"".join(lines))
    return folder / "rows.jsonl"


def parquet_with_invalid_utf8(folder: Path) -> Path:
    validity, offsets, _ = pyarrow.array(["1 +", "2 +", "__3", "4 +"]).buffers()
    texts = pyarrow.py_buffer(b"1 +2 +\xff\xfe34 +")
    broken = pyarrow.Array.from_buffers(pyarrow.string(), 4, [validity, offsets, texts])
    table = pyarrow.table({"prompt": broken, "answer": ["1", "2", "3", "4"]})
    pyarrow.parquet.write_table(table, folder / "rows.parquet")
    return folder / "rows.parquet"


@pytest.mark.parametrize("write", [with_invalid_utf8, parquet_with_invalid_utf8])
def test_a_row_that_is_not_utf8_is_a_bad_row(
    tmp_path: Path, tiny_processing: Processing, write: Callable[[Path], Path]
) -> None:
    file = write(tmp_path)
    problems = ProblemSet(str(file), ProblemRules.of(config_of(file, skip_bad_rows=True)), tiny_processing)
    assert [problem.prompt_id for problem in problems] == ["0", "1", "3"]
    with pytest.raises(
        DataError,
        match=r"row 2: (the row, line 3 of rows.jsonl, is not text|column 'prompt' cannot be read).*data\.skip_bad_rows=true",
    ):
        ProblemSet(str(file), ProblemRules.of(config_of(file)), tiny_processing)


@pytest.mark.parametrize("kind", ["Pdf", "Audio", "Image", "Video", "Nifti"])
@pytest.mark.parametrize("nested", [False, True])
def test_metadata_of_a_file_choose_no_decoder(
    tmp_path: Path, tiny_processing: Processing, kind: str, *, nested: bool
) -> None:
    media = pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])
    value: object = {"bytes": NO_IMAGES[2], "path": None}
    feature: object = {"_type": kind}
    if nested:
        media, value, feature = pyarrow.list_(media), [value], {"feature": feature, "_type": "List"}
    columns = {"prompt": ["1 + 1"], "answer": ["2"], "further": pyarrow.array([value], type=media)}
    text = {"dtype": "string", "_type": "Value"}
    features = {"prompt": text, "answer": text, "further": feature}
    table = pyarrow.table(columns).replace_schema_metadata(
        {"huggingface": json.dumps({"info": {"features": features}})}
    )
    file = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(table, file)
    (problem,) = ProblemSet(str(file), ProblemRules.of(config_of(file)), tiny_processing)
    assert problem.columns["further"] == value


@pytest.mark.parametrize("name", ["pipe", "device", "link out of the folder"])
def test_data_files_of_a_folder_are_regular(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    if name == "pipe":
        os.mkfifo(folder / "train.jsonl")
    else:
        (tmp_path / "secret.jsonl").write_text('{"prompt": "s3cret", "answer": "1"}\n')
        target = "/dev/zero" if name == "device" else str(tmp_path / "secret.jsonl")
        (folder / "train.jsonl").symlink_to(target)
    with pytest.raises((ConfigError, DataError), match=r"is not a regular file|lies outside of"):
        read_source(str(folder))


def test_a_snapshot_in_the_hubs_cache_is_read_through_its_links(tmp_path: Path) -> None:
    snapshot = tmp_path / "datasets--a--b" / "snapshots" / "0123"
    blobs = tmp_path / "datasets--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (blobs / "4567").write_text('{"prompt": "1 + 1", "answer": "2"}\n')
    (snapshot / "train.jsonl").symlink_to("../../blobs/4567")
    assert len(read_source(str(snapshot))) == 1
