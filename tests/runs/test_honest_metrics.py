from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from training_runs import REWARD_FUNCTIONS, TWO_TEACHERS, Train, around, noting

from cepo.data.batch import OptimizerBatch
from cepo.rollout.generator import GenerationRequest
from cepo.trainer.loop import Trainer

pytestmark = pytest.mark.heavy

ONE_STEP = "trainer.max_steps=1"
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
    assert (row["filter/rounds"], row["filter/filled_groups"]) == (rounds, 4)
    assert finished.trainer.state.rounds == rounds
    assert f"online filtering kept 0 of {4 * rounds} groups in {rounds} rounds" in caplog.text
    assert len({request.prompt_ids for request in seen}) <= 8
    assert len({request.seed for request in seen}) == len(seen) == 4 * rounds


def test_the_work_of_a_validation_is_no_part_of_the_steps(once: Train, one_step: Train, problem_file: Path) -> None:
    [plain] = once(ONE_STEP).steps
    settings = ["trainer.val_before_train=true", "trainer.leak_probe_size=8", f"data.val_files={problem_file}"]
    validated = one_step(*settings)
    assert [line["step"] for line in validated.metrics if "val/reward" in line] == [0, 1], "before and at the end"
    [other] = validated.steps
    names = [name for name in plain if name.startswith("work/")]
    assert {"work/tokens_computed", "work/pictures_encoded"} <= set(names)
    assert {name: other[name] for name in names} == {name: plain[name] for name in names}


def test_entropy_and_clip_fraction_do_not_depend_on_the_method(once: Train, one_step: Train) -> None:
    [plain] = once(ONE_STEP).steps
    [other] = one_step("algorithm.adv_estimator=opsd").steps
    assert plain["work/live_fraction"] < other["work/live_fraction"] == 1
    assert plain["rollout/entropy"] == other["rollout/entropy"] > 1
    assert other["actor/live_entropy"] != pytest.approx(plain["actor/live_entropy"], rel=1e-3)
    assert "actor/entropy_loss" not in plain


def test_rows_that_no_reference_is_found_for_get_no_update_pass(one_step: Train) -> None:
    updates: list[OptimizerBatch] = []
    note = noting("backend.update", lambda batches, step: updates.extend(batches))
    [row] = one_step(*WITH_PEERS, NEVER_RIGHT, prepare=note).steps
    assert [len(batch.rows) for batch in updates] == [0, 0]
    assert sum(batch.denominators.num_sequences for batch in updates) == 16
    assert row["distillation/demonstrated_rollouts"] == row["work/live_fraction"] == row["actor/distillation_loss"] == 0


def test_records_show_the_reference_that_each_teacher_read(one_step: Train) -> None:
    finished = one_step(*WITH_PEERS, "algorithm.positive.exclude_self=true")
    several = [group for group in finished.rollouts if sum(one["accuracy"] for one in group["rollouts"]) >= 2]
    assert several
    for group in several:
        right = [index for index, rollout in enumerate(group["rollouts"]) if rollout["accuracy"]]
        shown = [rollout["references"]["correct"] for rollout in group["rollouts"]]
        # The best right one for all but itself, which reads the second.
        assert len(set(shown)) == 2
        assert shown.count(shown[right[0]]) == 1


def test_an_answer_without_room_is_counted_and_gives_no_evidence(one_step: Train) -> None:
    def prepare(trainer: Trainer) -> None:
        longest = max(len(trainer.contexts.student(each).token_ids) for each in trainer.problems)
        trainer.contexts._max_context_length = longest + 1

    finished = one_step("algorithm.adv_estimator=rlsd", prepare=prepare)
    [row] = finished.steps
    assert 0 < row["references/correct_without_room"] < 1  # the shorter prompts have room
    assert row["references/correct_used"] == pytest.approx(1 - row["references/correct_without_room"])
    assert row["references/correct_cut"] == 0
    live = [group for group in finished.rollouts if any(any(one["token_advantages"]) for one in group["rollouts"])]
    untaught = [group for group in live if group["rollouts"][0]["references"]["correct"] is None]
    assert 0 < len(untaught) < len(live)
    assert not any(any(rollout["delta"]) for group in untaught for rollout in group["rollouts"])


def emptied(attribute: str) -> Callable[[Trainer], None]:
    """References that have the attribute are empty."""

    def change(_: Trainer, text: Any, reference: Any) -> str:
        return "" if getattr(reference, attribute) is not None else text(reference)

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
    shown = [(group, group["rollouts"][0]["references"]["wrong"]) for group in finished.rollouts]
    assert any(reference for _, reference in shown)
    for group, reference in shown:
        wrong = [one["response"] for one in group["rollouts"] if one["accuracy"] == 0]
        assert reference is None or reference in [f"{len(response)} characters" for response in wrong]
