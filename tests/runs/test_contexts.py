"""What teachers read: the student's own turn with a reference in it, around its pictures or others, before the same response."""

from __future__ import annotations

import dataclasses
import random
from io import BytesIO
from pathlib import Path
from typing import Any, cast

import pyarrow
import pyarrow.parquet
import pytest
import torch
from case_files import cases
from factories import HalfVisual, rollout, rollouts_of
from generator_cases import picture, reference_model
from PIL import Image
from rounding import LOG_PROBS
from training_runs import (
    ONE_STEP,
    BuildActor,
    Train,
    checked_config,
    encoded,
    largest_gap,
    opened,
    random_response,
    reference_log_probs,
)

from cepo.algorithms import build_estimator
from cepo.algorithms.settings import TeacherConfig
from cepo.data.batch import ScoringRow, token_array
from cepo.data.dataset import ProblemSet
from cepo.data.prompts import ContextBuilder, Problem, mask_for
from cepo.errors import ConfigError, DataError
from cepo.metrics import results
from cepo.models.interface import EncodedPrompt, Turn
from cepo.models.patch_mask import PatchMask
from cepo.models.processing import Processing
from cepo.trainer.batches import ScoredBatch
from cepo.trainer.planning import ScoringPlan, View, plan_views
from cepo.trainer.validation import leak_metrics
from cepo.types import ImageReference, RolloutGroup, TokenReference

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
    options = ["algorithm.adv_estimator=rlsd", f"algorithm.teacher.template={template}", ONE_STEP]
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
    assert builder(tiny_processing).reference_text(TokenReference(token_ids=sampled)) == shown


def test_a_reference_is_cut_to_fit_the_context_and_pictures_stay(tiny_processing: Processing) -> None:
    task = problem("<image>Find x<image>.", images=2)
    student = builder(tiny_processing).student(task)
    reference = " ".join(str(number) for number in range(100, 120))
    whole = builder(tiny_processing).teacher(task, student, reference)
    image_token = tiny_processing.image_token_id
    for room in (5, 20):
        limit = len(whole.token_ids) - room
        fitted = builder(tiny_processing, max_context_length=limit).fitted(task, student, reference, is_answer=False)
        assert fitted is not None
        cut, kept_words = fitted
        assert limit - 4 <= len(cut.token_ids) <= limit
        assert cut.token_ids.count(image_token) == student.token_ids.count(image_token) == 4 + 6
        assert cut.images is student.images
        words = shown(tiny_processing, cut).partition("answer: ")[2].partition("<|im_end|>")[0]
        assert words == kept_words
        assert reference.startswith(f"{words} ")  # no number is cut in two


def test_an_answer_is_shown_whole_and_a_text_from_one_token_on(tiny_processing: Processing) -> None:
    task = problem("<image>Find x.")
    student = builder(tiny_processing).student(task)

    def shown_of(reference: str, missing: int, *, is_answer: bool) -> str | None:
        """What is left of a reference if its context is so many tokens too long."""
        length = len(builder(tiny_processing).teacher(task, student, reference).token_ids)
        contexts = builder(tiny_processing, max_context_length=length - missing)
        fitted = contexts.fitted(task, student, reference, is_answer=is_answer)
        return None if fitted is None else fitted[1]

    # A long text that is one number cannot be cut either.
    for is_answer in (True, False):
        assert shown_of("123456", 0, is_answer=is_answer) == "123456"
        for missing in range(1, 6):
            assert shown_of("123456", missing, is_answer=is_answer) is None
    size = len(tiny_processing.encode_text("x and more"))
    assert shown_of("x and more", size - 1, is_answer=False) == "x"
    assert shown_of("x and more", size - 1, is_answer=True) is None
    for missing in range(size, size + 9):
        assert shown_of("x and more", missing, is_answer=False) is None


@pytest.mark.parametrize(("text", "cap", "kept"), cases(__file__, "capped_texts.yaml"))
def test_a_cap_cuts_no_number_in_two(tiny_processing: Processing, text: str, cap: int, kept: str) -> None:
    assert builder(tiny_processing).shortened(text, cap) == kept


def test_assistant_prefix_is_between_header_and_response(tiny_processing: Processing) -> None:
    contexts = builder(tiny_processing, placement="assistant_prefix")
    student = contexts.student(problem())
    teacher = contexts.teacher(problem(), student, "42")
    assert teacher.token_ids == (*student.token_ids, *tiny_processing.encode_text("42\n"))
    assert shown(tiny_processing, teacher).endswith("<|im_start|>assistant\n42\n")


@pytest.mark.parametrize("placement", ["user_suffix", "assistant_prefix"])
def test_a_blind_teacher_has_no_image_token(
    tiny_processing: Processing, build_actor: BuildActor, placement: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("WARNING", logger="cepo"):
        contexts = builder(tiny_processing, placement=placement, with_images=False)
    assert "teacher.with_images is false" in caplog.text
    history = (Turn("user", "<im<image>age>What?"), Turn("assistant", "A square."))
    task = dataclasses.replace(problem("Find x<image>.", images=2), history=history)
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
    row = [
        ScoringRow(context=context, response_ids=token_array([65, 66, 67])) for context in (student, teacher, text_only)
    ]
    assert [len(scores) for scores in build_actor().score(row)] == [3, 3, 3]


def masked_by_hand(image: Image.Image, seed: str, probability: float, patch_size: int) -> Image.Image:
    """The image with black squares, drawn one after the other in the order of random.Random(seed)."""
    drawn = random.Random(seed)
    copy = image.copy()
    for top_edge in range(0, image.height, patch_size):
        for left_edge in range(0, image.width, patch_size):
            if drawn.random() < probability:
                copy.paste((0, 0, 0), (left_edge, top_edge, left_edge + patch_size, top_edge + patch_size))
    return copy


@pytest.mark.heavy
@pytest.mark.parametrize("packed", [True, False])
def test_a_masked_teacher_reads_equal_tokens_and_black_patches(
    tiny_processing: Processing, build_actor: BuildActor, packed: bool
) -> None:
    """Scored in one call with the student, whose prompt has the same tokens and another picture."""
    contexts = builder(tiny_processing)
    task = problem()
    student = contexts.student(task)
    group = RolloutGroup(prompt_id="0", ground_truth="4", rollouts=[], seed=1, step=2)
    masked = contexts.masked(task, student, mask_for(group, ImageReference(masked=0.5)))
    patch_size = tiny_processing.reader.patch_size
    assert patch_size == 16
    image = masked_by_hand(task.images[0], "mask/1/2/0", 0.5, patch_size)
    by_hand = contexts.student(dataclasses.replace(task, images=(image,)))
    assert masked.token_ids == student.token_ids == by_hand.token_ids
    assert masked.images is not None
    assert by_hand.images is not None
    assert masked.images.content_key == by_hand.images.content_key
    response = random_response(8, seed=1)
    actor = build_actor(padding_free=packed)
    pairs = [ScoringRow(context=context, response_ids=token_array(response)) for context in (student, masked)]
    seen, unseen = actor.score(pairs)
    alone = [
        actor.score([ScoringRow(context=context, response_ids=token_array(response))])[0]
        for context in (student, by_hand)
    ]
    assert largest_gap([seen, unseen], alone) < LOG_PROBS
    assert largest_gap([seen], [unseen]) > 10 * LOG_PROBS


@pytest.mark.parametrize("square", [None, 32])
def test_the_masked_view_is_blackened_by_its_settings(tiny_processing: Processing, square: int | None) -> None:
    """Each rollout's teacher reads the student's tokens and the mask of the prompt in this step."""
    contexts = builder(tiny_processing)
    task = problem()
    student = contexts.student(task)
    rollouts = rollouts_of([(5, 6), (7, 8)], [1.0, 0.0], problems=[task], prompts=[student])
    prompt_group = RolloutGroup(
        prompt_id="0", ground_truth="4", rollouts=[rollout(0, 1.0, "4"), rollout(1, 0.0, "7")], seed=1, step=2
    )
    estimator = build_estimator("vppo", {"mask_square": square})
    (view,), learning = plan_views(rollouts, torch.ones(2, dtype=torch.bool), [prompt_group], estimator, contexts)
    mask = PatchMask(probability=0.5, seed="mask/1/2/0", square=square)
    expected = contexts.masked(task, student, mask)
    assert expected.images is not None
    assert student.images is not None
    assert expected.images.content_key != student.images.content_key
    assert view.name == "masked"
    assert learning.tolist() == [True, True]
    assert list(view.rows) == [0, 1]
    for row in view.rows.values():
        assert row.context.token_ids == student.token_ids
        assert row.context.images is not None
        assert row.context.images.content_key == expected.images.content_key


def test_a_mask_is_a_function_of_seed_step_and_prompt(tiny_processing: Processing) -> None:
    """With probability 0 the content is the student's, bit for bit, and with 1 that of a black image."""
    contexts = builder(tiny_processing)
    task = problem("<image><image>Find x.", images=2)
    student = contexts.student(task)
    assert student.images is not None

    def content(probability: float, **changes: Any) -> str:
        group = RolloutGroup(**{"prompt_id": "0", "ground_truth": "4", "rollouts": [], "seed": 1, "step": 2} | changes)
        mask = dataclasses.replace(mask_for(group, ImageReference(masked=1.0)), probability=probability)
        images = contexts.masked(task, student, mask).images
        assert images is not None
        return images.content_key

    assert content(0.0) == student.images.content_key
    black = tuple(Image.new("RGB", image.size) for image in task.images)
    blackened = contexts.student(dataclasses.replace(task, images=black)).images
    assert blackened is not None
    assert content(1.0) == blackened.content_key
    masks = {content(0.5), content(0.5, seed=2), content(0.5, step=3), content(0.5, prompt_id="1"), content(0.6)}
    assert len(masks) == 5
    assert content(0.5) in masks, "a second call, as in a resumed run, gives the same"


@pytest.mark.heavy
def test_a_masked_view_of_a_run_is_recorded_and_comes_again(
    tiny_run: list[str], illustrated: list[dict[str, Any]], tmp_path: Path
) -> None:
    """The first problem has no image, so that its rows have no reference; the mask of a step is the same in each process."""
    illustrated[0]["images"] = []
    illustrated[0]["problem"] = illustrated[0]["problem"].replace("<image>", "")
    file = written(illustrated, tmp_path)
    arguments = [f"data.train_files={file}", "data.shuffle=false", "algorithm.adv_estimator=visual"]
    contents: list[list[str]] = []
    for folder in ("first", "second"):
        with opened(tiny_run, *arguments, folder=tmp_path / folder) as trainer:
            trainer.estimator = HalfVisual(trainer.estimator.config)
            batch = trainer.score(trainer.plan(trainer.sample(0), every_row=True))
            (view,) = batch.plan.views
            assert view.has_reference.tolist() == [False] * 4 + [True] * 12
            assert set(view.references) == {None, "(images masked with probability 0.5)"}
            gap = (batch.teacher_log_probs["blind"] - batch.old_log_probs).abs().amax(dim=1)
            assert (gap[4:] > 10 * LOG_PROBS).all()
            assert not gap[:4].any()
            for row in view.rows.values():
                assert row.row is not None
                assert row.context.token_ids == batch.plan.student[row.row].context.token_ids
            contents.append(contents_of_images(view))

            trainer.sample(1)
            third = trainer.plan(trainer.sample(2), every_row=True)
            assert ids_of_problems(third) == ids_of_problems(batch.plan), "the third round has those of the first"
            (later_view,) = third.views
            assert not set(contents_of_images(later_view)) & set(contents[-1])
    assert contents[0] == contents[1]
    assert len(set(contents[0])) == 3, "one mask for all rows of a prompt"


def contents_of_images(view: View) -> list[str]:
    """The content of the images in each row of a teacher that has any."""
    images = [row.context.images for row in view.rows.values()]
    return [inputs.content_key for inputs in images if inputs is not None]


def ids_of_problems(plan: ScoringPlan) -> list[str]:
    return [problem.prompt_id for problem in plan.rollouts.problems]


@pytest.fixture
def illustrated(problem_file: Path) -> list[dict[str, Any]]:
    """The problems with two further columns: `same` has the row's own images, `crop` the left half of it."""
    rows = pyarrow.parquet.read_table(problem_file).to_pylist()
    for row in rows:
        image = Image.open(BytesIO(row["images"][0]["bytes"]))
        buffer = BytesIO()
        image.crop((0, 0, image.width // 2, image.height)).save(buffer, format="PNG")
        row["same"] = row["images"]
        row["crop"] = [{"bytes": buffer.getvalue(), "path": None}]
    return rows


def written(rows: list[dict[str, Any]], folder: Path) -> str:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "rows.parquet")
    return str(folder / "rows.parquet")


def scored(tiny_run: list[str], file: str, folder: Path, column: str) -> ScoredBatch:
    """The first step's batch of `rlsd`, whose teacher reads the answer."""
    arguments = [f"data.train_files={file}", "algorithm.adv_estimator=rlsd", f"data.teacher_image_key={column}"]
    with opened(tiny_run, *arguments, folder=folder) as trainer:
        return trainer.score(trainer.plan(trainer.sample(0)))


@pytest.mark.heavy
def test_only_the_teachers_log_probs_follow_its_images(
    tiny_run: list[str], illustrated: list[dict[str, Any]], tmp_path: Path
) -> None:
    illustrated[0]["crop"] = []
    file = written(illustrated, tmp_path)
    none = scored(tiny_run, file, tmp_path / "null", "null")
    same = scored(tiny_run, file, tmp_path / "same", "same")
    crop = scored(tiny_run, file, tmp_path / "crop", "crop")
    assert torch.equal(same.old_log_probs, none.old_log_probs)
    # The teacher with other images shares no prefix with the student, so passes are packed otherwise and rounded otherwise.
    torch.testing.assert_close(crop.old_log_probs, none.old_log_probs, rtol=0, atol=LOG_PROBS)

    teacher = none.teacher_log_probs["correct"]
    assert torch.equal(same.teacher_log_probs["correct"], teacher)
    gap = (crop.teacher_log_probs["correct"] - teacher).abs()
    is_changed = (gap > 100 * LOG_PROBS).any(dim=1)
    is_taught = (teacher != none.old_log_probs).any(dim=1)
    is_of_first = torch.tensor([problem.prompt_id == "0" for problem in none.rollouts.problems])
    has_crop = ~is_of_first.repeat_interleave(4)
    assert is_changed.any()
    assert torch.equal(is_changed, is_taught & has_crop)


def test_images_of_another_number_or_no_column_are_refused(
    tiny_run: list[str], illustrated: list[dict[str, Any]], tmp_path: Path, tiny_processing: Any
) -> None:
    illustrated[2]["crop"] *= 2
    settings = checked_config([*tiny_run, "data.teacher_image_key=crop"]).data
    with pytest.raises(DataError, match=r"row 2: column 'crop' has 2 images for the teacher, and the row has 1"):
        ProblemSet(written(illustrated, tmp_path), settings, tiny_processing)
    for row in illustrated:
        del row["crop"]
    problems = ProblemSet(written(illustrated, tmp_path), settings, tiny_processing)
    assert problems[0].teacher_images == ()
    with pytest.raises(ConfigError, match=r"data.teacher_image_key is 'crop', which .* does not have"):
        problems.require_column("teacher_image_key")


@pytest.mark.heavy
def test_leak_gaps_are_log_probs_with_less_without_the_answer(
    build_actor: BuildActor, tiny_model_folder: Path, tiny_processing: Processing
) -> None:
    task = problem()
    contexts = builder(tiny_processing)
    plain = contexts.student(task)
    responses = [random_response(length, length) for length in (5, 3, 9)]
    model = reference_model(tiny_model_folder)

    def log_probs_after(context: EncodedPrompt) -> list[torch.Tensor]:
        rows = [ScoringRow(context=context, response_ids=token_array(ids)) for ids in responses]
        return reference_log_probs(model, rows)

    with_answer = log_probs_after(contexts.teacher(task, plain, "4"))
    without_answer = log_probs_after(plain)
    gaps: list[torch.Tensor] = []
    for log_probs, log_probs_without in zip(with_answer, without_answer, strict=True):
        gaps.append(log_probs - log_probs_without)
    rollouts = rollouts_of(
        [*responses, (1, 2)],
        problems=[task],
        prompts=[plain],
        responses=["it is 4", "as the given answer says", "the hint is 4", "not among the rows that are probed"],
        correct=torch.tensor([True, False, False, True]),
    )
    metrics = results(leak_metrics(rollouts, 3, contexts, cast("Any", build_actor())))
    expected = {
        "leak/mention_fraction": 2 / 3,
        "leak/hint_gap_right": float(gaps[0].mean()),
        "leak/hint_gap_wrong": float(torch.cat(gaps[1:]).mean()),
        "leak/log_likelihood_gap": sum(float(gap.sum()) for gap in gaps) / 3,
    }
    assert metrics == pytest.approx(expected, abs=1e-5)
    assert min(abs(value) for value in metrics.values()) > 1e-3


@pytest.mark.heavy
@pytest.mark.parametrize("num_problems", [1, 4])
def test_the_contrast_of_inputs_reads_the_next_problem(
    num_problems: int, tiny_run: list[str], illustrated: list[dict[str, Any]], tmp_path: Path
) -> None:
    """After the last problem comes the first; a step with one problem has no other, hence no evidence."""
    arguments = [f"data.train_files={written(illustrated, tmp_path)}", "algorithm.adv_estimator=input_contrast"]
    arguments += [f"data.rollout_batch_size={num_problems}", f"worker.actor.global_batch_size={num_problems}"]
    with opened(tiny_run, *arguments, folder=tmp_path / "run") as trainer:
        batch = trainer.score(trainer.plan(trainer.sample(0), every_row=True))
        (view,) = batch.plan.views
        gap = (batch.teacher_log_probs["other"] - batch.old_log_probs).abs().amax(dim=1)
        if num_problems == 1:
            assert set(view.references) == {None}
            assert not gap.any()
            return
        rollouts = batch.plan.rollouts
        for row, scored in view.rows.items():
            following = (row // rollouts.group_size + 1) % num_problems
            assert scored.context is rollouts.prompts[following]
            expected = f"(the prompt of problem {rollouts.problems[following].prompt_id} in place of the student's)"
            assert view.references[row] == expected
        assert len(view.rows) == len(gap)
        assert (gap > 10 * LOG_PROBS).all()
