"""A stranger's run folder, or a damaged one, is read or refused by the name of the file: no traceback, no other file read."""

from __future__ import annotations

import os
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from run_folders import PICTURE, group, rollout, validated, write_run

from cepo import open_run
from cepo.errors import DataError
from cepo.report.run_responses import groups_of_run
from cepo.run_folder.environment import read_environment
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


@pytest.mark.parametrize(
    ("name", "value"),
    [("reward", float("nan")), ("reward", 1e300), ("accuracy", float("-inf")), ("step", 2), ("step", 0), ("step", -5)],
)
def test_a_value_that_no_run_records_is_named(folder: Path, name: str, value: float) -> None:
    """A page cannot hold a reward that is no number, methods have no step before 1, and a step is that of its file."""
    table = pyarrow.parquet.read_table(folder / FILE)
    index = table.column_names.index(name)
    values = pyarrow.array([value] * table.num_rows, type=table.schema.field(name).type)
    pyarrow.parquet.write_table(table.set_column(index, table.schema.field(name), values), folder / FILE)
    for read in (read_rollouts, groups_of_run):
        with pytest.raises(DataError, match=rf"{FILE}: the column '{name}' has .* Remove the file to read the rest"):
            list(read(folder))


def test_lists_of_other_lengths_than_the_tokens_name_the_file(folder: Path) -> None:
    table = pyarrow.parquet.read_table(folder / FILE)
    index = table.column_names.index("delta")
    short = pyarrow.array([[0.5]] * table.num_rows, type=table.schema.field("delta").type)
    pyarrow.parquet.write_table(table.set_column(index, table.schema.field("delta"), short), folder / FILE)
    with pytest.raises(DataError, match=rf"{FILE}: .*delta has 1 entries for 3 tokens"):
        list(read_rollouts(folder))


def test_notes_for_pandas_move_no_column(folder: Path) -> None:
    """A stranger's file may say that its responses are the index of the rows, or not even that in JSON."""
    table = pyarrow.parquet.read_table(folder / FILE)
    for notes in (b'{"index_columns": ["response"], "column_indexes": [], "columns": []}', b"no JSON"):
        noted = table.replace_schema_metadata({**table.schema.metadata, b"pandas": notes})
        pyarrow.parquet.write_table(noted, folder / FILE)
        assert list(open_run(folder).rollouts.columns) == table.column_names


@pytest.mark.parametrize("entries", ['["text"]', "[null]", '[{"devices": 5}]', '[{"devices": [], "format": 1}, []]'])
def test_an_entry_that_describes_no_start_is_named(folder: Path, entries: str) -> None:
    (folder / "environment.json").write_text(entries)
    with pytest.raises(DataError, match=rf"{folder}/environment\.json is damaged; remove it to go on"):
        read_environment(folder)


SAMPLES = [
    "[" * 100_000, '{"a": 1}', '{"step": "x", "prompt_id": "1", "accuracy": 1}', '{"step": 1, "prompt_id": [], "accuracy": 1}',
    '{"step": 1, "prompt_id": "1", "accuracy": 1, "sample": [1]}',
    '{"step": 1, "prompt_id": "1", "accuracy": "x"}', '{"step": 1, "accuracy": 1}', "null",
]  # fmt: skip
METRICS = [
    "[" * 100_000, '{"step": 1' + "0" * 400 + "}", '{"step": NaN}', '{"step": []}', '{"a": 1}', '{"step": 1.5}',
    '{"step": -1}', '{"step": true}', '{"step": "1"}', '{"step": 1, "a": "0.5"}', '{"step": 1, "a": [1]}',
    '{"step": 1}\nnot json\n{}', '{"step": 1}\n{"step": 1}', '{"step": 5}\n{"step": 3}',
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "line"),
    [*(("generations.jsonl", line) for line in SAMPLES), *(("metrics.jsonl", line) for line in METRICS)],
    ids=range(len(SAMPLES) + len(METRICS)),
)
def test_a_line_without_its_fields_is_named(folder: Path, name: str, line: str) -> None:
    (folder / name).write_text(line + "\n")
    number = len(line.splitlines()[:2])
    where = rf"{folder / name}(, line | is damaged in line ){number}\b" if name == "metrics.jsonl" else name
    with pytest.raises(DataError, match=where):
        list((read_metrics if name == "metrics.jsonl" else read_generations)(folder))
