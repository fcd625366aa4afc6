"""Rows in the shapes of public data sets are read by settings alone, those that docs/data.md names."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets
import pytest
from case_files import cases
from image_files import encoded
from PIL import Image

from cepo.config.schema import DataConfig
from cepo.data.dataset import ProblemSet
from cepo.data.image_store import ImageStore
from cepo.data.prompts import Problem
from cepo.data.row_parser import read_cells, unwrapped
from cepo.data.row_settings import CellRules, RowRules
from cepo.data.tables import read_source
from cepo.errors import ConfigError, DataError
from cepo.models.interface import ImageSource, Turn
from cepo.models.processing import Processing

FOLDER = Path(__file__).parent
DOCS = FOLDER.parents[1] / "docs" / "data.md"
RED = encoded(Image.new("RGB", (48, 32), "red"))
BLUE = encoded(Image.new("RGB", (48, 32), "blue"))
LIME = encoded(Image.new("RGB", (48, 32), "lime"))
DATA_URL = "data:image/png;base64," + base64.b64encode(RED).decode()


SHAPES = cases(__file__, "shapes.yaml")


def filled(value: Any) -> Any:
    """A value of shapes.yaml with the images that its words stand for."""
    if isinstance(value, dict):
        return {key: filled(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [filled(entry) for entry in value]
    if value == "PICTURE":
        return {"bytes": RED, "path": None}
    return DATA_URL if value == "DATA_URL" else value


def documented_settings(name: str) -> dict[str, str]:
    """The settings that the table of the docs gives for a data set."""
    (line,) = [line for line in DOCS.read_text(encoding="utf-8").splitlines() if line.startswith(f"| {name}")]
    settings: dict[str, str] = {}
    for setting in line.split("|")[3].strip().strip("`").split():
        key, _, value = setting.partition("=")
        settings[key.removeprefix("data.")] = value
    return settings


def write(folder: Path, name: str, rows: Sequence[Mapping[str, Any]]) -> Path:
    """A file of these rows; parquet as the datasets library writes it, whose images and classes are in the metadata."""
    file = folder / name
    if name.endswith(".json"):
        file.write_text(json.dumps(list(rows)), encoding="utf-8")
    elif name.endswith(".jsonl"):
        lines = [json.dumps(row) + "\n" for row in rows]
        file.write_text("".join(lines), encoding="utf-8")
    else:
        table = datasets.Dataset.from_list([dict(row) for row in rows])
        if name.startswith("class"):
            table = table.cast_column("answer", datasets.ClassLabel(names=["garden", "kitchen"]))
        if isinstance(rows[0].get("image"), dict):
            table = table.cast_column("image", datasets.Image())
        table.to_parquet(str(file))
    return file


Read = Callable[..., list[Problem]]


@pytest.fixture
def read(tmp_path: Path, tiny_processing: Processing) -> Read:
    """Problems of rows that are written to a file; every image can be read again by its place."""
    (tmp_path / "red.png").write_bytes(RED)
    (tmp_path / "blue.png").write_bytes(BLUE)
    (tmp_path / "lime.png").write_bytes(LIME)

    def problems(*rows: Mapping[str, Any], name: str = "rows.jsonl", **settings: Any) -> list[Problem]:
        file = write(tmp_path, name, rows)
        usual: dict[str, Any] = {"train_files": str(file), "min_pixels": None, "max_pixels": 10_000}
        usual["image_dir"] = str(tmp_path)
        config = DataConfig(**(usual | settings))
        problem_set = ProblemSet(str(file), config, tiny_processing)
        store = ImageStore(RowRules.of(config), tiny_processing)
        for number, problem in enumerate(problem_set):
            again = store.images(ImageSource(data=str(file), row=number))
            assert [image.tobytes() for image in again] == [image.tobytes() for image in problem.images]
        return [*problem_set]

    return problems


def colors(problem: Problem) -> list[object]:
    return [image.getpixel((0, 0)) for image in problem.images]


@pytest.mark.parametrize("case", SHAPES, ids=lambda case: case["name"])
def test_a_public_shape_is_read_by_its_documented_settings(read: Read, case: Any) -> None:
    settings: dict[str, Any] = documented_settings(case["name"])
    settings.pop("image_dir", None)
    (problem,) = read(filled(case["row"]), name=case["file"], **settings)
    assert problem.text == case["question"]
    assert problem.ground_truth == case["answer"]
    assert problem.solution == case.get("solution", problem.solution)
    assert colors(problem) == [(255, 0, 0)]


def test_the_docs_list_the_shapes_that_are_tested() -> None:
    section = DOCS.read_text(encoding="utf-8").partition("## Shapes of public data sets")[2]
    rows = [line for line in section.splitlines() if line.startswith("|")][2:]
    assert len(rows) == len(SHAPES) >= 12


@pytest.mark.parametrize("case", cases(__file__, "refused_rows.yaml"), ids=lambda case: case["words"][:40])
def test_a_row_of_another_shape_is_refused_by_what_it_is(read: Read, case: Any) -> None:
    settings = case.get("settings", {})
    usual = {} if "prompt_key" in settings else {"prompt": "?"}
    with pytest.raises(DataError, match=case["words"]):
        read(usual | case["row"], **settings)


def test_a_key_into_no_column_names_the_columns(read: Read) -> None:
    with pytest.raises(ConfigError, match=r"data\.answer_key is 'reward\.truth', which .* Its columns: prompt, answer"):
        read({"prompt": "?", "answer": "1"}, answer_key="reward.truth")


def test_a_name_with_a_dot_comes_before_a_nested_one(read: Read) -> None:
    flat = {"prompt": "a", "x.y": "flat", "x": {"y": "nested"}}
    (problem,) = read(flat, answer_key="x.y")
    assert problem.ground_truth == "flat"
    with pytest.raises(DataError, match=r"row 1: column 'x\.y' is empty"):
        read(flat, flat | {"x.y": None}, answer_key="x.y")
    deep = {"prompt": "a", "x": {"y.z": "1", "y": {"z": "2", "w": "3"}}}
    (problem,) = read(deep, answer_key="x.y.z")
    assert problem.ground_truth == "1"
    (problem,) = read(deep, answer_key="x.y.w")
    assert problem.ground_truth == "3"


def test_every_key_leads_into_nested_columns(read: Read) -> None:
    row = {
        "in": {"question": "<image>?", "pictures": [{"image": "blue.png"}], "crops": ["red.png"]},
        "out": {"answer": 0.5, "why": "By sight."},
    }
    (problem,) = read(
        row,
        prompt_key="in.question",
        answer_key="out.answer",
        solution_key="out.why",
        image_key="in.pictures",
        teacher_image_key="in.crops",
    )
    assert problem.text == "<image>?"
    assert problem.ground_truth == "0.5"
    assert problem.solution == "By sight."
    assert colors(problem) == [(0, 0, 255)]
    assert problem.teacher_images[0].getpixel((0, 0)) == (255, 0, 0)
    assert set(problem.columns) == {"in", "out"}


@pytest.mark.parametrize(
    ("prompt", "images", "text"),
    [
        ("a", [], "a"),
        ("a", ["red.png", "blue.png"], "<image><image>a"),
        ("a <image>", ["red.png", "blue.png"], "<image>a <image>"),
        ("<image> a", ["red.png"], "<image> a"),
    ],
)
def test_marks_are_put_in_front_only_where_they_are_missing(
    read: Read, prompt: str, images: list[str], text: str
) -> None:
    (problem,) = read({"prompt": prompt, "answer": "1", "images": images}, image_marks="front")
    assert problem.text == text


def test_marks_stand_before_the_format_prompt_and_first_turn(read: Read, tmp_path: Path) -> None:
    template = tmp_path / "format.jinja"
    template.write_text("Question: {{ content }}", encoding="utf-8")
    row: dict[str, Any] = {"prompt": "a", "answer": "1", "images": ["red.png"]}
    (problem,) = read(row, image_marks="front", format_prompt=str(template))
    assert problem.text == "Question: <image>a"
    row["prompt"] = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "v"},
        {"role": "user", "content": "w"},
    ]
    (problem,) = read(row, image_marks="front", format_prompt=str(template))
    assert problem.history == (Turn("system", "s"), Turn("user", "<image>u"), Turn("assistant", "v"))
    assert problem.text == "Question: w"


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image", "image": "blue.png"},
        {"image": "blue.png"},
        {"type": "image", "path": "blue.png"},
        {"type": "image_url", "image_url": {"url": "blue.png", "detail": "high"}},
        {"type": "image_url", "image_url": "blue.png"},
        {"type": "input_image", "image_url": "data:image/png;base64," + base64.b64encode(BLUE).decode()},
    ],
)
def test_parts_hold_images_beside_those_of_the_row(read: Read, part: dict[str, Any]) -> None:
    """The image of a part takes its own place; `<image>` and `{type: image}` take those of the row's column."""
    content = [{"type": "image"}, part, {"type": "text", "text": "and <image>"}]
    row = {"prompt": [{"role": "user", "content": content}], "answer": "1", "images": ["red.png", "lime.png"]}
    (problem,) = read(row)
    assert problem.text == "<image><image>and <image>"
    assert colors(problem) == [(255, 0, 0), (0, 0, 255), (0, 255, 0)]


def test_a_file_address_is_a_path(read: Read, tmp_path: Path) -> None:
    (tmp_path / "a b.png").write_bytes(BLUE)
    part = {"type": "image_url", "image_url": {"url": (tmp_path / "a b.png").as_uri()}}
    (problem,) = read({"prompt": [{"role": "user", "content": [part]}], "answer": "1"})
    assert colors(problem) == [(0, 0, 255)]


def test_the_last_turn_answers_where_both_keys_name_it(read: Read) -> None:
    turns = [
        {"from": "human", "value": "a"},
        {"from": "gpt", "value": "b"},
        {"from": "human", "value": "c"},
        {"from": "gpt", "value": "<think>d</think> <answer>e</answer>"},
    ]
    (problem,) = read({"x": turns}, prompt_key="x", answer_key="x")
    assert problem.text == "c"
    assert problem.ground_truth == "e"
    assert problem.history == (Turn("user", "a"), Turn("assistant", "b"))


@pytest.mark.parametrize(("written", "answer"), cases(__file__, "wrapped_answers.yaml"))
def test_what_is_around_a_whole_answer_is_removed(written: str, answer: str) -> None:
    assert unwrapped(written) == answer


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ("[0.50, 1e-3, \"é\", [null, true]]", '[0.50, 1e-3, "é", [null, true]]'),
        ('["15"]', "15"),
        ("[[7]]", "7"),
        ("[]", ""),
    ],
)  # fmt: skip
def test_a_list_is_its_json_text_with_the_spelled_numbers(tmp_path: Path, answer: str, text: str) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(f'{{"prompt": "?", "answer": {answer}}}\n', encoding="utf-8")
    assert read_cells(read_source(str(file))[0], CellRules()).answer == text
