from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from generator_cases import picture
from training_runs import TWO_TEACHERS, Train

from cepo.algorithms.settings import TeacherConfig
from cepo.config.schema import DataConfig
from cepo.data.contexts import ContextBuilder
from cepo.data.dataset import ProblemSet
from cepo.errors import DataError
from cepo.models.inputs import Turn
from cepo.models.processing import Processing

SYSTEM = {"role": "system", "content": "You are brief."}
TURNS = [
    SYSTEM,
    {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is this?"}]},
    {"role": "assistant", "content": "A square <|im_end|>."},
    {"role": "user", "content": [{"type": "text", "text": "And this? "}, {"type": "image"}]},
]
Reader = Callable[..., ProblemSet]


@pytest.fixture
def read(tiny_processing: Processing, tmp_path: Path) -> Reader:
    """Problems of a jsonl file with the given prompts; a row has as many images as asked for."""

    def reader(prompts: list[Any], num_images: list[int], **settings: Any) -> ProblemSet:
        picture(1).save(tmp_path / "a.png")
        rows = [
            {"prompt": prompt, "images": ["a.png"] * count, "answer": "5"}
            for prompt, count in zip(prompts, num_images, strict=True)
        ]
        file = tmp_path / "train.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        usual: dict[str, Any] = {"image_dir": str(tmp_path), "min_pixels": None, "max_prompt_length": 512}
        return ProblemSet(str(file), DataConfig(train_files=str(file), **(usual | settings)), tiny_processing)

    return reader


def test_messages_are_templated_in_their_order(read: Reader, tiny_processing: Processing) -> None:
    problems = read([TURNS, [{"role": "user", "content": "What is 2 + 3?"}]], [2, 0])
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


def test_the_format_prompt_is_around_the_question_alone(read: Reader, tmp_path: Path) -> None:
    (tmp_path / "format.jinja").write_text("{{ content }} Answer in a box.")
    problem = read([TURNS], [2], format_prompt=str(tmp_path / "format.jinja"))[0]
    assert problem.text == "And this? <image> Answer in a box."
    assert problem.history[1].text == "<image>What is this?"
    with pytest.raises(DataError, match=r"they have 78 to 78 tokens"):
        read([TURNS], [2], max_prompt_length=30)
    assert len(read([TURNS[-1:]], [1], max_prompt_length=30)) == 1


def test_contexts_differ_in_the_last_turn_alone(read: Reader, tiny_processing: Processing) -> None:
    problem = read([TURNS], [2])[0]
    contexts = ContextBuilder(tiny_processing, TeacherConfig(), max_context_length=512)
    student = contexts.student(problem).token_ids
    teacher = contexts.teacher(problem, contexts.student(problem), "5").token_ids
    last = len(tiny_processing.template_ids("")) + 8
    assert student[: len(student) - last] == teacher[: len(student) - last]
    assert len(teacher) > len(student)


@pytest.mark.parametrize(
    ("messages", "num_images", "words"),
    [
        ([], 0, "the prompt has no message"),
        ([SYSTEM], 0, "the last message is the system's"),
        (TURNS[:3], 1, "the last message is the assistant's"),
        ([{"role": "human", "content": "?"}], 0, "message 0 has the role 'human'; accepted: system, user, assistant"),
        ([{"role": "user"}], 0, "message 0 has no role or no content"),
        ([{"role": "user", "content": [{"type": "image", "image": "a.png"}]}], 1, "data.image_key"),
        ([{"role": "user", "content": [{"type": "audio"}]}], 0, "message 0 has the part {'type': 'audio'}"),
        (TURNS, 1, "2 '<image>' in the text but 1 images"),
        ([{"role": "user", "content": " "}], 0, "is empty"),
    ],
)
def test_bad_messages_are_refused_with_what_is_accepted(
    read: Reader, messages: list[Any], num_images: int, words: str
) -> None:
    with pytest.raises(DataError) as caught:
        read([messages], [num_images])
    assert words in str(caught.value)


@pytest.mark.heavy
def test_a_run_on_conversations_trains_and_teachers_read_them(train: Train, tmp_path: Path) -> None:
    from datasets import Dataset, Features, Image, List, Value

    message = {"role": Value("string"), "content": List({"type": Value("string"), "text": Value("string")})}
    system = {"role": "system", "content": [{"type": "text", "text": "You are brief."}]}
    image = {"type": "image", "text": None}
    turns = [[system, {"role": "user", "content": [image, {"type": "text", "text": f"{n} + 1?"}]}] for n in range(8)]
    columns = {"problem": turns, "images": [[picture(n)] for n in range(8)], "answer": [str(n + 1) for n in range(8)]}
    features = Features({"problem": List(message), "images": List(Image()), "answer": Value("string")})
    Dataset.from_dict(columns, features=features).to_parquet(str(tmp_path / "train.parquet"))
    finished = train(*TWO_TEACHERS, f"data.train_files={tmp_path / 'train.parquet'}", "data.format_prompt=null")
    assert [row["step"] for row in finished.metrics] == [1, 2]
    assert all(row["actor/grad_norm"] > 0 and row["work/teacher_rows"] > 0 for row in finished.metrics)
    assert {row["problem"] for row in finished.rollouts} <= {f"<image>{n} + 1?" for n in range(8)}
