"""Rows in the shapes of public data sets are read by settings alone, those that docs/data.md names."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets
import pytest
from PIL import Image

from cepo.config.schema import DataConfig
from cepo.data.dataset import ProblemSet
from cepo.data.image_store import ImageStore
from cepo.data.prompts import Problem
from cepo.data.row_parser import read_cells, unwrapped
from cepo.data.row_settings import CellRules, ProblemRules, RowRules
from cepo.errors import ConfigError, DataError
from cepo.models.interface import ImageSource, Turn
from cepo.models.processing import Processing

DOCS = Path(__file__).parents[2] / "docs" / "data.md"


def png(color: str) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (48, 32), color).save(buffer, "PNG")
    return buffer.getvalue()


RED, BLUE = png("red"), png("blue")
PICTURE = {"bytes": RED, "path": None}
MARKED = "<image>Find x."
Shape = tuple[str, Mapping[str, Any], str, tuple[str, str], int]
"""The name in the docs, a row, the file it is written to, the question and answer that are read, the number of images."""

SHAPES: Sequence[Shape] = [
    ("Geometry3K", {"images": [PICTURE], "problem": MARKED, "answer": "7"}, "a.parquet", (MARKED, "7"), 1),
    ("MMK12", {"id": "1", "question": "Find x.", "answer": "B", "image": PICTURE}, "a.parquet", (MARKED, "B"), 1),
    (
        "MathVerse",
        {"question": "Find x.", "answer": "C", "image": PICTURE, "metadata": {"split": "testmini"}},
        "a.parquet",
        (MARKED, "C"),
        1,
    ),
    (
        "open-r1 multimodal 8k",
        {"problem": "Find x.", "solution": "<think>3 + 4</think>\n\n<answer>7</answer>", "image": PICTURE},
        "a.parquet",
        (MARKED, "7"),
        1,
    ),
    (
        "verl's Geometry3K",
        {
            "data_source": "hiyouga/geometry3k",
            "prompt": [{"role": "user", "content": MARKED}],
            "images": [PICTURE],
            "reward_model": {"style": "rule", "ground_truth": "7"},
            "extra_info": {"index": 0, "split": "train"},
        },
        "a.parquet",
        (MARKED, "7"),
        1,
    ),
    (
        "R1-V CLEVR",
        {"problem": "How many?", "solution": "<answer> 3 </answer>", "image": PICTURE},
        "a.parquet",
        ("<image>How many?", "3"),
        1,
    ),
    (
        "ScreenSpot",
        {"instruction": "close", "bbox": [0.25, 0.5, 0.75, 1.0], "image": PICTURE},
        "a.parquet",
        ("<image>close", "[0.25, 0.5, 0.75, 1]"),
        1,
    ),
    ("ChartQA", {"query": "How many?", "label": ["14"], "image": PICTURE}, "a.parquet", ("<image>How many?", "14"), 1),
    (
        "LLaVA's instructions",
        {
            "id": "1",
            "image": "red.png",
            "conversations": [
                {"from": "human", "value": "<image>\nWhat color?"},
                {"from": "gpt", "value": "red"},
            ],
        },
        "a.json",
        ("<image>\nWhat color?", "red"),
        1,
    ),
    (
        "ViRL39K",
        {"question": MARKED, "answer": "\\boxed{\\frac{1}{2}}", "image": ["red.png"]},
        "a.parquet",
        (MARKED, "\\frac{1}{2}"),
        1,
    ),
    (
        "MMFineReason",
        {"question": "Find x.", "answer": "7", "image": PICTURE, "qwen3vl_235b_thinking_response": "3 + 4 = 7"},
        "a.parquet",
        (MARKED, "7"),
        1,
    ),
    (
        "messages in OpenAI's form",
        {
            "messages": [
                {"role": "system", "content": "Be brief."},
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "Find x."},
                        {"type": "image_url", "image_url": {"url": "data:image/png;base64," + base64.b64encode(RED).decode()}},
                    ],
                },
                {"role": "assistant", "content": "7"},
            ]
        },
        "a.jsonl",
        ("Find x.<image>", "7"),
        1,
    ),
    (
        "messages in Qwen's form",
        {"messages": [{"role": "user", "content": [{"image": "red.png"}, {"text": "Find x."}]}], "answer": 7},
        "a.jsonl",
        (MARKED, "7"),
        1,
    ),
    (
        "a set with classes as answers",
        {"question": "Where?", "answer": 1, "image": PICTURE},
        "class.parquet",
        ("<image>Where?", "kitchen"),
        1,
    ),
]  # fmt: skip


def documented_settings(name: str) -> dict[str, str]:
    """The settings that the table of the docs gives for a data set."""
    (line,) = [line for line in DOCS.read_text(encoding="utf-8").splitlines() if line.startswith(f"| {name}")]
    settings = line.split("|")[3].strip().strip("`")
    return {key.removeprefix("data."): value for key, _, value in (part.partition("=") for part in settings.split())}


def write(folder: Path, name: str, rows: Sequence[Mapping[str, Any]]) -> Path:
    """A file of these rows; parquet as the datasets library writes it, whose images and classes are in the metadata."""
    file = folder / name
    if name.endswith(".parquet"):
        table = datasets.Dataset.from_list([dict(row) for row in rows])
        if name.startswith("class"):
            table = table.cast_column("answer", datasets.ClassLabel(names=["garden", "kitchen"]))
        if table.features.get("image") is not None and isinstance(rows[0]["image"], dict):
            table = table.cast_column("image", datasets.Image())
        table.to_parquet(str(file))
    elif name.endswith(".json"):
        file.write_text(json.dumps(list(rows)), encoding="utf-8")
    else:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


Read = Callable[..., list[Problem]]


@pytest.fixture
def read(tmp_path: Path, tiny_processing: Processing) -> Read:
    """Problems of rows that are written to a file; every image can be read again by its place."""
    (tmp_path / "red.png").write_bytes(RED)
    (tmp_path / "blue.png").write_bytes(BLUE)

    def problems(rows: Sequence[Mapping[str, Any]], *, name: str = "rows.jsonl", **settings: Any) -> list[Problem]:
        file = write(tmp_path, name, rows)
        usual: dict[str, Any] = {"train_files": str(file), "min_pixels": None, "max_pixels": 10_000}
        config = DataConfig(**(usual | {"image_dir": str(tmp_path)} | settings))
        found = ProblemSet(str(file), ProblemRules.of(config), tiny_processing)
        store = ImageStore(RowRules.of(config), tiny_processing)
        for number, problem in enumerate(found):
            again = store.images(ImageSource(data=str(file), row=number))
            assert [image.tobytes() for image in again] == [image.tobytes() for image in problem.images]
        return [*found]

    return problems


def colors(problem: Problem) -> list[object]:
    return [image.getpixel((0, 0)) for image in problem.images]


@pytest.mark.parametrize(("name", "row", "file", "texts", "num_images"), SHAPES, ids=[shape[0] for shape in SHAPES])
def test_a_public_shape_is_read_by_its_documented_settings(
    read: Read, name: str, row: Mapping[str, Any], file: str, texts: tuple[str, str], num_images: int
) -> None:
    settings = documented_settings(name)
    settings.pop("image_dir", None)
    (problem,) = read([row], name=file, **settings)
    assert (problem.text, problem.ground_truth) == texts
    assert colors(problem) == [(255, 0, 0)] * num_images
    if "solution_key" in settings:
        assert problem.solution == "3 + 4 = 7"


def test_the_docs_list_the_shapes_that_are_tested() -> None:
    section = DOCS.read_text(encoding="utf-8").partition("## Shapes of public data sets")[2]
    rows = [line for line in section.splitlines() if line.startswith("|")][2:]
    assert len(rows) == len(SHAPES) >= 12


def test_a_name_with_a_dot_comes_before_a_nested_one(read: Read) -> None:
    rows = [
        {"prompt": "a", "x.y": "flat", "x": {"y": "nested"}},
        {"prompt": "b", "x.y": None, "x": {"y": "nested"}},
    ]
    with pytest.raises(DataError, match=r"row 1: column 'x\.y' is empty"):
        read(rows, answer_key="x.y")
    assert [problem.ground_truth for problem in read(rows[:1], answer_key="x.y")] == ["flat"]
    deep = [{"prompt": "a", "x": {"y.z": {"w": "1"}, "y": {"z.w": "2"}}}]
    assert read(deep, answer_key="x.y.z.w")[0].ground_truth == "1"


def test_every_key_leads_into_nested_columns(read: Read) -> None:
    row = {
        "in": {"question": "<image>?", "pictures": [{"image": "blue.png"}], "crops": ["red.png"]},
        "out": {"answer": 0.5, "why": "By sight."},
    }
    (problem,) = read(
        [row],
        prompt_key="in.question",
        answer_key="out.answer",
        solution_key="out.why",
        image_key="in.pictures",
        teacher_image_key="in.crops",
    )
    assert (problem.text, problem.ground_truth, problem.solution) == ("<image>?", "0.5", "By sight.")
    assert colors(problem) == [(0, 0, 255)]
    assert problem.teacher_images[0].getpixel((0, 0)) == (255, 0, 0)
    assert set(problem.columns) == {"in", "out"}


@pytest.mark.parametrize(
    ("row", "key", "words"),
    [
        ({"reward_model": {"style": "rule"}}, "reward_model.ground_truth", "has no 'ground_truth'; it has: style"),
        ({"reward_model": None}, "reward_model.ground_truth", "'reward_model.ground_truth' is empty"),
        ({"reward_model": "7"}, "reward_model.ground_truth", "holds a str, which has no 'ground_truth'"),
        ({"answer": {"text": "7"}}, "answer", "Name one of its entries, for example answer.text"),
        ({"answer": []}, "answer", "column 'answer' is empty"),
        ({"answer": ["7"]}, "answer.1", r"column 'answer\.1' is empty"),
    ],
)
def test_a_wrong_key_is_refused_with_what_there_is(read: Read, row: dict[str, Any], key: str, words: str) -> None:
    with pytest.raises(DataError, match=words):
        read([{"prompt": "?"} | row], answer_key=key)


def test_a_key_into_no_column_names_the_columns(read: Read) -> None:
    with pytest.raises(ConfigError, match=r"data\.answer_key is 'reward\.truth', which .* Its columns: prompt, answer"):
        read([{"prompt": "?", "answer": "1"}], answer_key="reward.truth")


def test_marks_are_put_in_front_only_where_they_are_missing(read: Read) -> None:
    rows = [
        {"prompt": "a", "answer": "1", "images": []},
        {"prompt": "a", "answer": "1", "images": ["red.png", "blue.png"]},
        {"prompt": "a <image>", "answer": "1", "images": ["red.png", "blue.png"]},
        {"prompt": "<image> a", "answer": "1", "images": ["red.png"]},
    ]
    texts = [problem.text for problem in read(rows, image_marks="front")]
    assert texts == ["a", "<image><image>a", "<image>a <image>", "<image> a"]
    with pytest.raises(DataError, match=r"row 1: 0 '<image>' in the text but 2 images.*image_marks=front"):
        read(rows)
    extra = [{"prompt": "<image><image>", "answer": "1", "images": ["red.png"]}]
    with pytest.raises(DataError, match=r"2 '<image>' in the text but 1 images"):
        read(extra, image_marks="front")


def test_marks_stand_before_the_format_prompt_and_first_turn(read: Read, tmp_path: Path) -> None:
    (tmp_path / "format.jinja").write_text("Question: {{ content }}", encoding="utf-8")
    one = {"prompt": "a", "answer": "1", "images": ["red.png"]}
    turns = [
        {"role": "system", "content": "s"}, {"role": "user", "content": "u"},
        {"role": "assistant", "content": "v"}, {"role": "user", "content": "w"},
    ]  # fmt: skip
    settings = {"image_marks": "front", "format_prompt": str(tmp_path / "format.jinja")}
    assert read([one], **settings)[0].text == "Question: <image>a"
    (problem,) = read([one | {"prompt": turns}], **settings)
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
    row = {"prompt": [{"role": "user", "content": content}], "answer": "1", "images": ["red.png", "red.png"]}
    (problem,) = read([row])
    assert problem.text == "<image><image>and <image>"
    assert colors(problem) == [(255, 0, 0), (0, 0, 255), (255, 0, 0)]


def test_a_file_address_is_a_path(read: Read, tmp_path: Path) -> None:
    (tmp_path / "a b.png").write_bytes(BLUE)
    address = (tmp_path / "a b.png").as_uri()
    row = {
        "prompt": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": address}}]}],
        "answer": "1",
    }
    assert colors(read([row])[0]) == [(0, 0, 255)]


@pytest.mark.parametrize(
    ("images", "words"),
    [
        ([{"bytes": None, "path": None}], "an entry of the images has nothing; accepted: bytes, a path"),
        ([None], "an entry of the images is null; accepted: bytes, a path"),
        ([{"picture": "red.png"}], "an entry of the images has picture; accepted: bytes, a path"),
    ],
)
def test_an_image_of_unknown_shape_is_refused_by_its_keys(read: Read, images: list[Any], words: str) -> None:
    with pytest.raises(DataError, match=words):
        read([{"prompt": "<image>", "answer": "1", "images": images}])


def test_the_last_turn_answers_where_both_keys_name_it(read: Read) -> None:
    turns = [
        {"from": "human", "value": "a"}, {"from": "gpt", "value": "b"},
        {"from": "human", "value": "c"}, {"from": "gpt", "value": "<think>d</think> <answer>e</answer>"},
    ]  # fmt: skip
    (problem,) = read([{"x": turns}], prompt_key="x", answer_key="x")
    assert (problem.text, problem.ground_truth) == ("c", "e")
    assert problem.history == (Turn("user", "a"), Turn("assistant", "b"))
    for messages, words in (
        (turns[:3], "its last message must be the assistant's answer; it is the user's"),
        (turns[1:2], "the prompt has no message"),
        ("a text", "it must hold messages, .* it holds a str"),
        ([*turns[:3], {"from": "gpt", "value": " "}], "column 'x' is empty; a problem without an answer"),
    ):
        with pytest.raises(DataError, match=words):
            read([{"x": messages}], prompt_key="x", answer_key="x")
    with pytest.raises(DataError, match="the last message is the assistant's"):
        read([{"x": turns, "answer": "1"}], prompt_key="x")


@pytest.mark.parametrize(
    ("written", "answer"),
    [
        ("<answer> 3 </answer>", "3"),
        ("\\boxed{3}", "3"),
        ("$\\boxed{\\frac{1}{2}}$", "\\frac{1}{2}"),
        ("<answer>\\boxed{3}</answer>", "3"),
        ("<think> x <answer>2</answer> </think>\n<answer>3</answer>", "3"),
        ("\\boxed{1}, \\boxed{2}", "\\boxed{1}, \\boxed{2}"),
        ("\\boxed{\\{1, 2\\}}", "\\{1, 2\\}"),
        ("so \\boxed{3}", "so \\boxed{3}"),
        ("<answer></answer>", "<answer></answer>"),
        ("<answer>1</answer> or <answer>2</answer>", "<answer>1</answer> or <answer>2</answer>"),
        ("\\boxed{}", "\\boxed{}"),
    ],
)
def test_what_is_around_a_whole_answer_is_removed(written: str, answer: str) -> None:
    assert unwrapped(written) == answer


def test_a_list_is_its_json_text_with_the_spelled_numbers(read: Read, tmp_path: Path) -> None:
    (tmp_path / "boxes.jsonl").write_text(
        '{"prompt": "?", "answer": [0.50, 1e-3, "é", [null, true]]}\n', encoding="utf-8"
    )
    cells = CellRules()
    row = json.loads('{"prompt": "?", "answer": [1, 2.5, "a"]}')
    assert read_cells(row, cells).answer == '[1, 2.5, "a"]'
    assert [read_cells({"prompt": "?", "answer": one}, cells).answer for one in (["15"], [[7]], [])] == ["15", "7", ""]
    from cepo.data.reading import read_source

    assert read_cells(read_source(str(tmp_path / "boxes.jsonl"))[0], cells).answer == '[0.50, 1e-3, "é", [null, true]]'
