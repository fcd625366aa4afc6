"""Metrics that count what they say: the same rows under each method, no work of a validation, no reference that nobody read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from training_runs import FinishedRun, run

from cepo.data.batch import OptimizerBatch
from cepo.rollout.generator import GenerationRequest
from cepo.trainer.loop import Trainer

pytestmark = pytest.mark.heavy

ONE_STEP = ["trainer.max_steps=1"]


@pytest.fixture(scope="module")
def never_right(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("reward") / "never.py"
    file.write_text("def compute_score(samples):\n    return [{'overall': 0.0, 'accuracy': 0.0} for _ in samples]\n")
    return f"worker.reward.reward_function={file}:compute_score"


@pytest.fixture(scope="module")
def plain(tiny_run: list[str], tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    return run(tiny_run, *ONE_STEP, folder=tmp_path_factory.mktemp("plain"))


def step_row(finished: FinishedRun) -> dict[str, Any]:
    (row,) = (row for row in finished.metrics if "reward/mean" in row)
    return row


def asked(requests_seen: list[GenerationRequest]) -> Callable[[Trainer], None]:
    def prepare(trainer: Trainer) -> None:
        generate = trainer.backend.generate

        def noted(requests: Sequence[GenerationRequest], *arguments: Any) -> Any:
            requests_seen.extend(requests)
            return generate(requests, *arguments)

        trainer.backend.generate = noted  # type: ignore[method-assign]

    return prepare


def test_a_problem_asked_again_within_a_step_gets_other_noise(
    tiny_run: list[str], never_right: str, tmp_path: Path
) -> None:
    seen: list[GenerationRequest] = []
    settings = ["algorithm.online_filtering=true", "trainer.max_try_make_batch=6", never_right, *ONE_STEP]
    run(tiny_run, *settings, folder=tmp_path, prepare=asked(seen))
    # 6 rounds of 4 of the 8 problems: each is asked three times.
    assert len(seen) == 24
    assert len({request.prompt_ids for request in seen}) <= 8
    assert len({request.seed for request in seen}) == 24


def test_unlimited_rounds_end_where_no_problem_is_mixed(
    tiny_run: list[str], never_right: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = ["algorithm.online_filtering=true", "trainer.max_try_make_batch=0", never_right, *ONE_STEP]
    row = step_row(run(tiny_run, *settings, folder=tmp_path))
    assert (row["filter/rounds"], row["filter/filled_groups"]) == (6, 4)
    assert "online filtering kept 0 of 24 groups in 6 rounds" in caplog.text


def test_the_work_of_a_validation_is_no_part_of_the_steps(
    plain: FinishedRun, tiny_run: list[str], problem_file: Path, tmp_path: Path
) -> None:
    settings = ["trainer.val_before_train=true", "trainer.leak_probe_size=8", f"data.val_files={problem_file}"]
    validated = run(tiny_run, *settings, *ONE_STEP, folder=tmp_path)
    assert [line["step"] for line in validated.metrics if "val/reward" in line] == [0, 1], "before and at the end"
    row, other = step_row(plain), step_row(validated)
    names = [name for name in row if name.startswith("work/")]
    assert {"work/tokens_computed", "work/pictures_encoded", "work/rollout_prefix_hits"} <= set(names)
    assert {name: other[name] for name in names} == {name: row[name] for name in names}


def test_entropy_and_clip_fraction_do_not_depend_on_the_method(
    plain: FinishedRun, tiny_run: list[str], tmp_path: Path
) -> None:
    distilled = run(tiny_run, *ONE_STEP, "algorithm.adv_estimator=opsd", folder=tmp_path)
    row, other = step_row(plain), step_row(distilled)
    assert row["work/live_fraction"] < other["work/live_fraction"] == 1
    assert row["rollout/entropy"] == other["rollout/entropy"] > 1
    assert other["actor/live_entropy"] != pytest.approx(row["actor/live_entropy"], rel=1e-3)
    assert "actor/entropy_loss" not in row


def test_engines_are_compared_at_another_temperature_too(tiny_run: list[str], tmp_path: Path) -> None:
    finished = run(tiny_run, "worker.rollout.temperature=1.3", folder=tmp_path)
    gaps = [row["rollout/log_prob_gap_max"] for row in finished.metrics if "reward/mean" in row]
    assert len(gaps) == 2
    assert 0 < max(gaps) < 1e-4


def test_rows_that_no_reference_is_found_for_get_no_update_pass(
    tiny_run: list[str], never_right: str, tmp_path: Path
) -> None:
    updates: list[OptimizerBatch] = []

    def prepare(trainer: Trainer) -> None:
        update = trainer.backend.update

        def noted(batches: Sequence[OptimizerBatch], *, step: int) -> Any:
            updates.extend(batches)
            return update(batches, step=step)

        trainer.backend.update = noted  # type: ignore[method-assign]

    settings = ["algorithm.adv_estimator=sdpo", "algorithm.positive.source=peer_full", never_right, *ONE_STEP]
    row = step_row(run(tiny_run, *settings, folder=tmp_path, prepare=prepare))
    assert [len(batch.rows) for batch in updates] == [0, 0]
    assert sum(batch.denominators.num_sequences for batch in updates) == 16
    assert row["distillation/demonstrated_rollouts"] == row["work/live_fraction"] == row["actor/distillation_loss"] == 0


def test_records_show_the_reference_that_each_teacher_read(tiny_run: list[str], tmp_path: Path) -> None:
    options = ["algorithm.adv_estimator=sdpo", "algorithm.positive.source=peer_full"]
    finished = run(tiny_run, *options, "algorithm.positive.exclude_self=true", *ONE_STEP, folder=tmp_path)
    several = [group for group in finished.rollouts if sum(one["accuracy"] for one in group["rollouts"]) >= 2]
    assert several
    for group in several:
        right = [index for index, rollout in enumerate(group["rollouts"]) if rollout["accuracy"]]
        shown = [rollout["references"]["correct"] for rollout in group["rollouts"]]
        # The best right one for all but itself, which reads the second.
        assert len(set(shown)) == 2
        assert shown.count(shown[right[0]]) == 1


def test_an_answer_without_room_is_counted_and_gives_no_evidence(tiny_run: list[str], tmp_path: Path) -> None:
    def prepare(trainer: Trainer) -> None:
        longest = max(len(trainer.contexts.student(each).token_ids) for each in trainer.problems)
        trainer.contexts._max_context_length = longest + 1

    settings = ["algorithm.adv_estimator=rlsd", "trainer.rollouts_to_log=4", *ONE_STEP]
    finished = run(tiny_run, *settings, folder=tmp_path, prepare=prepare)
    row = step_row(finished)
    assert 0 < row["references/correct_without_room"] < 1  # the shorter prompts have room
    assert row["references/correct_used"] == pytest.approx(1 - row["references/correct_without_room"])
    assert row["references/correct_cut"] == 0
    live = [group for group in finished.rollouts if any(any(one["token_advantages"]) for one in group["rollouts"])]
    untaught = [group for group in live if group["rollouts"][0]["references"]["correct"] is None]
    assert 0 < len(untaught) < len(live)
    assert not any(any(rollout["delta"]) for group in untaught for rollout in group["rollouts"])


@pytest.mark.parametrize(("fallback", "taught"), [("student", True), ("neutral", False)])
def test_an_emptied_wrong_side_is_as_if_there_were_none(
    tiny_run: list[str], tmp_path: Path, fallback: str, taught: bool
) -> None:
    """And a right one leaves no evidence at all, whatever the wrong side shows."""

    def emptied(side: str) -> Callable[[Trainer], None]:
        def prepare(trainer: Trainer) -> None:
            contexts = trainer.contexts
            text = contexts.reference_text
            is_right = "text" if side == "correct" else "token_ids"
            contexts.reference_text = lambda reference: (  # type: ignore[method-assign]
                "" if getattr(reference, is_right) is not None else text(reference)
            )

        return prepare

    settings = ["algorithm.adv_estimator=cepo", "algorithm.negative.source=peer_full", *ONE_STEP]
    settings += [f"algorithm.negative.fallback={fallback}"]
    rows = {
        side: step_row(run(tiny_run, *settings, folder=tmp_path / side, prepare=emptied(side)))
        for side in ("correct", "wrong")
    }
    assert rows["wrong"]["references/wrong_empty"] == rows["correct"]["references/correct_empty"] == 1.0
    assert rows["wrong"]["references/wrong_used"] == 0.0
    assert (rows["wrong"]["work/teacher_rows"] > 0) == taught
    assert rows["correct"]["work/teacher_rows"] == 0
    assert rows["correct"]["evidence/positive_fraction"] == rows["correct"]["evidence/negative_fraction"] == 0.0


def test_the_users_answers_are_what_teachers_read(tiny_run: list[str], tmp_path: Path) -> None:
    """A random model writes no box: without the user's function no response has an answer, and a warning says so."""
    file = tmp_path / "lengths.py"
    file.write_text("def by_length(response):\n    return f'{len(response)} characters'\n")
    reward = tmp_path / "even.py"
    reward.write_text(
        "def compute_score(samples):\n"
        "    return [{'overall': float(i % 2), 'read': float('extracted_answer' in one)} for i, one in enumerate(samples)]\n"
    )
    settings = ["algorithm.adv_estimator=cepo", f"worker.reward.reward_function={reward}:compute_score", *ONE_STEP]
    settings += ["trainer.rollouts_to_log=4"]
    own = f"worker.reward.answer_function={file}:by_length"
    finished = run(tiny_run, *settings, own, folder=tmp_path / "own")
    row = step_row(finished)
    assert row["references/responses_without_answer"] == 0
    assert row["reward/read"] == 1
    shown = [(group, group["rollouts"][0]["references"]["wrong"]) for group in finished.rollouts]
    assert any(reference for _, reference in shown)
    for group, reference in shown:
        wrong = [one["response"] for one in group["rollouts"] if one["accuracy"] == 0]
        assert reference is None or reference in [f"{len(response)} characters" for response in wrong]
