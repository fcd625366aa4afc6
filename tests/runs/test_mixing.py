"""Several training sets in one run."""

from __future__ import annotations

from pathlib import Path

import pytest

from cepo.config import load_config
from cepo.data.dataset import ProblemSet
from cepo.data.mixing import MixedProblems, read_training_sets
from cepo.models.processing import Processing


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    """Three problems without pictures."""
    from datasets import Dataset

    rows = {"problem": [f"What is {n} + 1?" for n in range(3)], "answer": [str(n + 1) for n in range(3)]}
    Dataset.from_dict(rows).to_parquet(str(tmp_path / "text.parquet"))
    return tmp_path / "text.parquet"


def sets_of(arguments: list[str], processing: Processing) -> ProblemSet | MixedProblems:
    return read_training_sets(load_config(arguments).data, processing)


def test_2_files_are_one_set_that_asks_each_of_11_rows_once(
    tiny_run: list[str], tiny_processing: Processing, problem_file: Path, text_file: Path
) -> None:
    problems = sets_of([*tiny_run, f"data.train_files=[{problem_file}, {text_file}]"], tiny_processing)
    assert len(problems) == 11
    names = [problems[index].prompt_id for index in range(11)]
    assert names == [f"0:{row}" for row in range(8)] + [f"1:{row}" for row in range(3)]
    assert (len(problems[0].images), len(problems[10].images), problems.most_images) == (1, 0, 1)
    asked = [index for step in range(11) for index in problems.indices(step, 1)]
    assert sorted(asked) == list(range(11)) != asked
    probe = problems.image_probe()
    assert probe is not None
    assert probe.data == str(problem_file)


def test_with_weights_problems_come_from_each_file_in_proportion(
    tiny_run: list[str], tiny_processing: Processing, problem_file: Path, text_file: Path
) -> None:
    """Commas separate files as a list does. The share of 1,000 draws has a standard deviation of sqrt(0.1875 / 1000)."""
    problems = sets_of(
        [*tiny_run, f"data.train_files={text_file},{problem_file}@train[:6]", "data.train_weights=[1,3]"],
        tiny_processing,
    )
    assert len(problems) == 9
    asked = [index for step in range(250) for index in problems.indices(step, 4)]
    from_text = sum(index < 3 for index in asked) / len(asked)
    assert abs(from_text - 0.25) < 4 * 0.014


def test_one_file_is_read_as_without_mixing(
    tiny_run: list[str], tiny_processing: Processing, problem_file: Path
) -> None:
    problems = sets_of(tiny_run, tiny_processing)
    assert isinstance(problems, ProblemSet)
    assert problems[3].prompt_id == "3"
