"""Every form of data that is documented, conversations too, read through the path that a run takes, and the order of problems."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from generator_cases import picture
from hypothesis import given
from hypothesis import strategies as st
from json_files import write_lines
from training_runs import TWO_TEACHERS, Train

from cepo.algorithms.settings import TeacherConfig
from cepo.config import load_config
from cepo.config.schema import DataConfig
from cepo.data.dataset import ProblemSet
from cepo.data.prompts import ContextBuilder, Problem
from cepo.data.training_set import most_visuals, read_training_sets, weighted_indices
from cepo.errors import DataError
from cepo.models.interface import Turn
from cepo.models.processing import Processing

ROWS = [
    {"problem": "What is 1 + 1?", "images": [], "answer": "2", "level": 1},
    {"problem": "<image>How long?", "images": ["a.png"], "answer": "24", "level": 2},
    {"problem": "<image>or<image>?", "images": ["b.jpg", "a.png"], "answer": "3.5", "level": 3},
]
SIZES = [[], [(64, 64)], [(96, 64), (64, 64)]]
SETTINGS: dict[str, Any] = {"prompt_key": "problem", "max_prompt_length": 2048, "min_pixels": None, "max_pixels": None}


@pytest.fixture(scope="module")
def picture_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pictures")
    picture(1).save(folder / "a.png")
    picture(2, (96, 64)).save(folder / "b.jpg")
    return folder


Reader = Callable[..., ProblemSet]


@pytest.fixture
def read(tiny_processing: Processing) -> Reader:
    def reader(source: Path | str, **settings: Any) -> ProblemSet:
        config = DataConfig(train_files=str(source), **(SETTINGS | settings))
        return ProblemSet(str(source), config, tiny_processing)

    return reader


def write(folder: Path, form: str, rows: Sequence[dict[str, Any]], *, stem: str = "train") -> Path:
    """A file of that form; parquet and arrow as the plain libraries write them, without a hint of what is a picture."""
    import pandas
    import pyarrow
    import pyarrow.parquet

    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{stem}.{form}"
    if form == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), file)
    elif form == "arrow":
        table = pyarrow.Table.from_pylist(list(rows))
        with pyarrow.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(table)
    elif form == "csv":
        pandas.DataFrame(rows).to_csv(file, index=False)
    elif form == "json":
        file.write_text(json.dumps(list(rows)), encoding="utf-8")
    else:
        write_lines(file, rows)
    return file


def sizes(problems: Sequence[Problem]) -> list[list[tuple[int, int]]]:
    sizes_of_problems: list[list[tuple[int, int]]] = []
    for problem in problems:
        sizes_of_problems.append([image.size for image in problem.images])
    return sizes_of_problems


@pytest.mark.parametrize("form", ["parquet", "arrow", "json", "jsonl"])
def test_rows_with_0_1_and_2_images_read_alike_from_each_form(
    read: Reader, tmp_path: Path, picture_folder: Path, form: str
) -> None:
    """In a row of JSON one path may stand without a list around it."""
    rows = list(ROWS)
    if form.startswith("json"):
        rows[1] = ROWS[1] | {"images": "a.png"}
    problems = read(write(tmp_path, form, rows), image_dir=str(picture_folder))
    assert sizes(problems) == SIZES
    for problem, row in zip(problems, ROWS, strict=True):
        assert problem.text == row["problem"]
        assert problem.ground_truth == row["answer"]
        assert problem.columns["level"] == row["level"]
        assert all(image.mode == "RGB" for image in problem.images)
    assert problems.most_visuals == (2, 0)


@pytest.mark.parametrize("form", ["parquet", "arrow"])
@pytest.mark.parametrize("is_struct", [True, False])
def test_images_as_bytes_read_like_their_files(
    read: Reader, tmp_path: Path, picture_folder: Path, form: str, is_struct: bool
) -> None:
    """Bytes stand alone, or in the struct of the datasets library; one image needs no list around it."""

    def cell(name: str) -> object:
        content = (picture_folder / name).read_bytes()
        return {"bytes": content, "path": None} if is_struct else content

    rows: list[dict[str, Any]] = []
    for row in ROWS:
        cells = [cell(name) for name in row["images"]]
        rows.append(row | {"images": cells})
    assert sizes(read(write(tmp_path, form, rows))) == SIZES
    one_image = ROWS[1] | {"images": cell("a.png")}
    no_image = ROWS[0] | {"images": None}
    single = write(tmp_path, form, [one_image, no_image], stem="single")
    assert sizes(read(single)) == [[(64, 64)], []]


def test_pil_images_in_datasets_come_back_pixel_for_pixel(read: Reader, tmp_path: Path) -> None:
    from datasets import Dataset, DatasetDict, Features, List, Value
    from datasets import Image as ImageFeature

    texts = {"problem": Value("string"), "answer": Value("string")}
    first = picture(3)
    second = picture(4)

    columns = {"images": [[first, second], []], "problem": ["<image><image>?", "?"], "answer": ["1", "2"]}
    several = Dataset.from_dict(columns, features=Features({"images": List(ImageFeature()), **texts}))
    several.to_parquet(str(tmp_path / "pil.parquet"))
    DatasetDict({"train": several, "test": several.select([1])}).save_to_disk(str(tmp_path / "saved"))
    for source in ("pil.parquet", "saved", "saved@train"):
        problems = read(tmp_path / source)
        assert len(problems) == 2
        assert pixels(problems[0]) == [first.tobytes(), second.tobytes()]
    assert len(read(f"{tmp_path}/saved@test")) == 1

    columns = {"images": [second], "problem": ["<image>?"], "answer": ["1"]}
    single = Dataset.from_dict(columns, features=Features({"images": ImageFeature(), **texts}))
    single.to_parquet(str(tmp_path / "single.parquet"))
    (problem,) = read(tmp_path / "single.parquet")
    assert pixels(problem) == [second.tobytes()]


def pixels(problem: Problem) -> list[bytes]:
    return [image.tobytes() for image in problem.images]


def test_columns_go_by_their_keys(read: Reader, tmp_path: Path, picture_folder: Path) -> None:
    row = {"question": "<image>?", "label": 7, "figure": "a.png", "proof": "By sight."}
    keys = {"prompt_key": "question", "answer_key": "label", "image_key": "figure", "solution_key": "proof"}
    file = write(tmp_path, "parquet", [row])
    (problem,) = read(file, image_dir=str(picture_folder), **keys)
    assert problem.text == "<image>?"
    assert problem.ground_truth == "7"
    assert problem.solution == "By sight."
    assert sizes([problem]) == [[(64, 64)]]


def test_the_most_visuals_are_those_of_both_sets(read: Reader, tmp_path: Path, picture_folder: Path) -> None:
    text_file = write(tmp_path, "jsonl", [{"problem": "1 + 1?", "answer": "2"}], stem="text")
    image_file = write(tmp_path, "jsonl", [ROWS[1]], stem="image")
    text = read(text_file)
    image = read(image_file, image_dir=str(picture_folder))
    assert text[0].images == ()
    assert text[0].solution is None
    assert most_visuals(text, None) == (0, 0)
    assert most_visuals(text, image) == (1, 0)


def test_several_files_are_one_set_or_weighted(
    tiny_run: list[str], tiny_processing: Processing, problem_file: Path, tmp_path: Path
) -> None:
    """11 rows of a list are each asked once; commas separate files too, and weights decide their shares."""
    rows = [{"problem": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(3)]
    text_file = write(tmp_path, "parquet", rows, stem="text")

    def training_set(*options: str) -> Any:
        return read_training_sets(load_config([*tiny_run, *options]).data, tiny_processing)

    problems = training_set(f"data.train_files=[{problem_file}, {text_file}]")
    names = [problems[index].prompt_id for index in range(len(problems))]
    assert names == [f"0:{row}" for row in range(8)] + [f"1:{row}" for row in range(3)]
    assert len(problems[0].images) == 1
    assert len(problems[10].images) == 0
    assert problems.most_visuals == (1, 0)
    assert problems.image_probe().data == str(problem_file)

    asked_indices: list[int] = []
    for step in range(11):
        asked_indices += problems.indices(step, 1)
    assert sorted(asked_indices) == list(range(11))
    assert asked_indices != list(range(11))

    mixed = training_set(f"data.train_files={text_file},{problem_file}@train[:6]", "data.train_weights=[1,3]")
    assert len(mixed) == 9
    num_from_text = 0
    for step in range(250):
        num_from_text += sum(index < 3 for index in mixed.indices(step, 4))
    assert num_from_text / 1000 == pytest.approx(0.25, abs=4 * 0.014)  # the deviation is sqrt(0.1875 / 1000)

    single = training_set()
    assert single[3].prompt_id == "3", "a single file needs no number"


def asked(steps: range, **settings: object) -> list[tuple[int, int]]:
    usual: dict[str, object] = {"shuffle": True, "seed": 1, "batch_size": 4}
    return [place for step in steps for place in weighted_indices(step, **(usual | settings))]  # pyright: ignore[reportArgumentType]


def test_each_pass_of_a_set_asks_each_problem_once() -> None:
    set_sizes = [10, 5]
    asked_of_sets = asked(range(10), sizes=set_sizes, weights=[0.5, 0.5], batch_size=6)
    for number, size in enumerate(set_sizes):
        indices = [index for part, index in asked_of_sets if part == number]
        passes = [indices[start : start + size] for start in range(0, len(indices) - size, size)]
        assert len(passes) >= 2
        for one_pass in passes:
            assert sorted(one_pass) == list(range(size))
        assert passes[0] != passes[1]


@given(st.integers(0, 30), st.integers(0, 5))
def test_a_resumed_run_asks_the_same_problems(step: int, seed: int) -> None:
    settings = {"sizes": [7, 3, 5], "weights": [1, 2, 4], "seed": seed}
    whole = asked(range(step + 1), **settings)
    assert asked(range(step, step + 1), **settings) == whole[-4:]


SYSTEM = {"role": "system", "content": "You are brief."}
TURNS = [
    SYSTEM,
    {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is this?"}]},
    {"role": "assistant", "content": "A square <|im_end|>."},
    {"role": "user", "content": [{"type": "text", "text": "And this? "}, {"type": "image"}]},
]
Conversations = Callable[..., ProblemSet]


@pytest.fixture
def conversations(read: Reader, picture_folder: Path, tmp_path: Path) -> Conversations:
    """Problems with the given prompts; a row has as many images as asked for."""

    def conversations(prompts: list[Any], num_images: list[int], **settings: Any) -> ProblemSet:
        rows = [
            {"problem": prompt, "images": ["a.png"] * count, "answer": "5"}
            for prompt, count in zip(prompts, num_images, strict=True)
        ]
        return read(write(tmp_path, "jsonl", rows), image_dir=str(picture_folder), **settings)

    return conversations


def test_messages_are_templated_in_their_order(conversations: Conversations, tiny_processing: Processing) -> None:
    problems = conversations([TURNS, [{"role": "user", "content": "What is 2 + 3?"}]], [2, 0])
    first, second = problems
    assert first.text == "And this? <image>"
    assert first.history == (
        Turn("system", "You are brief."),
        Turn("user", "<image>What is this?"),
        Turn("assistant", "A square <|im_end|>."),
    )
    image = "<|vision_start|><|image_pad|><|vision_end|>"
    prompt = tiny_processing.encode(first.text, tiny_processing.load_images(first.images), history=first.history)
    assert tiny_processing.tokenizer.decode(prompt.engine_ids) == (
        "<|im_start|>system\nYou are brief.<|im_end|>\n"
        f"<|im_start|>user\n{image}What is this?<|im_end|>\n"
        "<|im_start|>assistant\nA square <|im_end|>.<|im_end|>\n"
        f"<|im_start|>user\nAnd this? {image}<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = tiny_processing.template_ids(first.text, history=first.history)
    end = tiny_processing.tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert ids.count(end) == 4  # the one in the assistant's text is eight characters
    assert (second.text, second.history, problems.most_visuals) == ("What is 2 + 3?", (), (2, 0))


def test_the_format_prompt_is_around_the_question_alone(conversations: Conversations, tmp_path: Path) -> None:
    (tmp_path / "format.jinja").write_text("{{ content }} Answer in a box.")
    problem = conversations([TURNS], [2], format_prompt=str(tmp_path / "format.jinja"))[0]
    assert problem.text == "And this? <image> Answer in a box."
    assert problem.history[1].text == "<image>What is this?"
    with pytest.raises(DataError, match=r"they have 78 to 78 tokens"):
        conversations([TURNS], [2], max_prompt_length=30)
    assert len(conversations([TURNS[-1:]], [1], max_prompt_length=30)) == 1


def test_contexts_differ_in_the_last_turn_alone(conversations: Conversations, tiny_processing: Processing) -> None:
    problem = conversations([TURNS], [2])[0]
    contexts = ContextBuilder(tiny_processing, TeacherConfig(), max_context_length=512)
    student = contexts.student(problem)
    teacher = contexts.teacher(problem, student, "5")
    length_of_last_turn = len(tiny_processing.template_ids("")) + 8
    shared = len(student.token_ids) - length_of_last_turn
    assert student.token_ids[:shared] == teacher.token_ids[:shared]
    assert len(teacher.token_ids) > len(student.token_ids)


@pytest.mark.parametrize(
    ("messages", "num_images", "words"),
    [
        ([], 0, "the prompt has no message"),
        ([SYSTEM], 0, "the last message is the system's"),
        (TURNS[:3], 1, "the last message is the assistant's"),
        ([{"role": "human", "content": "?"}], 0, "message 0 has the role 'human'; accepted: system, user, assistant"),
        ([{"role": "user"}], 0, "message 0 has no role or no content"),
        (
            [{"role": "user", "content": [{"type": "image", "image": "a.png"}]}],
            1,
            "1 '<image>' in the text but 2 images",
        ),
        ([{"role": "user", "content": [{"type": "audio"}]}], 0, "message 0 has the part {'type': 'audio'}"),
        (TURNS, 1, "2 '<image>' in the text but 1 images"),
        ([{"role": "user", "content": " "}], 0, "is empty"),
    ],
)
def test_bad_messages_are_refused_with_what_is_accepted(
    conversations: Conversations, messages: list[Any], num_images: int, words: str
) -> None:
    with pytest.raises(DataError) as caught:
        conversations([messages], [num_images])
    assert words in str(caught.value)


@pytest.mark.heavy
def test_a_run_on_conversations_trains_and_teachers_read_them(train: Train, tmp_path: Path) -> None:
    from datasets import Dataset, Features, Image, List, Value

    text_part = {"type": Value("string"), "text": Value("string")}
    message = {"role": Value("string"), "content": List(text_part)}
    features = Features({"problem": List(message), "images": List(Image()), "answer": Value("string")})
    system = {"role": "system", "content": [{"type": "text", "text": "You are brief."}]}
    image = {"type": "image", "text": None}
    rows: list[dict[str, Any]] = []
    for number in range(8):
        question = {"type": "text", "text": f"{number} + 1?"}
        user = {"role": "user", "content": [image, question]}
        rows.append({"problem": [system, user], "images": [picture(number)], "answer": str(number + 1)})
    file = tmp_path / "train.parquet"
    Dataset.from_list(rows, features=features).to_parquet(str(file))

    finished = train(*TWO_TEACHERS, f"data.train_files={file}", "data.format_prompt=null")
    assert [row["step"] for row in finished.metrics] == [1, 2]
    for row in finished.metrics:
        assert row["actor/grad_norm"] > 0
        assert row["work/teacher_rows"] > 0
    assert {row["problem"] for row in finished.rollouts} <= {f"<image>{n} + 1?" for n in range(8)}
