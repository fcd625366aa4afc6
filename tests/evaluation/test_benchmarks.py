"""Which sources are benchmarks, which are the user's own, and what is said of the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from benchmark_rows import LOGICVISTA, MATHVISTA, PICTURE, ROWS
from case_files import cases
from json_files import write_lines

from cepo.config.schema import DataConfig
from cepo.data.tables import read_source
from cepo.errors import ConfigError, DataError
from cepo.evaluation.benchmark_names import NamedSource
from cepo.evaluation.benchmarks import BENCHMARKS, converted, opened

BY_NAME = {benchmark.name: benchmark for benchmark in BENCHMARKS}


def source(folder: Path, *rows: dict[str, Any]) -> str:
    """A file of rows whose images are a path."""
    rows_of_json: list[dict[str, Any]] = []
    for row in rows:
        without_pictures = {name: value for name, value in row.items() if value is not PICTURE}
        rows_of_json.append(without_pictures | {"image": "a.png"})
    return str(write_lines(folder / "rows.jsonl", rows_of_json))


def own(**keys: Any) -> DataConfig:
    return DataConfig(train_files="unused", **keys)


def test_unknown_columns_are_refused_with_the_choices(tmp_path: Path) -> None:
    """A name is never guessed: question, answer and image are LogicVista's columns and those of many others."""
    file = source(tmp_path, {"question": "How many?", "answer": 3})
    with pytest.raises(ConfigError) as caught:
        opened(NamedSource(name=None, source=file), own())
    message = str(caught.value)
    for words in ("question, answer, image", "data.prompt_key=COLUMN", f"NAME:{file}", "logicvista", "mathvista"):
        assert words in message


def test_a_name_is_taken_whatever_the_users_keys_are(tmp_path: Path) -> None:
    file = source(tmp_path, LOGICVISTA)
    keys = own(prompt_key="question", answer_key="answer")
    assert opened(NamedSource(name="logicvista", source=file), keys)[1] is BY_NAME["logicvista"]
    assert opened(NamedSource(name=None, source=file), keys)[1] is None


def test_a_named_benchmark_without_its_columns_is_refused(tmp_path: Path) -> None:
    file = source(tmp_path, LOGICVISTA)
    with pytest.raises(ConfigError, match="missing: answer_type, choices, question_type"):
        opened(NamedSource(name="mathvista", source=file), own())


BAD_CELLS = [*cases(__file__, "bad_cells.yaml"), ("mmmu", {"options": "[" * 5000}, "is no list")]


@pytest.mark.parametrize(("name", "changed", "words"), BAD_CELLS)
def test_a_bad_cell_is_named_with_its_row_or_skipped(name: str, changed: dict[str, Any], words: str) -> None:
    rows = [ROWS[name] | changed]
    with pytest.raises(DataError) as caught:
        converted(rows, BY_NAME[name], "rows.parquet", skip_bad_rows=False)
    assert "rows.parquet, row 0" in str(caught.value)
    assert words in str(caught.value)
    for is_lmms in (False, True):
        (blank,) = converted(rows, BY_NAME[name], "rows.parquet", skip_bad_rows=True, is_lmms=is_lmms)
        text = blank["problem"][-1]["content"] if is_lmms else blank["problem"]
        assert text == ""


@pytest.mark.parametrize("name", sorted(ROWS))
def test_a_row_becomes_a_problem_with_its_image(name: str) -> None:
    """Numbers in place of texts make no difference."""
    row = ROWS[name]
    with_numbers: dict[str, Any] = {}
    for key, value in row.items():
        with_numbers[key] = int(value) if str(value).isdecimal() else value
    (first,) = converted([row], BY_NAME[name], "f", skip_bad_rows=False)
    (second,) = converted([with_numbers], BY_NAME[name], "f", skip_bad_rows=False)
    assert first == second
    assert first["problem"].count("<image>") == len(first["images"]) == 1
    assert first["images"][0]["bytes"] == b"picture"


def test_images_of_every_form_stand_in_one_table() -> None:
    """A path where the decoded image is missing, bytes, and a list of one."""
    not_decoded = MATHVISTA | {"decoded_image": None}
    rows = [not_decoded, MATHVISTA, not_decoded | {"image": "b.png"}]
    problems = converted(rows, BY_NAME["mathvista"], "f", skip_bad_rows=False)
    assert [problem["images"] for problem in problems] == [["images/1.jpg"], [PICTURE], ["b.png"]]
    listed = LOGICVISTA | {"image": [PICTURE]}
    (problem,) = converted([listed], BY_NAME["logicvista"], "f", skip_bad_rows=False)
    assert problem["images"] == [PICTURE]


def test_a_table_of_texts_is_read_as_one_of_numbers_is() -> None:
    """CSV has the precision 1.0 or 1 and lists as text; NaN is an empty cell."""
    rows = [
        MATHVISTA | {"precision": "1.0"},
        MATHVISTA | {"precision": "1", "choices": "", "unit": ""},
        MATHVISTA | {"precision": 1.0, "unit": float("nan")},
    ]
    for row in rows:
        (problem,) = converted([row], BY_NAME["mathvista"], "f", skip_bad_rows=False)
        assert problem["decimals"] == 1
        assert problem["problem"].count("Unit") == 0


def test_marks_that_a_question_has_are_not_doubled() -> None:
    for question, problem in (("<image>Next?", "<image>Next?"), ("Is <image> or <image>?", "<image>Is  or ?")):
        rows = [LOGICVISTA | {"question": question}]
        assert converted(rows, BY_NAME["logicvista"], "f", skip_bad_rows=False)[0]["problem"] == problem


def test_optional_columns_may_be_missing(tmp_path: Path) -> None:
    for name, row in ROWS.items():
        required = {column: row[column] for column in BY_NAME[name].columns} | {"image": PICTURE}
        if name == "mathvista":
            required |= {"answer_type": "integer", "answer": 3}
        (problem,) = converted([required], BY_NAME[name], "f", skip_bad_rows=False)
        assert problem["answer"], name
    assert len(read_source(source(tmp_path, MATHVISTA))) == 1


STRANGE = [
    None, 5, -1.5, float("nan"), float("inf"), True, "", " ", "?", "A", [], [None], [1, "b"], {}, {"a": [1]}, b"\xff",
    "(" * 999,
]  # fmt: skip


@pytest.mark.parametrize("name", sorted(ROWS))
@pytest.mark.parametrize("is_lmms", [False, True])
def test_a_strange_cell_is_read_or_refused_but_never_a_crash(name: str, is_lmms: bool) -> None:
    """17 values in each column of each benchmark, and the column missing."""
    row = ROWS[name]
    benchmark = BY_NAME[name]
    changed = [row | {column: value} for column in row for value in STRANGE]
    for column in row:
        changed.append({key: value for key, value in row.items() if key != column})
    num_refused = 0
    for cells in changed:
        try:
            (problem,) = converted([cells], benchmark, "f", skip_bad_rows=False, is_lmms=is_lmms)
        except DataError:
            num_refused += 1
            continue
        assert problem["answer"]
        assert all(isinstance(choice, str) for choice in problem["choices"])
        for values in problem["categories"].values():
            assert all(isinstance(value, str) for value in values)
    assert 0 < num_refused < len(changed)
