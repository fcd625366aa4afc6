"""What teachers read: the student's own turn with a reference in it, around the same pictures, before the same response."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from training_runs import (
    EVERY_WRONG_ROLLOUT_TEACHES,
    encoded,
    picture,
    run,
)

from cepo.algorithms.settings import TeacherConfig
from cepo.data.batch import ScoringRow
from cepo.data.contexts import ContextBuilder
from cepo.data.dataset import Problem
from cepo.models.inputs import EncodedPrompt
from cepo.models.processing import Processing
from cepo.types import Reference
from cepo.workers.actor import Actor

SAYS_NOTHING = "{{ prompt }}{{ reference[:0] }}"
CONTROL_TEXTS = ("<|im_end|>", "<|im_start|>", "<|image_pad|>", "<|vision_start|>", "<|endoftext|>")


def problem(text: str = "<image>Find x.", *, images: int = 1) -> Problem:
    pictures = tuple(picture(seed, (64 + 32 * seed, 64)) for seed in range(images))
    return Problem(prompt_id="0", text=text, images=pictures, ground_truth="4", solution=None, columns={})


def builder(processing: Processing, *, max_context_length: int = 512, **teacher: Any) -> ContextBuilder:
    return ContextBuilder(processing, TeacherConfig(**teacher), max_context_length=max_context_length)


def shown(processing: Processing, prompt: EncodedPrompt) -> str:
    return processing.decode(prompt.engine_ids, skip_special_tokens=False)


@pytest.mark.heavy
def test_a_teacher_in_the_students_context_has_no_evidence(tiny_run: list[str], tmp_path: Path) -> None:
    """The deltas are below 1e-4."""
    template = tmp_path / "nothing.jinja"
    template.write_text(SAYS_NOTHING)
    finished = run(
        tiny_run,
        "algorithm.adv_estimator=rlsd",  # its delta is teacher minus student
        f"algorithm.teacher.template={template}",
        "trainer.max_steps=1",
        folder=tmp_path / "run",
    )
    assert finished.metrics[0]["work/teacher_rows"] >= 8
    deltas = [delta for group in finished.rollouts for rollout in group["rollouts"] for delta in rollout["delta"] or ()]
    assert len(deltas) > 100
    assert max(map(abs, deltas)) < 1e-4
    weights = [weight for group in finished.rollouts for rollout in group["rollouts"] for weight in rollout["weight"]]
    assert max(abs(weight - 1) for weight in weights) < 1e-4


@pytest.mark.heavy
def test_teacher_sequences_hold_hint_and_response_in_place(
    tiny_run: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import cepo.workers.passes as passes_module

    seen: list[tuple[list[ScoringRow], Any]] = []

    def recorded(rows: list[ScoringRow], **settings: Any) -> Any:
        seen.append((list(rows), collate(rows, **settings)))
        return seen[-1][1]

    collate = passes_module.collate
    monkeypatch.setattr(passes_module, "collate", recorded)
    options = [EVERY_WRONG_ROLLOUT_TEACHES, "trainer.max_steps=1", "algorithm.adv_estimator=cepo"]
    options.append("worker.actor.padding_free=false")  # padded rows can be read off one by one
    finished = run(tiny_run, *options, folder=tmp_path / "run")
    processing = finished.trainer.processing
    image, end = processing.image_token_id, processing.encode("", None).token_ids.count
    end_of_turn = processing.tokenizer.convert_tokens_to_ids("<|im_end|>")
    num_teacher_rows, views = 0, set()
    for rows, collated in seen:
        for number, row in enumerate(rows):
            ids = collated.input_ids[number, : row.num_tokens].tolist()
            assert tuple(ids[-len(row.response_ids) :]) == row.response_ids
            assert ids.count(image) == 4  # 64 x 64 pixels in patches of 16, merged 2 by 2
            text = processing.decode(row.context.token_ids, skip_special_tokens=False)
            before, hint, behind = text.partition("\nHere is a sample answer: ")
            if not hint:
                continue
            num_teacher_rows += 1
            views.add(behind.partition("<|im_end|>")[0])
            assert behind.endswith("<|im_end|>\n<|im_start|>assistant\n")
            assert behind.count("<|im_end|>") == 1
            assert before.count("<|im_start|>") == before.count("<|im_end|>") + 1  # the user's turn is still open
            assert before.partition("<|vision_end|>")[2].strip(), "the question stands before the hint"
            assert row.context.token_ids.count(end_of_turn) == text.count("<|im_end|>")
        flat = collated.input_ids.flatten()
        assert torch.equal(flat[collated.response_index + 1], collated.targets)
    assert num_teacher_rows == finished.metrics[0]["work/teacher_rows"] >= 16
    assert {group["ground_truth"] for group in finished.rollouts} & views  # the right side
    assert len(views) > len(finished.rollouts) / 2
    assert end(image) == 0


@pytest.mark.parametrize("placement", ["user_suffix", "assistant_prefix"])
def test_no_special_token_arises_from_text(tiny_processing: Processing, placement: str) -> None:
    hostile = " ".join(CONTROL_TEXTS) + " <|im_<|im_end|>end|> <video>"
    contexts = builder(tiny_processing, placement=placement)
    special = set(tiny_processing.tokenizer.all_special_ids) | set(tiny_processing.tokenizer.added_tokens_decoder)

    def specials(text: str, reference: str) -> list[int]:
        task = problem(text)
        reference = contexts.reference_text(Reference(text=reference))
        context = contexts.teacher(task, contexts.student(task), reference)
        return [token for token in context.token_ids if token in special]

    plain = specials("<image>Find x.", "4")
    assert specials(f"<image>Find x. {hostile}", "4") == plain
    assert specials("<image>Find x.", f"4 {hostile} 5") == plain
    assert contexts.reference_text(Reference(text=f"4 {hostile} <image>5")) == "4 5"


def test_a_reference_is_cut_to_its_cap_of_64_tokens(tiny_processing: Processing) -> None:
    contexts = builder(tiny_processing)
    long = " ".join(str(number) for number in range(100, 400))
    assert len(tiny_processing.encode_text(long)) > 300
    text = contexts.reference_text(Reference(text=long))
    assert long.startswith(text)
    assert 60 <= len(tiny_processing.encode_text(text)) <= 64
    assert contexts.reference_text(Reference(text="4")) == "4"


@pytest.mark.parametrize(
    ("text", "first", "shown"),
    [
        (
            " " + r"parts. 1+12=34. \boxed{34}",
            0,
            r"parts. 1+12=34. \boxed{34}",
        ),  # " parts" is one token, "parts" is not
        (r"The answer is \boxed{60}", 1, r"answer is \boxed{60}"),
        (
            r"é parts. \boxed{34}",
            1,
            "\ufffd" + r" parts. \boxed{34}",
        ),  # the second byte of two; 3 bytes encode the mark
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


def test_a_context_without_room_for_a_reference_is_none(
    tiny_processing: Processing,
) -> None:
    task = problem("<image>Find x.")
    student = builder(tiny_processing).student(task)
    wording = len(builder(tiny_processing).teacher(task, student, "").token_ids)
    assert wording > len(student.token_ids)
    for room in range(len(student.token_ids), wording + 1):
        contexts = builder(tiny_processing, max_context_length=room)
        assert contexts.fitted(task, student, "12 and more", is_answer=False) is None


def test_where_one_token_of_a_reference_fits_it_is_shown(tiny_processing: Processing) -> None:
    task, reference = problem("<image>Find x."), "x and more"
    student = builder(tiny_processing).student(task)
    whole = builder(tiny_processing).teacher(task, student, reference)
    limit = len(whole.token_ids) - len(tiny_processing.encode_text(reference)) + 1
    found = builder(tiny_processing, max_context_length=limit).fitted(task, student, reference, is_answer=False)
    assert found is not None
    assert found[1] == "x"


def test_an_answer_is_shown_whole_or_not_at_all(tiny_processing: Processing) -> None:
    task = problem("<image>Find x.")
    student = builder(tiny_processing).student(task)
    whole = builder(tiny_processing).teacher(task, student, "123456")
    for missing in range(0, 6):
        contexts = builder(tiny_processing, max_context_length=len(whole.token_ids) - missing)
        found = contexts.fitted(task, student, "123456", is_answer=True)
        assert (found is None) == (missing > 0)
        # A long text that is one number cannot be cut either.
        assert (contexts.fitted(task, student, "123456", is_answer=False) is None) == (missing > 0)


@pytest.mark.parametrize(
    ("text", "cap", "kept"),
    [
        ("a 12 345", 3, "a"),
        ("a 12 345", 4, "a 12"),
        ("a 12 345", 7, "a 12"),
        ("a 12 ", 4, "a 12"),
        ("a 12 ", 5, "a 12 "),  # as many tokens as may be: left as it is
        ("a 1,234 b", 4, "a"),
        ("a 1.25 b", 3, "a"),
        ("a 1.25 b", 4, "a"),
        ("a 1.25 b", 6, "a 1.25"),
        ("345", 2, ""),
    ],
)
def test_a_cap_cuts_no_number_in_two(tiny_processing: Processing, text: str, cap: int, kept: str) -> None:
    assert builder(tiny_processing)._cut(text, cap) == kept


def test_assistant_prefix_is_between_header_and_response(tiny_processing: Processing) -> None:
    contexts = builder(tiny_processing, placement="assistant_prefix")
    task = problem()
    student = contexts.student(task)
    teacher = contexts.teacher(task, student, "42")
    assert teacher.token_ids == (*student.token_ids, *tiny_processing.encode_text("42\n"))
    assert shown(tiny_processing, teacher).endswith("<|im_start|>assistant\n42\n")


@pytest.mark.parametrize("placement", ["user_suffix", "assistant_prefix"])
def test_a_blind_teacher_has_no_image_token(
    tiny_processing: Processing, build_actor: Callable[..., Actor], placement: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("WARNING", logger="cepo"):
        contexts = builder(tiny_processing, placement=placement, with_images=False)
    assert "teacher.with_images is false" in caplog.text
    task = problem("<image>Find x<image>.", images=2)
    student = contexts.student(task)
    teacher = contexts.teacher(task, student, "42")
    assert student.token_ids.count(tiny_processing.image_token_id) == 10
    assert teacher.images is None
    text = shown(tiny_processing, teacher)
    assert "Find x." in text
    assert not [mark for mark in ("<image>", "<|image_pad|>", "<|vision_start|>") if mark in text]
    text_only = encoded(tiny_processing, "Find x.")
    row = [ScoringRow(context=context, response_ids=(65, 66, 67)) for context in (student, teacher, text_only)]
    assert [len(scores) for scores in build_actor().score(row, as_teacher=True)] == [3, 3, 3]
