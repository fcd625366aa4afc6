"""Which passes a step makes: one for the student and its live teachers, none for log-probs that nothing reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from rounding import GRADIENTS
from test_packed_passes import batch_of, gradient_of, mixed_rows
from torch import Tensor
from training_runs import EVERY_WRONG_ROLLOUT_TEACHES, run

from cepo.algorithms import build_estimator
from cepo.data.batch import OptimizerBatch, ScoringRow
from cepo.models.processing import Processing
from cepo.trainer.loop import Trainer
from cepo.trainer.planning import View, student_rows
from cepo.workers.actor import Actor

ONE_OPTIMIZER_BATCH = ["worker.actor.global_batch_size=4", "trainer.max_steps=1"]
HINT = "Here is a sample answer"


def watched(calls: list[tuple[bool, int, int]]) -> Callable[[Trainer], None]:
    """Notes of every scoring pass whether it was a teacher's, its student rows and its rows with a hint."""

    def prepare(trainer: Trainer) -> None:
        score, decode = trainer.backend.score, trainer.processing.decode

        def noted(rows: Sequence[ScoringRow], *, as_teacher: bool = False, **options: Any) -> list[Tensor]:
            hinted = sum(HINT in decode(row.context.token_ids) for row in rows)
            calls.append((as_teacher, len(rows) - hinted, hinted))
            return score(rows, as_teacher=as_teacher, **options)

        trainer.backend.score = noted  # type: ignore[method-assign]

    return prepare


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("options", "student_rows_scored", "hinted"),
    [
        (["algorithm.adv_estimator=grpo"], False, False),
        (["algorithm.adv_estimator=cepo", EVERY_WRONG_ROLLOUT_TEACHES], False, True),
        (["algorithm.adv_estimator=rlsd"], True, True),
        (["algorithm.adv_estimator=opsd"], True, True),
    ],
)
def test_one_batch_and_live_teachers_take_one_scoring_pass(
    tiny_run: list[str], tmp_path: Path, options: list[str], student_rows_scored: bool, hinted: bool
) -> None:
    calls: list[tuple[bool, int, int]] = []
    finished = run(tiny_run, *ONE_OPTIMIZER_BATCH, *options, folder=tmp_path, prepare=watched(calls))
    (row,) = finished.metrics
    assert len(calls) == int(hinted)
    assert all(not as_teacher and (num_student > 0) == student_rows_scored for as_teacher, num_student, _ in calls)
    assert sum(number for _, _, number in calls) == row.get("work/teacher_rows", 0)
    assert (row["work/scored_fraction"] > 0) == student_rows_scored
    assert row["rollout/log_prob_gap_max"] < 1e-4  # compared in the update where nothing scored the student
    assert 0 < row["work/tokens_saved"] < 1


@pytest.mark.heavy
def test_of_two_optimizer_batches_only_the_second_is_scored(tiny_run: list[str], tmp_path: Path) -> None:
    options = ["algorithm.adv_estimator=grpo", "trainer.max_steps=1"]
    everything = ["worker.actor.ppo_epochs=2"]
    for folder, extra, first in (("one", [], 8), ("two", everything, 0)):
        calls: list[tuple[bool, int, int]] = []
        updates: list[OptimizerBatch] = []

        def prepare(trainer: Trainer, calls: list[Any] = calls, updates: list[OptimizerBatch] = updates) -> None:
            watched(calls)(trainer)
            update = trainer.backend.update

            def noted(batches: Sequence[OptimizerBatch], *, step: int) -> Any:
                updates.extend(batches)
                return update(batches, step=step)

            trainer.backend.update = noted  # type: ignore[method-assign]

        run(tiny_run, *options, *extra, folder=tmp_path / folder, prepare=prepare)
        (counted,) = calls
        distinct = updates[:2]
        assert [batch.on_policy for batch in distinct] == [first > 0, False]
        assert counted[1] == sum(len(batch.rows) for batch in distinct if not batch.on_policy) > 0


@pytest.mark.heavy
def test_teachers_with_other_weights_take_a_pass_of_their_own(tiny_run: list[str], tmp_path: Path) -> None:
    calls: list[tuple[bool, int, int]] = []
    options = ["algorithm.adv_estimator=rlsd", "algorithm.teacher.source=reference"]
    run(tiny_run, *ONE_OPTIMIZER_BATCH, *options, folder=tmp_path, prepare=watched(calls))
    assert [(as_teacher, hinted > 0) for as_teacher, _, hinted in calls] == [(False, False), (True, True)]


@pytest.mark.heavy
def test_kept_states_are_those_of_their_rows(tiny_run: list[str], tmp_path: Path) -> None:
    lengths: list[tuple[int, int]] = []

    def prepare(trainer: Trainer) -> None:
        backend: Any = trainer.backend
        update = backend.update

        def noted(batches: Sequence[OptimizerBatch], *, step: int) -> Any:
            rows = [row for batch in batches for row in batch.rows]
            kept = backend.actor.kept._views
            assert set(kept) == {"correct"}
            assert set(kept["correct"].states) == {row.row for row in rows}  # the student's rows keep none
            lengths.extend((len(row.response_ids), len(kept["correct"].states[row.row])) for row in rows)
            return update(batches, step=step)

        backend.update = noted

    run(tiny_run, *ONE_OPTIMIZER_BATCH, "algorithm.adv_estimator=opsd", folder=tmp_path, prepare=prepare)
    assert len(lengths) == 16
    assert all(length == kept for length, kept in lengths)


@pytest.mark.heavy
def test_an_on_policy_batch_has_the_gradient_of_a_scored_one(
    build_actor: Callable[..., Actor], tiny_processing: Processing
) -> None:
    actor = build_actor(max_grad_norm="1e9")
    rows = mixed_rows(tiny_processing, num_contexts=1, size=4)
    batch = batch_of(rows)
    scored = batch.old_log_probs.clone()
    scored[batch.response_mask] = torch.cat(actor.score(rows))
    expected = gradient_of(actor, OptimizerBatch(**{**vars(batch), "old_log_probs": scored}))
    found = gradient_of(actor, OptimizerBatch(**{**vars(batch), "on_policy": True}))
    assert float((found - expected).norm() / expected.norm()) < GRADIENTS
    assert float((gradient_of(actor, batch) - expected).norm() / expected.norm()) > 0.1  # old log-probs matter


def test_only_rows_set_against_the_student_are_scored() -> None:
    live = torch.tensor([True, True, True, True, False, True])
    on_policy = torch.tensor([True] * 5 + [False])

    def view(name: str, *texts: str | None) -> View:
        return View(name=name, references=list(texts), rows={})

    correct = view("correct", "3", "3", "3", None, "3", None)
    wrong = view("wrong", "4", "4", None, None, None, None)
    contrastive, one_sided, plain = (build_estimator(name) for name in ("cepo", "rlsd", "grpo"))
    assert student_rows(live, on_policy, contrastive, [correct, wrong], every=False) == [2, 5]
    assert student_rows(live, on_policy, one_sided, [correct], every=False) == [0, 1, 2, 5]
    assert student_rows(live, on_policy, plain, [], every=False) == [5]
    assert student_rows(live, on_policy, plain, [], every=True) == [0, 1, 2, 3, 5]
