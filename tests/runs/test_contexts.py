"""What teachers read: the student's own turn with a reference in it, around the same pictures, before the same response."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from generator_cases import picture
from training_runs import Train, encoded

from cepo.algorithms.settings import TeacherConfig
from cepo.data.batch import ScoringRow
from cepo.data.contexts import ContextBuilder
from cepo.data.dataset import Problem
from cepo.models.inputs import EncodedPrompt, Turn
from cepo.models.processing import Processing
from cepo.types import Reference
from cepo.workers.actor_critic import Actor

SAYS_NOTHING = "{{ prompt }}{{ reference[:0] }}"


def problem(text: str = "<image>Find x.", *, images: int = 1) -> Problem:
    pictures = tuple(picture(seed, (64 + 32 * seed, 64)) for seed in range(images))
    return Problem(prompt_id="0", text=text, images=pictures, ground_truth="4", solution=None, columns={})


def builder(processing: Processing, *, max_context_length: int = 512, **teacher: Any) -> ContextBuilder:
    return ContextBuilder(processing, TeacherConfig(**teacher), max_context_length=max_context_length)


def shown(processing: Processing, prompt: EncodedPrompt) -> str:
    return processing.decode(prompt.engine_ids, skip_special_tokens=False)


@pytest.mark.heavy
def test_a_teacher_in_the_students_context_has_no_evidence(train: Train, tmp_path: Path) -> None:
    """The deltas, under rlsd teacher minus student, are below 1e-4."""
    template = tmp_path / "nothing.jinja"
    template.write_text(SAYS_NOTHING)
    options = ["algorithm.adv_estimator=rlsd", f"algorithm.teacher.template={template}", "trainer.max_steps=1"]
    finished = train(*options)
    assert finished.metrics[0]["work/teacher_rows"] >= 8
    rollouts = [rollout for group in finished.rollouts for rollout in group["rollouts"]]
    deltas = [delta for rollout in rollouts for delta in rollout["delta"] or ()]
    assert len(deltas) > 100
    assert max(map(abs, deltas)) < 1e-4
    assert max(abs(weight - 1) for rollout in rollouts for weight in rollout["weight"]) < 1e-4


@pytest.mark.parametrize(
    ("text", "first", "shown"),
    [
        (r" parts. 1+12=34. \boxed{34}", 0, r"parts. 1+12=34. \boxed{34}"),  # " parts" is one token, "parts" is not
        # The second byte of two; 3 bytes encode the mark.
        (r"é parts. \boxed{34}", 1, "\ufffd" + r" parts. \boxed{34}"),
        (r"∠ABC = 60. \boxed{60}", 1, "\ufffd\ufffd" + r"ABC = 60. \boxed{60}"),
    ],
)
def test_a_peers_reference_is_whole_if_its_text_encodes_longer(
    tiny_processing: Processing, text: str, first: int, shown: str
) -> None:
    """Leading spaces are stripped, and half characters become marks, so that the text has more tokens than were sampled."""
    sampled = tuple(tiny_processing.encode_text(text))[first:]
    assert len(tiny_processing.encode_text(shown)) > len(sampled)
    assert builder(tiny_processing).reference_text(Reference(token_ids=sampled)) == shown


def test_a_reference_is_cut_to_fit_the_context_and_pictures_stay(tiny_processing: Processing) -> None:
    task = problem("<image>Find x<image>.", images=2)
    student = builder(tiny_processing).student(task)
    reference = " ".join(str(number) for number in range(100, 120))
    whole = builder(tiny_processing).teacher(task, student, reference)
    image_token = tiny_processing.image_token_id
    for room in (5, 20):
        limit = len(whole.token_ids) - room
        found = builder(tiny_processing, max_context_length=limit).fitted(task, student, reference, is_answer=False)
        assert found is not None
        cut, kept = found
        assert limit - 4 <= len(cut.token_ids) <= limit
        assert cut.token_ids.count(image_token) == student.token_ids.count(image_token) == 4 + 6
        assert cut.images is student.images
        words = shown(tiny_processing, cut).partition("answer: ")[2].partition("<|im_end|>")[0]
        assert words == kept
        assert reference.startswith(f"{words} ")  # no number is cut in two


def test_an_answer_is_shown_whole_and_a_text_from_one_token_on(tiny_processing: Processing) -> None:
    task = problem("<image>Find x.")
    student = builder(tiny_processing).student(task)

    def shown_of(reference: str, missing: int, *, is_answer: bool) -> str | None:
        """What is left of a reference if its context is so many tokens too long."""
        length = len(builder(tiny_processing).teacher(task, student, reference).token_ids)
        contexts = builder(tiny_processing, max_context_length=length - missing)
        found = contexts.fitted(task, student, reference, is_answer=is_answer)
        return None if found is None else found[1]

    # A long text that is one number cannot be cut either.
    for is_answer in (True, False):
        assert [shown_of("123456", missing, is_answer=is_answer) for missing in range(6)] == ["123456"] + [None] * 5
    size = len(tiny_processing.encode_text("x and more"))
    assert shown_of("x and more", size - 1, is_answer=False) == "x"
    assert {shown_of("x and more", missing, is_answer=False) for missing in range(size, size + 9)} == {None}


@pytest.mark.parametrize(
    ("text", "cap", "kept"),
    [
        ("a 12 345", 3, "a"), ("a 12 345", 4, "a 12"), ("a 12 345", 7, "a 12"), ("a 12 ", 4, "a 12"),
        ("a 12 ", 5, "a 12 "),  # as many tokens as may be: left as it is
        ("a 1,234 b", 4, "a"), ("a 1.25 b", 3, "a"), ("a 1.25 b", 4, "a"), ("a 1.25 b", 6, "a 1.25"), ("345", 2, ""),
    ],
)  # fmt: skip
def test_a_cap_cuts_no_number_in_two(tiny_processing: Processing, text: str, cap: int, kept: str) -> None:
    assert builder(tiny_processing)._cut(text, cap) == kept


def test_assistant_prefix_is_between_header_and_response(tiny_processing: Processing) -> None:
    contexts = builder(tiny_processing, placement="assistant_prefix")
    student = contexts.student(problem())
    teacher = contexts.teacher(problem(), student, "42")
    assert teacher.token_ids == (*student.token_ids, *tiny_processing.encode_text("42\n"))
    assert shown(tiny_processing, teacher).endswith("<|im_start|>assistant\n42\n")


@pytest.mark.parametrize("placement", ["user_suffix", "assistant_prefix"])
def test_a_blind_teacher_has_no_image_token(
    tiny_processing: Processing, build_actor: Callable[..., Actor], placement: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("WARNING", logger="cepo"):
        contexts = builder(tiny_processing, placement=placement, with_images=False)
    assert "teacher.with_images is false" in caplog.text
    before = (Turn("user", "<im<image>age>What?"), Turn("assistant", "A square."))
    task = dataclasses.replace(problem("Find x<image>.", images=2), history=before)
    student = contexts.student(task)
    teacher = contexts.teacher(task, student, "42")
    blind = contexts.blind(task)
    assert student.token_ids.count(tiny_processing.image_token_id) == 10
    for context in (teacher, blind):
        assert context.images is None
        text = shown(tiny_processing, context)
        assert "user\nWhat?<|im_end|>" in text
        assert "Find x." in text
        assert not [mark for mark in ("<image>", "<|image_pad|>", "<|vision_start|>") if mark in text]
    text_only = encoded(tiny_processing, "Find x.")
    row = [ScoringRow(context=context, response_ids=(65, 66, 67)) for context in (student, teacher, text_only)]
    assert [len(scores) for scores in build_actor().score(row, as_teacher=True)] == [3, 3, 3]
