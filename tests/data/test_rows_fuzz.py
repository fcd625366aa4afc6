"""Any rows of a data set are problems that can be asked, or an error of this package: no traceback, hang or decoder."""

from __future__ import annotations

import datetime
import json
import os
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from fuzzing import only_our_errors
from hypothesis import assume, given
from hypothesis import strategies as st
from image_files import encoded
from json_files import write_lines
from PIL import Image

from cepo.algorithms.settings import TeacherConfig
from cepo.config.schema import DataConfig
from cepo.data.dataset import ProblemSet
from cepo.data.images import load_rgb, verify_image
from cepo.data.messages import ROLES, read_conversation
from cepo.data.prompts import ContextBuilder
from cepo.data.sources import FORMATS
from cepo.data.tables import read_source
from cepo.errors import DataError
from cepo.models.processing import Processing
from cepo.models.text_codec import IMAGE_MARK, VIDEO_MARK

LONGEST = 200
"""Tokens of the longest prompt, so that some rows are overlong."""

# Images

FILES = [encoded(Image.new("RGB", (24, 20), 7), kind) for kind in ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")]
FILES.append(encoded(Image.new("P", (24, 20), 7)))
FILES.append(encoded(Image.new("CMYK", (24, 20), 7), "JPEG"))
NO_IMAGES = [b"", b"no image", b"%!PS-Adobe-3.0 EPSF-3.0\n%%EOF\n", b"\x89PNG\r\n\x1a\n", b"GIF89a", b"P6 9 9 255\n"]


@st.composite
def damaged_files(draw: st.DrawFn) -> bytes:
    """An image file in which bytes were replaced, removed from its end, or added."""
    content = bytearray(draw(st.sampled_from(FILES)))
    for _ in range(draw(st.integers(0, 3))):
        content[draw(st.integers(0, len(content) - 1))] = draw(st.integers(0, 255))
    end = draw(st.integers(0, len(content)))
    return bytes(content[:end]) + draw(st.binary(max_size=4))


IMAGE_BYTES = st.sampled_from(FILES) | damaged_files() | st.sampled_from(NO_IMAGES) | st.binary(max_size=30)
PATHS = st.sampled_from(["", ".", "..", "/dev/null", "/dev/zero", "absent.png", "\0", "x" * 5000, "~", "a.png/b"])
IMAGE_CELLS = st.fixed_dictionaries({"bytes": st.none() | IMAGE_BYTES, "path": st.none() | PATHS})

# Cells

MARKS = st.sampled_from([IMAGE_MARK, VIDEO_MARK, "<|image_pad|>", "<|im_end|>", "{{ x }}", "Find x. ", "\0", "7"])
MARKED = st.lists(MARKS | st.text(), max_size=6).map("".join)
WRITTEN = st.sampled_from(['[{"role": "user"', "[{'role': 'user', 'content': '?'}]", "[]", "{}", "b'", '"', "array(["])
ODD_TEXTS = st.sampled_from(["", " ", "\ufeff", "9" * 5000, IMAGE_MARK * 300]) | WRITTEN
KEYS = st.sampled_from(["role", "content", "type", "text", "é", ""])
SCALARS = st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats() | MARKED | ODD_TEXTS
ODD_VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=6,
)
PARTS = st.fixed_dictionaries({"type": st.sampled_from(["text", "image", "video", "audio"])}, optional={"text": MARKED})
CONTENTS = MARKED | st.lists(PARTS, max_size=3)
MESSAGES = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from([*ROLES, "tool"]), "content": CONTENTS}),
    max_size=4,
)
ROW = st.fixed_dictionaries(
    {
        "prompt": st.text("xyz7 é?", min_size=1) | MESSAGES | MARKED | ODD_VALUES,
        "answer": st.sampled_from(["70", "7.50", " x = 2 "]) | MARKED | ODD_VALUES,
    },
    optional={
        "images": st.just([]) | ODD_VALUES,
        "videos": st.just([]) | PATHS | ODD_VALUES,
        "solution": ODD_VALUES,
    },
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("rows")


@pytest.fixture(scope="module")
def contexts(tiny_processing: Processing) -> ContextBuilder:
    return ContextBuilder(tiny_processing, TeacherConfig(), max_context_length=LONGEST)


def problems_in(source: Path, processing: Processing, *, rows: Any = None, **settings: Any) -> ProblemSet:
    limits: dict[str, Any] = {"min_pixels": None, "max_pixels": 4096, "max_prompt_length": LONGEST}
    config = DataConfig(train_files=str(source), **(limits | settings))
    return ProblemSet(str(source), config, processing, rows=rows)


def require_problems(source: Path, processing: Processing, contexts: ContextBuilder, **settings: Any) -> None:
    """Each usable row can be encoded: nothing that was accepted fails later, in the middle of a run."""
    problems: Any = []
    with only_our_errors():
        problems = problems_in(source, processing, **settings)
    names = [problem.prompt_id for problem in problems]
    assert names == sorted(set(names), key=int), "a row was read twice or out of order"
    for problem in problems:
        text = "".join(turn.text for turn in problem.history) + problem.text
        assert text.count(IMAGE_MARK) == len(problem.images)
        assert problem.ground_truth
        assert problem.ground_truth == problem.ground_truth.strip()
        assert problem.solution is None or problem.solution.strip()
        assert 0 < len(contexts.student(problem).token_ids) <= LONGEST
        assert {"images", "answer", "videos"}.isdisjoint(problem.columns)


@pytest.mark.heavy
@given(rows=st.lists(ROW | ODD_VALUES, max_size=4), skip=st.booleans())
def test_any_lines_of_json_are_problems_or_our_error(
    folder: Path, tiny_processing: Processing, contexts: ContextBuilder, rows: list[Any], skip: bool
) -> None:
    file = write_lines(folder / "rows.jsonl", rows)
    require_problems(file, tiny_processing, contexts, skip_bad_rows=skip)


@pytest.mark.heavy
@given(content=st.binary(max_size=200), name=st.sampled_from([f"bytes{ending}" for ending in FORMATS]))
def test_any_bytes_as_a_data_file_are_our_error(
    folder: Path, tiny_processing: Processing, contexts: ContextBuilder, content: bytes, name: str
) -> None:
    (folder / name).write_bytes(content)
    require_problems(folder / name, tiny_processing, contexts, skip_bad_rows=True)


MESSAGE_TYPE = pyarrow.struct([("role", pyarrow.string()), ("content", pyarrow.string())])
IMAGE_TYPE = pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])
MESSAGE = st.fixed_dictionaries({"role": st.sampled_from(ROLES), "content": MARKED})
FIRST = datetime.datetime(1900, 1, 1)
TYPED_VALUES: dict[pyarrow.DataType, st.SearchStrategy[Any]] = {
    pyarrow.string(): MARKED,
    pyarrow.large_string(): MARKED,
    pyarrow.binary(): st.binary(max_size=9),
    pyarrow.int8(): st.integers(-128, 127),
    pyarrow.float64(): st.floats(),
    pyarrow.bool_(): st.booleans(),
    pyarrow.null(): st.none(),
    pyarrow.decimal128(9, 2): st.decimals(-999, 999, places=2),
    pyarrow.date32(): st.dates(),
    pyarrow.timestamp("us"): st.datetimes(FIRST),
    pyarrow.list_(pyarrow.string()): st.lists(MARKED, max_size=2),
    MESSAGE_TYPE: MESSAGE,
    pyarrow.list_(MESSAGE_TYPE): st.lists(MESSAGE, max_size=3),
    pyarrow.list_(IMAGE_TYPE): st.lists(IMAGE_CELLS, max_size=2),
}


@st.composite
def tables(draw: st.DrawFn) -> pyarrow.Table:
    """A table whose columns have any type; all of them may hold nothing."""
    count = draw(st.integers(1, 3))
    columns: dict[str, pyarrow.Array] = {}
    for name in ("prompt", "answer", "images", "extra"):
        kind = draw(st.sampled_from(list(TYPED_VALUES)))
        values = st.lists(st.none() | TYPED_VALUES[kind], min_size=count, max_size=count)
        if draw(st.integers(0, 9)):
            columns[name] = pyarrow.array(draw(values), kind)
    assume(columns)
    return pyarrow.table(columns)


@pytest.mark.heavy
@given(table=tables(), skip=st.booleans())
def test_columns_of_any_type_are_problems_or_our_error(
    folder: Path, tiny_processing: Processing, contexts: ContextBuilder, table: pyarrow.Table, skip: bool
) -> None:
    file = folder / "rows.parquet"
    pyarrow.parquet.write_table(table, file)
    require_problems(file, tiny_processing, contexts, skip_bad_rows=skip)


@given(contents=st.lists(IMAGE_BYTES, max_size=3), marks=st.integers(0, 3))
def test_rows_with_any_images_are_problems_or_our_error(
    folder: Path, tiny_processing: Processing, contexts: ContextBuilder, contents: list[bytes], marks: int
) -> None:
    images = [{"bytes": content, "path": None} for content in contents]
    rows = [{"prompt": IMAGE_MARK * marks + "?", "answer": "1", "images": images}, {"prompt": "?", "answer": "2"}]
    require_problems(folder, tiny_processing, contexts, rows=rows, skip_bad_rows=True)


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
        turns = read_conversation(messages).turns
    if turns is not None:
        assert [turn.role for turn in turns] == [message["role"] for message in messages]
        assert turns[-1].role == "user"


def test_a_cell_of_parquet_that_is_not_utf8_is_a_bad_row(tmp_path: Path, tiny_processing: Processing) -> None:
    validity, offsets, _ = pyarrow.array(["1 +", "2 +", "__3", "4 +"]).buffers()
    texts = pyarrow.py_buffer(b"1 +2 +\xff\xfe34 +")
    broken = pyarrow.Array.from_buffers(pyarrow.string(), 4, [validity, offsets, texts])
    file = tmp_path / "rows.parquet"
    table = pyarrow.table({"prompt": broken, "answer": ["1", "2", "3", "4"]})
    pyarrow.parquet.write_table(table, file)
    problems = problems_in(file, tiny_processing, skip_bad_rows=True)
    assert [problem.prompt_id for problem in problems] == ["0", "1", "3"]
    with pytest.raises(DataError, match=r"row 2: column 'prompt' cannot be read"):
        problems_in(file, tiny_processing)


@pytest.mark.parametrize("kind", ["Pdf", "Audio", "Image", "Video", "Nifti"])
@pytest.mark.parametrize("nested", [False, True])
def test_metadata_of_a_file_choose_no_decoder(
    tmp_path: Path, tiny_processing: Processing, kind: str, *, nested: bool
) -> None:
    value: object = {"bytes": NO_IMAGES[2], "path": None}
    feature: object = {"_type": kind}
    media: pyarrow.DataType = IMAGE_TYPE
    if nested:
        value = [value]
        feature = {"feature": feature, "_type": "List"}
        media = pyarrow.list_(media)
    text = {"dtype": "string", "_type": "Value"}
    metadata = {"info": {"features": {"prompt": text, "answer": text, "further": feature}}}
    table = pyarrow.table({"prompt": ["1 + 1"], "answer": ["2"], "further": pyarrow.array([value], type=media)})
    file = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(table.replace_schema_metadata({"huggingface": json.dumps(metadata)}), file)
    (problem,) = problems_in(file, tiny_processing)
    assert problem.columns["further"] == value


@pytest.mark.parametrize("name", ["pipe", "device", "link out of the folder"])
def test_data_files_of_a_folder_are_regular(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    (tmp_path / "secret.jsonl").write_text('{"prompt": "s3cret", "answer": "1"}\n')
    train = folder / "train.jsonl"
    if name == "pipe":
        os.mkfifo(train)
    else:
        train.symlink_to("/dev/zero" if name == "device" else tmp_path / "secret.jsonl")
    with pytest.raises(DataError, match=r"is not a regular file|lies outside of"):
        read_source(str(folder))


def test_a_snapshot_in_the_hubs_cache_is_read_through_its_links(tmp_path: Path) -> None:
    snapshot = tmp_path / "datasets--a--b" / "snapshots" / "0123"
    blobs = tmp_path / "datasets--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (blobs / "4567").write_text('{"prompt": "1 + 1", "answer": "2"}\n')
    (snapshot / "train.jsonl").symlink_to("../../blobs/4567")
    assert len(read_source(str(snapshot))) == 1
