"""What a run reports: work, references and filters of a step, and validation."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from json_files import read_lines
from training_runs import (
    ONE_STEP,
    REWARD_FUNCTIONS,
    TWO_TEACHERS,
    Train,
    around,
    noting,
    recorded_groups,
    write_pictured,
)

from cepo.data.batch import OptimizerBatch
from cepo.rollout.generator import GenerationRequest
from cepo.trainer.loop import Trainer

pytestmark = pytest.mark.heavy

NEVER_RIGHT = f"worker.reward.reward_function={REWARD_FUNCTIONS}:never"
WITH_PEERS = ["algorithm.adv_estimator=sdpo", "algorithm.positive.source=peer_full"]


@pytest.fixture
def one_step(train: Train) -> Train:
    return partial(train, ONE_STEP)


@pytest.mark.parametrize(("limit", "rounds"), [(3, 3), (0, 6)])
def test_a_problem_asked_again_within_a_step_gets_other_noise(
    one_step: Train, caplog: pytest.LogCaptureFixture, limit: int, rounds: int
) -> None:
    """4 of the 8 problems a round, and no round more where no problem is mixed after 6."""
    seen: list[GenerationRequest] = []
    settings = ["algorithm.online_filtering=true", f"trainer.max_try_make_batch={limit}", NEVER_RIGHT]
    note = noting("backend.generate", lambda requests, *_: seen.extend(requests))
    finished = one_step(*settings, prepare=note)
    [row] = finished.steps
    assert row["filter/rounds"] == rounds
    assert row["filter/filled_groups"] == 4
    assert finished.trainer.state.rounds == rounds
    assert f"online filtering kept 0 of {4 * rounds} groups in {rounds} rounds" in caplog.text
    assert len({request.prompt_ids for request in seen}) <= 8
    assert len({request.seed for request in seen}) == len(seen) == 4 * rounds


def test_the_work_of_a_validation_is_no_part_of_the_steps(once: Train, one_step: Train, problem_file: Path) -> None:
    [plain] = once(ONE_STEP).steps
    settings = ["trainer.val_before_train=true", "trainer.leak_probe_size=8", f"data.val_files={problem_file}"]
    validated = one_step(*settings)
    assert [line["step"] for line in validated.metrics if "val/reward" in line] == [0, 1], "before and at the end"
    [step_with_validation] = validated.steps
    names = [name for name in plain if name.startswith("work/")]
    assert {"work/tokens_computed", "work/pictures_encoded"} <= set(names)
    assert {name: step_with_validation[name] for name in names} == {name: plain[name] for name in names}


def test_entropy_and_clip_fraction_do_not_depend_on_the_method(once: Train) -> None:
    [of_grpo] = once(ONE_STEP).steps
    [of_opsd] = once(ONE_STEP, "algorithm.adv_estimator=opsd").steps
    assert of_grpo["work/live_fraction"] < of_opsd["work/live_fraction"] == 1
    assert of_grpo["rollout/entropy"] == of_opsd["rollout/entropy"] > 1
    assert of_opsd["actor/live_entropy"] != pytest.approx(of_grpo["actor/live_entropy"], rel=1e-3)
    assert "actor/entropy_loss" not in of_grpo


def test_rows_that_no_reference_is_found_for_get_no_update_pass(one_step: Train) -> None:
    updates: list[OptimizerBatch] = []
    note = noting("backend.update", lambda batches, step: updates.extend(batches))
    [row] = one_step(*WITH_PEERS, NEVER_RIGHT, prepare=note).steps
    assert [len(batch.rows) for batch in updates] == [0, 0]
    assert sum(batch.denominators.num_sequences for batch in updates) == 16
    assert row["distillation/demonstrated_rollouts"] == row["work/live_fraction"] == row["actor/distillation_loss"] == 0


def test_records_show_the_reference_that_each_teacher_read(one_step: Train) -> None:
    finished = one_step(*WITH_PEERS, "algorithm.positive.exclude_self=true")
    num_checked = 0
    for group in finished.rollouts:
        right = [index for index, rollout in enumerate(group["rollouts"]) if rollout["accuracy"]]
        if len(right) < 2:
            continue
        num_checked += 1
        references = [rollout["references"]["correct"] for rollout in group["rollouts"]]
        # The best right one for all but itself, which reads the second.
        assert len(set(references)) == 2
        of_best = references[right[0]]
        assert references.count(of_best) == 1
    assert num_checked > 0


def test_an_answer_without_room_is_counted_and_gives_no_evidence(one_step: Train) -> None:
    def prepare(trainer: Trainer) -> None:
        longest = max(len(trainer.contexts.student(problem).token_ids) for problem in trainer.problems)
        trainer.contexts._max_context_length = longest + 1

    finished = one_step("algorithm.adv_estimator=rlsd", prepare=prepare)
    [row] = finished.steps
    assert 0 < row["references/correct_without_room"] < 1  # the shorter prompts have room
    assert row["references/correct_used"] == pytest.approx(1 - row["references/correct_without_room"])
    assert row["references/correct_cut"] == 0
    num_live = 0
    num_untaught = 0
    for group in finished.rollouts:
        rollouts = group["rollouts"]
        is_live = [any(rollout["token_advantages"]) for rollout in rollouts]
        if not any(is_live):
            continue
        num_live += 1
        if rollouts[0]["references"]["correct"] is None:
            num_untaught += 1
            for rollout in rollouts:
                assert not any(rollout["delta"])
    assert 0 < num_untaught < num_live


def emptied(attribute: str) -> Callable[[Trainer], None]:
    """References that have the attribute are empty."""

    def change(_: Trainer, text: Any, reference: Any) -> str:
        return "" if getattr(reference, attribute, None) is not None else text(reference)

    return around("contexts.reference_text", change)


@pytest.mark.parametrize(("fallback", "taught"), [("student", True), ("neutral", False)])
def test_an_emptied_wrong_side_is_as_if_there_were_none(one_step: Train, fallback: str, taught: bool) -> None:
    """And a right one, whose references are texts, leaves no evidence at all, whatever the wrong side shows."""
    settings = [*TWO_TEACHERS, f"algorithm.negative.fallback={fallback}"]
    [wrong] = one_step(*settings, name="wrong", prepare=emptied("token_ids")).steps
    [right] = one_step(*settings, name="right", prepare=emptied("text")).steps
    assert wrong["references/wrong_empty"] == right["references/correct_empty"] == 1.0
    assert wrong["references/wrong_used"] == 0.0
    assert (wrong["work/teacher_rows"] > 0) == taught
    assert right["work/teacher_rows"] == 0
    assert right["evidence/positive_fraction"] == right["evidence/negative_fraction"] == 0.0


def test_the_users_answers_are_what_teachers_read(one_step: Train) -> None:
    """A random model writes no box: without the user's function no response has an answer."""
    settings = ["algorithm.adv_estimator=cepo", f"worker.reward.reward_function={REWARD_FUNCTIONS}:every_second"]
    finished = one_step(*settings, f"worker.reward.answer_function={REWARD_FUNCTIONS}:by_length")
    [row] = finished.steps
    assert row["references/responses_without_answer"] == 0
    assert row["reward/read"] == 1
    num_references = 0
    for group in finished.rollouts:
        reference = group["rollouts"][0]["references"]["wrong"]
        if reference is None:
            continue
        num_references += 1
        wrong = [rollout["response"] for rollout in group["rollouts"] if rollout["accuracy"] == 0]
        assert reference in [f"{len(response)} characters" for response in wrong]
    assert num_references > 0


OVERRIDE = "worker.rollout.val_override_config"


@pytest.fixture
def validated(train: Train, problem_file: Path) -> Train:
    """2 training steps, and validation on 5 held-out problems."""
    return partial(
        train,
        f"data.val_files={problem_file}@train[3:]",
        "trainer.val_before_train=true",
        "trainer.val_freq=1",
        "trainer.val_generations_to_log=2",
        "trainer.leak_probe_size=0",
    )


def test_validation_asks_2_greedy_samples_of_3_of_5_problems(validated: Train) -> None:
    """It runs before training and at each step, of the same problems. 2 are recorded, also after a resume."""
    asked_seeds: list[tuple[int, ...]] = []

    def note(requests: Any, *_: Any) -> None:
        if len(requests) != 4:  # those of a training step
            asked_seeds.append(tuple(request.seed for request in requests))

    greedy = [f"{OVERRIDE}.n=2", f"{OVERRIDE}.temperature=0", "trainer.val_max_samples=3"]
    validated(*greedy, "trainer.max_steps=1", prepare=noting("backend.generate", note))
    resumed = validated(*greedy, prepare=noting("backend.generate", note))
    assert resumed.first_step == 1
    assert [len(seeds) for seeds in asked_seeds] == [3] * 3
    assert len(set(asked_seeds)) == 1
    validations = [row for row in resumed.metrics if "val/reward" in row]
    assert [row["step"] for row in validations] == [0, 1, 2]
    assert {row["val/num_samples"] for row in validations} == {6}
    assert all(0.1 < row["perf/cpu_memory_used_gb"] < 100 for row in resumed.steps)
    recorded = read_lines(resumed.folder / "generations.jsonl")
    responses: dict[tuple[int, str], list[str]] = {}
    for row in recorded:
        responses.setdefault((row["step"], row["prompt_id"]), []).append(row["response"])
    problems = {prompt for _, prompt in responses}
    assert len(problems) == 2
    assert responses.keys() == {(step, prompt) for step in (0, 1, 2) for prompt in problems}  # none lost at the resume
    assert all(len(pair) == 2 and pair[0] == pair[1] for pair in responses.values()), "greedy samples are equal"
    assert {row["step"] for row in recorded_groups(resumed.folder)} == {1, 2}


def test_batches_and_greedy_accuracy_leave_the_sampled_one(validated: Train) -> None:
    """Batches of 2 find what one batch does; greedy accuracy is what one at temperature 0 finds, one response each.

    Validation alone trains nothing and saves nothing.
    """
    only = ["trainer.val_only=true", "trainer.val_before_train=false", "trainer.val_generations_to_log=5"]
    sampled = [*only, f"{OVERRIDE}.n=3", "trainer.save_freq=1"]
    plain = validated(*sampled, name="plain")
    parts = validated(*sampled, "data.val_batch_size=2", name="parts")
    with_greedy = validated(*sampled, "trainer.val_greedy=true", name="both")
    [in_one_batch] = plain.metrics
    [in_parts] = parts.metrics
    [beside_greedy] = with_greedy.metrics
    names = [name for name in in_one_batch if name.startswith("val/")]
    assert in_one_batch["step"] == 0
    assert in_one_batch["val/num_samples"] == 15
    assert not any(name.startswith(("actor/", "reward/")) for name in in_one_batch)
    assert list(plain.folder.glob("global_step_*")) == []
    assert plain.rollouts == []
    assert {name: in_one_batch[name] for name in names} == pytest.approx(
        {name: in_parts[name] for name in names}, abs=1e-6
    )
    assert read_lines(plain.folder / "generations.jsonl") == read_lines(parts.folder / "generations.jsonl")
    [greedy] = validated(*only, f"{OVERRIDE}.temperature=0", f"{OVERRIDE}.n=1", name="greedy").metrics
    assert beside_greedy["val/greedy_accuracy"] == greedy["val/accuracy"]
    assert beside_greedy["val/num_greedy_samples"] == 5
    verdicts = {
        row["prompt_id"]: row["greedy_accuracy"] for row in read_lines(with_greedy.folder / "generations.jsonl")
    }
    assert sum(verdicts.values()) / len(verdicts) == beside_greedy["val/greedy_accuracy"]
    assert {name: beside_greedy[name] for name in names} == {name: in_one_batch[name] for name in names}
    assert "val/greedy_accuracy" not in in_one_batch


def test_black_images_and_headroom_stand_beside_the_accuracy(
    validated: Train, caplog: pytest.LogCaptureFixture
) -> None:
    """The blind responses are to black images of the same sizes, with the same seeds; a text has none to blacken.

    Headroom: the problems that one of 3 samples solves, less those that the greedy response solves, of 5.
    """
    asked_requests: list[Any] = []

    def note(requests: Any, *_: Any) -> None:
        asked_requests.append(list(requests))

    only = ["trainer.val_only=true", "trainer.val_before_train=false", "trainer.val_generations_to_log=5"]
    settings = [*only, f"{OVERRIDE}.n=3", "trainer.val_blind=true", "trainer.val_greedy=true"]
    finished = validated(*settings, prepare=noting("backend.generate", note))
    [row] = finished.metrics
    seen, greedy, blind = asked_requests
    for request, blind_request in zip(seen, blind, strict=True):
        assert request.seed == blind_request.seed
        assert request.prompt_ids == blind_request.prompt_ids
        assert [image.size for image in request.images] == [image.size for image in blind_request.images]
        assert request.images[0].getextrema() != blind_request.images[0].getextrema() == ((0, 0),) * 3
    assert row["val/num_blind_samples"] == row["val/num_samples"] == 15
    assert 0.0 <= row["val/blind_accuracy"] <= 1.0
    samples_of: dict[str, list[dict[str, Any]]] = {}
    for sample in read_lines(finished.folder / "generations.jsonl"):
        samples_of.setdefault(sample["prompt_id"], []).append(sample)
    headroom = 0.0
    for samples in samples_of.values():
        is_solved = max(sample["accuracy"] for sample in samples)
        headroom += is_solved - samples[0]["greedy_accuracy"]
    assert row["val/headroom"] == pytest.approx(headroom / 5)
    assert "no meaning" not in caplog.text
    assert len(greedy) == 5


def test_a_run_on_texts_says_that_blind_has_no_meaning(
    validated: Train, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    texts = write_pictured(tmp_path / "texts.parquet", [([], f"What is {number}?", str(number)) for number in range(4)])
    only = ["trainer.val_only=true", "trainer.val_before_train=false", f"data.val_files={texts}"]
    [row] = validated(*only, "trainer.val_blind=true").metrics
    assert "trainer.val_blind has no meaning here: no validated problem has an image" in caplog.text
    assert not any("blind" in name for name in row)
