"""A stranger's run folder, or a damaged one, is read or refused by the name of the file: no traceback, no other file read."""

from __future__ import annotations

import os
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from run_folders import PICTURE, group, rollout, validated, write_run

from cepo.errors import DataError
from cepo.run_folder.records import read_generations, read_metrics
from cepo.run_folder.trace import read_rollouts

FILE = "rollouts/step_00000001.parquet"
MAY_BE_NULL = {"token_ids", "delta", "weight", "log_probs_student", "log_probs_correct", "log_probs_wrong",
               "reference_correct", "reference_wrong"}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", validated(0.3, 0.5), groups=[group(1, [rollout(right=True)])])


def test_a_column_that_is_missing_or_without_values_is_named(folder: Path) -> None:
    """Or one of another type; some columns may have no values."""

    def read(table: pyarrow.Table, problem: str | None) -> None:
        pyarrow.parquet.write_table(table, folder / FILE)
        if problem is None:
            assert list(read_rollouts(folder))
            return
        with pytest.raises(DataError, match=rf"{FILE}: the column {problem}.* Remove the file to read the rest"):
            list(read_rollouts(folder))

    table = pyarrow.parquet.read_table(folder / FILE)
    assert len(table.column_names) > 20
    for index, column in enumerate(table.schema):
        name = column.name
        is_of_view = name.startswith("log_probs_")  # the trace of a method without this view lacks it
        read(table.drop_columns([name]), None if is_of_view else f"'{name}' is missing")
        structs = pyarrow.array([{"a": 1}] * table.num_rows)
        empty = pyarrow.nulls(table.num_rows, column.type)
        read(table.set_column(index, name, structs), f"'{name}' has the type")
        may_be_null = name in MAY_BE_NULL
        read(table.set_column(index, column, empty), None if may_be_null else f"'{name}' has no value in some rows")
    for name in ("tokens", "token_advantages", "delta", "images"):
        index = table.column_names.index(name)
        kind = table.schema.field(name).type
        broken = table.set_column(index, name, pyarrow.array([[None]] * table.num_rows, type=kind))
        read(broken, f"'{name}' has lists with no value at some places")


@pytest.mark.parametrize("name", ["../../secret.png", "/etc/hostname", "pipe", "", "0" * 32 + ".png", "link.png"])
def test_an_image_is_read_only_where_its_content_names_it(folder: Path, name: str) -> None:
    (folder.parent.parent / "secret.png").write_bytes(PICTURE)
    os.mkfifo(folder / "images" / "pipe")
    (folder / "images" / "link.png").symlink_to(folder.parent.parent / "secret.png")
    (folder / "images" / ("0" * 32 + ".png")).write_bytes(PICTURE)
    table = pyarrow.parquet.read_table(folder / FILE)
    index = table.column_names.index("images")
    names = pyarrow.array([[name]] * table.num_rows, type=pyarrow.list_(pyarrow.string()))
    pyarrow.parquet.write_table(table.set_column(index, "images", names), folder / FILE)
    with pytest.raises(DataError, match=rf"{FILE}: the image .* is not in the run's images"):
        list(read_rollouts(folder))


SAMPLES = [
    "[" * 100_000, '{"a": 1}', '{"step": "x", "prompt_id": "1", "accuracy": 1}', '{"step": 1, "prompt_id": [], "accuracy": 1}',
    '{"step": 1, "prompt_id": "1", "accuracy": "x"}', '{"step": 1, "accuracy": 1}', "null",
]  # fmt: skip
METRICS = ["[" * 100_000, '{"step": 1' + "0" * 400 + "}", '{"step": NaN}', '{"step": []}', '{"step": 1}\nnot json\n{}']


@pytest.mark.parametrize(
    ("name", "line"),
    [*(("generations.jsonl", line) for line in SAMPLES), *(("metrics.jsonl", line) for line in METRICS)],
    ids=range(len(SAMPLES) + len(METRICS)),
)
def test_a_line_without_its_fields_is_named(folder: Path, name: str, line: str) -> None:
    (folder / name).write_text(line + "\n")
    where = rf"{name} is damaged in line 2" if line in METRICS[4:] else name
    with pytest.raises(DataError, match=where):
        list((read_metrics if name == "metrics.jsonl" else read_generations)(folder))
