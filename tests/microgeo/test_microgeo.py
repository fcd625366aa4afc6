"""The built-in toy task's problems, pictures, demonstrations and files."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image

from cepo.errors import DataError
from cepo.microgeo.figures import draw_figure
from cepo.microgeo.problems import FAMILIES, ToyProblem, generate_problem
from cepo.microgeo.world import build_world, split_problems, write_problems


def make(family: str, seen: str, *numbers: int, index: int = 0) -> ToyProblem:
    return ToyProblem(family, seen, numbers, seed=0, stream="test", index=index)


@pytest.mark.parametrize(
    ("problem", "answer"),
    [
        (make("perimeter", "5", 7), 35),  # a pentagon of side 7
        (make("perimeter", "3", 12), 36),
        (make("angle", "3", 48, 72), 60),  # 180 - 120
        (make("angle", "4", 48, 72), 120),  # (360 - 120) / 2
        (make("angle", "5", 48, 72), 140),  # (540 - 120) / 3
        (make("ticks", "6", 4), 24),  # 6 * 4
        (make("ticks", "2", 15), 30),
        (make("fence", "width", 17, 12), 41),  # one width of 17, two heights of 12
        (make("fence", "height", 17, 12), 46),  # two widths of 17, one height of 12
    ],
)
def test_answers_are_worked_out_by_hand(problem: ToyProblem, answer: int) -> None:
    assert problem.answer == str(answer)


def test_the_answer_depends_on_what_only_the_image_shows() -> None:
    """This holds in all of 400 problems."""
    for index in range(400):
        problem = generate_problem(0, index)
        values = set(FAMILIES[problem.family].seen_values) - {problem.seen}
        variants = [make(problem.family, seen, *problem.numbers) for seen in values]
        assert variants
        assert all(variant.question == problem.question for variant in variants)
        assert all(variant.answer != problem.answer for variant in variants)


def test_a_problem_is_a_function_of_seed_stream_and_index() -> None:
    first = generate_problem(5, 17)
    again = generate_problem(5, 17)
    assert first == again
    assert draw_figure(first).tobytes() == draw_figure(again).tobytes()
    numbers: set[tuple[int, ...]] = set()
    for seed in range(5):
        for stream in ("train", "other"):
            numbers.add(generate_problem(seed, 17, stream=stream).numbers)
    assert len(numbers) > 5


def test_four_families_take_turns_with_each_value_equally_often() -> None:
    problems = [generate_problem(1, index) for index in range(4000)]
    for position, (name, family) in enumerate(FAMILIES.items()):
        seen = [problem.seen for problem in problems[position::4]]
        assert {problem.family for problem in problems[position::4]} == {name}
        for value in family.seen_values:
            assert seen.count(value) / 1000 == pytest.approx(1 / len(family.seen_values), abs=0.05)


@pytest.mark.parametrize("family", list(FAMILIES))
def test_the_image_is_64_by_64_and_differs_with_its_content(family: str) -> None:
    values = FAMILIES[family].seen_values
    mean_pictures = []
    for value in values:
        pictures = [draw_figure(make(family, value, 12, 18, index=index)) for index in range(40)]
        assert {picture.size for picture in pictures} == {(64, 64)}
        mean_pictures.append(np.mean([np.asarray(picture.convert("L"), dtype=float) for picture in pictures], axis=0))
    for first in range(len(values)):
        for second in range(first):
            # Averaged over the random details, two readings differ by more than 20 of 255 grey levels somewhere.
            assert np.abs(mean_pictures[first] - mean_pictures[second]).max() > 20


def test_the_parquet_file_has_geo3ks_columns_and_images(tmp_path: Path) -> None:
    problems, _ = split_problems(0, 8, 1)
    write_problems(tmp_path / "some.parquet", problems)
    table = pq.read_table(tmp_path / "some.parquet")
    assert table.column_names == ["images", "problem", "answer", "id", "family"]
    assert b"Image" in table.schema.metadata[b"huggingface"]
    for row, problem in zip(table.to_pylist(), problems, strict=True):
        assert row["problem"] == f"<image>{problem.question}"
        assert row["answer"] == problem.answer
        assert row["id"] == problem.index
        assert row["family"] == problem.family
        assert len(row["images"]) == 1
        picture = Image.open(io.BytesIO(row["images"][0]["bytes"]))
        assert picture.format == "PNG"
        assert picture.tobytes() == draw_figure(problem).tobytes()


def test_no_validation_problem_is_a_training_problem() -> None:
    train, validation = split_problems(0, 600, 200)
    assert len(train) == 600
    assert len(validation) == 200
    seen = {(problem.question, draw_figure(problem).tobytes()) for problem in train}
    assert not seen & {(problem.question, draw_figure(problem).tobytes()) for problem in validation}


@pytest.mark.heavy
def test_a_world_is_built_once_in_the_users_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    world = build_world(num_train=12, num_validation=4)
    assert world.folder.parent == tmp_path / "cepo" / "worlds"
    fingerprint = json.loads((world.folder / "world.json").read_text())["fingerprint"]
    assert world.folder.name == f"microgeo-{fingerprint[:12]}"
    assert (world.model_path / "model.safetensors").stat().st_size < 10_000_000
    file = world.split_file("train")
    stamp = file.stat().st_mtime_ns
    assert build_world(num_train=12, num_validation=4) == world
    assert file.stat().st_mtime_ns == stamp
    assert build_world(world.folder, num_train=13, num_validation=4) == world
    assert file.stat().st_mtime_ns != stamp
    names = {path.name for path in world.folder.parent.iterdir()}
    assert names == {world.folder.name, f"{world.folder.name}.lock"}


@pytest.mark.heavy
def test_an_interrupted_build_leaves_no_half_world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("cepo.microgeo.world.shutil.copytree", interrupt)
    with pytest.raises(KeyboardInterrupt):
        build_world(tmp_path / "world", num_train=4, num_validation=4)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_no_world_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("keep")
    with pytest.raises(DataError, match=r"exists and is not a built-in toy task"):
        build_world(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
