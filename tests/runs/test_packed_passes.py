"""Packed rows against padded rows: the same log-probs and gradients from fewer tokens; and which passes a step makes.

In bf16, with logits as large as in trained models, they differ by rounding alone; and the error of CEPO's delta, a difference
of two log-probs, with float32 logits and with rounded ones.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from generator_cases import open_generator, picture, request
from rounding import GRADIENTS, LOG_PROBS
from torch import Tensor
from training_runs import (
    ONE_STEP,
    TWO_TEACHERS,
    BuildActor,
    Train,
    around,
    batch_of,
    encoded,
    gradient_of,
    largest_gap,
    random_response,
    relative_gap,
    whole,
)

from cepo.algorithms import build_estimator
from cepo.data.batch import ScoringRow, token_array
from cepo.models.processing import Processing
from cepo.rollout.generator import SamplingSettings
from cepo.trainer.loop import Trainer
from cepo.trainer.planning import View, student_rows
from cepo.workers.actor import Actor
from cepo.workers.batching import forest_of
from cepo.workers.scoring_model import collate

HINTS = ("", "\nHere is a sample answer: 3", "\nHere is a sample answer: 47 degrees")


def mixed_rows(processing: Processing, *, num_contexts: int, size: int) -> list[ScoringRow]:
    """`size` ragged responses behind each context of 4 prompts.

    They have no picture, one, two of other sizes, and another picture under the same words.
    """
    question = "Find x in this figure, please, and say why."
    rows = []
    for seed, text, pictures in (
        (1, "What is 2 + 3, and why is it not 6?", []),
        (2, question, [picture(1)]),
        (3, question, [picture(2)]),
        (4, question, [picture(3, (96, 64)), picture(4, (128, 96))]),
    ):
        images = processing.load_images(pictures)
        lengths = torch.randint(1, 40, (size,), generator=torch.Generator().manual_seed(seed)).tolist()
        for hint in HINTS[:num_contexts]:
            context = processing.encode("<image>" * len(pictures) + text + hint, images)
            rows += [
                ScoringRow(context=context, response_ids=token_array(random_response(length, seed=100 * seed + number)))
                for number, length in enumerate(lengths)
            ]
    return rows


@pytest.mark.heavy
@pytest.mark.parametrize(
    "settings",
    [{}, {"model__freeze_vision_tower": "true"}, {"model__lora__rank": "4"}],
    ids=["all weights, the vision tower too", "frozen tower", "adapter"],
)
def test_packed_gradients_are_the_padded_ones_to_1e_minus_5(
    build_actor: BuildActor, tiny_processing: Processing, settings: dict[str, str]
) -> None:
    """With and without recomputation."""
    rows = mixed_rows(tiny_processing, num_contexts=2, size=2)
    advantages = torch.linspace(-1, 1, len(rows)).tolist()
    old_log_probs = [torch.full((len(row.response_ids),), -5.5) for row in rows]
    batch = batch_of(rows, advantages, old_log_probs)

    def gradient(*, packed: bool, recomputed: bool) -> Tensor:
        recomputation = {"model__enable_gradient_checkpointing": recomputed}
        actor = build_actor(padding_free=packed, max_grad_norm="1e9", **recomputation, **settings)
        for name, weight in actor.module.named_parameters():
            if "lora_B" in name:  # which begins as 0, and would hide the gradient of A
                weight.data.fill_(0.02)
        return gradient_of(actor, batch)

    padded = gradient(packed=False, recomputed=True)
    assert relative_gap(gradient(packed=True, recomputed=True), padded) < GRADIENTS
    assert relative_gap(gradient(packed=True, recomputed=False), padded) < GRADIENTS
    assert relative_gap(gradient(packed=False, recomputed=False), padded) < GRADIENTS


@pytest.mark.heavy
def test_packed_log_probs_are_the_padded_ones_in_any_cut(build_actor: BuildActor, tiny_processing: Processing) -> None:
    """The tokens that sharing prompts saved are counted."""
    actor = build_actor()
    padded = build_actor(padding_free="false")
    assert (actor.passes.packed, padded.passes.packed) == (True, False)
    rows = mixed_rows(tiny_processing, num_contexts=3, size=5)
    whole_pass = actor.score(rows)
    assert largest_gap(whole_pass, padded.score(rows)) < LOG_PROBS
    metrics = actor.work_metrics()
    num_tokens = sum(row.num_tokens for row in rows)
    num_computed = forest_of(rows, tiny_processing).num_tokens
    assert metrics["work/tokens_computed"].result == num_computed < 0.5 * num_tokens
    assert metrics["work/tokens_saved"].result == pytest.approx(1 - num_computed / num_tokens)
    largest = max(row.num_tokens for row in rows)
    actor.passes._longest_row = largest
    for size in (1, 3):
        passes = actor.passes.cut(rows, size)
        assert len(passes) > 1
        for part in passes:
            rows_of_part = [rows[index] for index in part.indices]
            assert forest_of(rows_of_part, tiny_processing).num_tokens <= size * largest
    actor._config = type(actor._config)(  # the same settings with one sample's tokens to a pass
        **{**vars(actor._config), "micro_batch_size_per_device_for_experience": 1}
    )
    assert largest_gap(actor.score(rows), whole_pass) < LOG_PROBS
    actor.work_metrics()
    actor.score(rows[:1])
    assert actor.work_metrics()["work/tokens_computed"].result == rows[0].num_tokens - 1, "those since the last call"


@pytest.mark.heavy
def test_passes_of_whole_blocks_have_the_same_result(
    build_actor: BuildActor, tiny_processing: Processing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Large layers on some processors, and GPUs, want a multiple of so many tokens."""
    rows = mixed_rows(tiny_processing, num_contexts=2, size=2)
    advantages = torch.linspace(-1, 1, len(rows)).tolist()
    old = [torch.full((len(row.response_ids),), -5.5) for row in rows]
    actors = [build_actor(max_grad_norm="1e9")]
    monkeypatch.setattr("cepo.workers.scored_model.row_multiple", lambda module: 16)
    actors.append(build_actor(max_grad_norm="1e9"))
    scores = [actor.score(rows) for actor in actors]
    computed = [actor.tokens_computed for actor in actors]
    assert largest_gap(scores[1], scores[0]) < LOG_PROBS
    assert computed[0] % 16 != 0
    assert computed[1] % 16 == 0
    gradients = [gradient_of(actor, batch_of(rows, advantages, old)) for actor in actors]
    assert relative_gap(gradients[1], gradients[0]) < GRADIENTS


def test_equal_images_in_two_objects_are_encoded_once(tiny_processing: Processing) -> None:
    first = encoded(tiny_processing, "Find x in this figure, please.", picture(1))
    second = encoded(tiny_processing, "Find x in this figure, please.", picture(1))
    rows = [ScoringRow(context=context, response_ids=token_array([5, 6, 7])) for context in (first, second)]
    forest = forest_of(rows, tiny_processing)
    batch = collate(rows, forest, processing=tiny_processing, device=torch.device("cpu"))
    assert [unit for _, unit in batch.image_order] == [0]
    assert batch.input_ids.numel() == len(first.token_ids) + 2 * 2


ONE_OPTIMIZER_BATCH = ["worker.actor.global_batch_size=4", ONE_STEP]
HINT = "Here is a sample answer"
Calls = list[tuple[bool, int, int]]


def watched(calls: Calls) -> Callable[[Trainer], None]:
    """Notes of every scoring pass whether it was a teacher's, its student rows and its rows with a hint."""

    def noted(trainer: Trainer, score: Any, rows: Sequence[ScoringRow], **options: Any) -> Any:
        hinted = sum(HINT in trainer.processing.decode(row.context.token_ids) for row in rows)
        if "temperature" not in options:  # for which the engine's log-probs are compared
            calls.append((score.__name__ == "score_teacher", len(rows) - hinted, hinted))
        return score(rows, **options)

    def watch(trainer: Trainer) -> None:
        around("backend.score", noted)(trainer)
        around("backend.score_teacher", noted)(trainer)

    return watch


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("options", "student_rows_scored", "passes"),
    [
        (["algorithm.adv_estimator=grpo"], False, 0),
        (["algorithm.adv_estimator=grpo", "worker.rollout.temperature=1.3"], False, 0),
        (["algorithm.adv_estimator=grpo", "worker.actor.global_batch_size=2"], True, 1),
        (TWO_TEACHERS, False, 1),
        (["algorithm.adv_estimator=opsd"], True, 1),
        (["algorithm.adv_estimator=rlsd", "algorithm.teacher.source=reference"], True, 2),
    ],
)
def test_one_batch_and_live_teachers_take_one_scoring_pass(
    train: Train, options: list[str], student_rows_scored: bool, passes: int
) -> None:
    """Teachers with other weights take a pass of their own, and of two optimizer batches the second is scored."""
    calls: Calls = []
    (row,) = train(*ONE_OPTIMIZER_BATCH, *options, prepare=watched(calls)).metrics
    assert [as_teacher for as_teacher, _, _ in calls] == [False, True][:passes]
    assert any(num_student > 0 for _, num_student, _ in calls) == student_rows_scored
    if passes == 2:
        assert [hinted > 0 for _, _, hinted in calls] == [False, True]
    assert sum(hinted for _, _, hinted in calls) == row.get("work/teacher_rows", 0)
    assert (row["work/scored_fraction"] > 0) == student_rows_scored
    assert 0 < row["rollout/log_prob_gap_max"] < 1e-4  # compared in the update where nothing scored the student
    assert 0 < row["work/tokens_saved"] < 1


def test_only_rows_set_against_the_student_are_scored() -> None:
    live = torch.tensor([True, True, True, True, False, True])
    on_policy = torch.tensor([True, True, True, True, True, False])
    correct = View(name="correct", references=["3", "3", "3", None, "3", None], rows={})
    wrong = View(name="wrong", references=["4", "4", None, None, None, None], rows={})

    def scored(method: str, *views: View, every: bool = False) -> list[int]:
        estimator = build_estimator(method)
        return student_rows(live, on_policy, estimator, list(views), every=every)

    assert scored("cepo", correct, wrong) == [2, 5]
    assert scored("rlsd", correct) == [0, 1, 2, 5]
    assert scored("grpo") == [5]
    assert scored("grpo", every=True) == [0, 1, 2, 3, 5]


QUESTION = "Find the area of the triangle."
SHOWN = ("", "\nHere is a sample answer: 12", "\nHere is a sample answer: 47")
SEEDS = (1, 2)
"""Of the images."""


@pytest.fixture(scope="module")
def views(realistic_folder: Path, tiny_processing: Processing) -> list[list[ScoringRow]]:
    """Responses to the images, sampled from the plain context, behind it and behind each hint."""
    prompts = [request(tiny_processing, QUESTION, [picture(seed)], seed=seed) for seed in SEEDS]
    settings = SamplingSettings(num_samples=8, max_response_length=32, ignore_eos=True)
    with contextlib.closing(open_generator("transformers", realistic_folder, tiny_processing)) as generator:
        groups = generator.generate(prompts, settings)

    def behind(hint: str) -> list[ScoringRow]:
        rows: list[ScoringRow] = []
        for seed, group in zip(SEEDS, groups, strict=True):
            context = encoded(tiny_processing, QUESTION + hint, picture(seed))
            rows += [ScoringRow(context=context, response_ids=response.response_ids) for response in group]
        return rows

    return [behind(hint) for hint in SHOWN]


def scored_exactly(actor: Actor, rows: list[ScoringRow]) -> tuple[Tensor, Tensor, Tensor]:
    """The log-probs, those in float64 of the same hidden states and weights, and the largest logits."""
    batch = collate(rows, processing=actor._processing, device=actor.device)
    with torch.no_grad():
        scores = actor.module(batch)
        hidden = scores.hidden
        weight = whole(actor.module.base.lm_head.weight).to(hidden.dtype)
        logits = hidden.double() @ weight.double().t()
    log_p = logits.log_softmax(dim=1)
    exact = log_p.gather(1, batch.targets.unsqueeze(1)).squeeze(1)
    assert hidden.dtype is torch.bfloat16
    return scores.log_probs.double(), exact, logits.amax(dim=1)


@pytest.mark.heavy
def test_float32_logits_cut_the_error_of_delta_by_more_than_5(
    build_actor: BuildActor, realistic_folder: Path, views: list[list[ScoringRow]]
) -> None:
    """The model is in bf16, with largest logits of 16 to 32."""
    errors: dict[bool, float] = {}
    for fp32_logits in (True, False):
        actor = build_actor(
            folder=realistic_folder, fsdp__mp_param_dtype="bf16", model__fp32_logits=str(fp32_logits).lower()
        )
        _, right_rows, wrong_rows = views
        right, exact_right, largest = scored_exactly(actor, right_rows)
        wrong, exact_wrong, _ = scored_exactly(actor, wrong_rows)
        is_realistic = (largest > 16) & (largest < 32)
        assert float(is_realistic.double().mean()) > 0.9
        delta = right - wrong
        exact = exact_right - exact_wrong
        assert float(exact.square().mean().sqrt()) > 0.1, "the hints say something"
        errors[fp32_logits] = float((delta - exact).square().mean().sqrt())
    assert errors[False] > 0.02, "nats"
    assert errors[False] / errors[True] >= 5
