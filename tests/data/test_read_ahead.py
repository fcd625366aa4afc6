"""What a step gets is the same whether it was read ahead or not, errors come when they are due, and nothing outlives the run."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from generator_cases import picture

from cepo.algorithms.settings import TeacherConfig
from cepo.config.schema import DataConfig
from cepo.data import read_ahead
from cepo.data.dataset import ProblemSet
from cepo.data.prompts import ContextBuilder, Problem
from cepo.data.read_ahead import ProblemReader, ReadProblem
from cepo.data.training_set import TrainingProblems
from cepo.errors import DataError
from cepo.models.processing import Processing

BATCH = 4


@pytest.fixture(autouse=True)
def _always_worthwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_ahead, "WORTHWHILE_SECONDS", -1.0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number in range(12):
        picture(number, (64, 64 + 32 * (number % 2))).save(tmp_path / f"{number}.png")
    return tmp_path


def problems_in(folder: Path, processing: Processing, *, images: bool = True) -> TrainingProblems:
    mark = "<image>" if images else ""
    rows: list[dict[str, Any]] = []
    for number in range(12):
        row: dict[str, Any] = {"prompt": f"{mark}row {number}", "answer": "1"}
        if images:
            row["images"] = [f"{number}.png"]
        rows.append(row)
    config = DataConfig(train_files="rows", image_dir=str(folder), min_pixels=None, max_prompt_length=4096)
    problems = ProblemSet("rows", config, processing, rows=Dataset.from_list(rows))
    return TrainingProblems([problems])


@pytest.fixture
def contexts(tiny_processing: Processing) -> ContextBuilder:
    return ContextBuilder(tiny_processing, TeacherConfig(), max_context_length=4096)


@pytest.fixture
def reader(folder: Path, tiny_processing: Processing, contexts: ContextBuilder) -> Iterator[ProblemReader]:
    problem_reader = ProblemReader(problems_in(folder, tiny_processing), contexts, BATCH)
    yield problem_reader
    problem_reader.close()


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """The prompt of each row that is encoded, and the kind of thread that does it."""
    noted: list[tuple[str, str]] = []
    student = ContextBuilder.student

    def noting(builder: ContextBuilder, problem: Problem) -> Any:
        is_here = threading.current_thread() is threading.main_thread()
        noted.append((problem.prompt_id, "here" if is_here else "ahead"))
        return student(builder, problem)

    monkeypatch.setattr(ContextBuilder, "student", noting)
    return noted


def finish(reader: ProblemReader) -> None:
    """Waits until everything has been read ahead."""
    for future in reader._ahead:
        future.exception(60)


def same(left: ReadProblem, right: ReadProblem) -> bool:
    assert left.prompt.images is not None
    assert right.prompt.images is not None
    right_tensors = right.prompt.images.tensors
    for name, tensor in left.prompt.images.tensors.items():
        if not torch.equal(tensor, right_tensors[name]):
            return False
    return (
        left.problem.prompt_id == right.problem.prompt_id
        and left.problem.text == right.problem.text
        and image_bytes(left) == image_bytes(right)
        and left.prompt.token_ids == right.prompt.token_ids
        and left.prompt.engine_ids == right.prompt.engine_ids
    )


def image_bytes(read_problem: ReadProblem) -> list[bytes]:
    return [image.tobytes() for image in read_problem.problem.images]


def test_what_was_read_ahead_is_what_is_read_here(reader: ProblemReader, threads: list[tuple[str, str]]) -> None:
    """Rounds 1 and 4 (of the second epoch) are read ahead, and rounds 0 and 3 when they are needed."""
    for number in (0, 3):
        reader.round(number)
        reader.read_ahead(number + 1)
        finish(reader)
        num_reads = len(threads)
        ahead = reader.round(number + 1)
        assert len(threads) == num_reads
        plain = reader.round(number + 1)
        assert len(ahead) == BATCH
        assert all(same(from_ahead, from_here) for from_ahead, from_here in zip(ahead, plain, strict=True))
    assert [kind for _, kind in threads[BATCH : 2 * BATCH]] == ["ahead"] * BATCH


def test_another_round_than_the_one_read_ahead_is_right(reader: ProblemReader) -> None:
    expected = [read_problem.problem.prompt_id for read_problem in reader.round(2)]
    reader.read_ahead(1)
    assert [read_problem.problem.prompt_id for read_problem in reader.round(2)] == expected


def test_each_row_is_read_by_the_one_who_begins_it(
    reader: ProblemReader, threads: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step comes while the thread is busy with its first row, waits for that one, and takes part in the others."""
    reader.round(0)
    goes_on = threading.Event()
    prepare = ContextBuilder.for_another_thread

    def waiting(builder: ContextBuilder) -> ContextBuilder:
        assert goes_on.wait(60)
        return prepare(builder)

    monkeypatch.setattr(ContextBuilder, "for_another_thread", waiting)
    reader.read_ahead(1)
    while not reader._ahead[0].running():
        time.sleep(0.01)
    threading.Timer(0.2, goes_on.set).start()
    prompt_ids = [read_problem.problem.prompt_id for read_problem in reader.round(1)]
    assert len(prompt_ids) == BATCH
    assert sorted(encoded_id for encoded_id, _ in threads[BATCH:]) == sorted(prompt_ids)
    assert (prompt_ids[0], "ahead") in threads


def test_an_error_comes_at_the_step_that_needs_the_row(reader: ProblemReader, folder: Path) -> None:
    """The images of round 1 are damaged after the check; round 0 does not mind."""
    reader.round(0)
    first = reader.round(1)[0].problem.prompt_id
    reader.round(0)
    for file in folder.glob("*.png"):
        file.write_bytes(b"no image")
    reader.read_ahead(1)
    finish(reader)
    with pytest.raises(
        DataError, match=rf"^rows, row {first}: column 'images': the image '{first}\.png' cannot be read"
    ):
        reader.round(1)


def test_at_most_some_bytes_of_pixels_are_read_ahead(
    reader: ProblemReader, threads: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One row takes more than 10,000 bytes, so the other three are read by their step."""
    monkeypatch.setattr(read_ahead, "MOST_BYTES", 10_000)
    reader.round(0)
    reader.read_ahead(1)
    finish(reader)
    assert len(reader.round(1)) == BATCH
    assert [kind for _, kind in threads[BATCH:]] == ["ahead", "here", "here", "here"]


def test_rows_without_images_are_not_read_ahead(
    folder: Path, tiny_processing: Processing, contexts: ContextBuilder
) -> None:
    reader = ProblemReader(problems_in(folder, tiny_processing, images=False), contexts, BATCH)
    reader.round(0)
    reader.read_ahead(1)
    assert reader._ahead == []
    assert reader._thread is None


def test_rounds_that_are_read_fast_are_not_read_ahead(reader: ProblemReader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_ahead, "WORTHWHILE_SECONDS", 60.0)
    reader.round(0)
    reader.read_ahead(1)
    assert reader._ahead == []
    assert reader._thread is None


def test_closing_ends_the_thread(reader: ProblemReader) -> None:
    reader.round(0)
    reader.read_ahead(1)
    thread = next(thread for thread in threading.enumerate() if thread.name.startswith("cepo-read-ahead"))
    reader.close()
    thread.join(60)
    assert not thread.is_alive()
    assert len(reader.round(1)) == BATCH
