"""Methods that the definitions make equal give equal weights, bit for bit, and work that is not needed is not done."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from training_runs import EVERY_WRONG_ROLLOUT_TEACHES, FinishedRun, differing, run

from cepo.data.batch import ScoringRow
from cepo.rewards.answers import extract_answer
from cepo.trainer.loop import Trainer

pytestmark = pytest.mark.heavy

ROW_BY_ROW = [
    "worker.actor.padding_free=false",
    "worker.actor.dynamic_batching=false",
    "worker.actor.micro_batch_size_per_device_for_update=1",
    "worker.actor.micro_batch_size_per_device_for_experience=1",
]
"""Then a row's numbers do not depend on which other rows get a pass."""


def counting(teacher_rows: list[int]) -> Callable[[Trainer], None]:
    """Notes the number of rows that every pass scores behind another context than the student's."""

    def prepare(trainer: Trainer) -> None:
        score, decode = trainer.backend.score, trainer.processing.decode

        def counted(rows: Sequence[ScoringRow], **options: Any) -> list[Tensor]:
            taught = sum("Here is a sample answer" in decode(row.context.token_ids) for row in rows)
            teacher_rows.extend([taught] if taught else [])
            return score(rows, **options)

        trainer.backend.score = counted  # type: ignore[method-assign]

    return prepare


def dense(trainer: Trainer) -> None:
    """Every row gets every pass."""
    trainer.estimator.live_rows = lambda rewards, group_ids: torch.ones(len(rewards), dtype=torch.bool)  # type: ignore[method-assign]


def total(finished: FinishedRun, name: str) -> float:
    return sum(row[name] for row in finished.metrics)


def test_cepo_with_lambda_0_is_grpo_without_a_teacher_pass(tiny_run: list[str], tmp_path: Path) -> None:
    """The weights are equal bit for bit after 2 steps."""
    passes: dict[str, list[int]] = {"none": [], "some": []}
    cepo = [*tiny_run, "algorithm.adv_estimator=cepo", EVERY_WRONG_ROLLOUT_TEACHES]
    grpo = run(tiny_run, "algorithm.adv_estimator=grpo", folder=tmp_path / "grpo")
    without = run(cepo, "algorithm.weight.lambda_init=0", folder=tmp_path / "without", prepare=counting(passes["none"]))
    assert differing(grpo.parameters, without.parameters) == []
    assert passes["none"] == []
    assert [row["work/teacher_rows"] for row in without.metrics] == [0, 0]
    assert [row["evidence/lambda"] for row in without.metrics] == [0, 0]
    with_evidence = run(cepo, folder=tmp_path / "with", prepare=counting(passes["some"]))
    assert differing(grpo.parameters, with_evidence.parameters) != []
    assert sum(passes["some"]) == total(with_evidence, "work/teacher_rows") >= 16
    for finished in (grpo, with_evidence):
        assert total(finished, "actor/skipped_updates") == 0
        assert 0 < total(finished, "work/live_fraction") < 2  # some groups are flat, so skipping has something to skip


def test_skipping_rows_is_the_dense_computation_bit_for_bit(tiny_run: list[str], tmp_path: Path) -> None:
    options = [*ROW_BY_ROW, "algorithm.adv_estimator=cepo", EVERY_WRONG_ROLLOUT_TEACHES, "trainer.max_steps=1"]
    skipping = run(tiny_run, *options, folder=tmp_path / "skipping")
    everything = run(tiny_run, *options, folder=tmp_path / "dense", prepare=dense)
    assert total(skipping, "work/live_fraction") < total(everything, "work/live_fraction") == 1
    assert total(skipping, "tokens/update") < total(everything, "tokens/update")
    assert differing(skipping.parameters, everything.parameters) == []


def test_cepo_without_wrong_answers_is_rlsd_bit_for_bit(tiny_run: list[str], tmp_path: Path) -> None:
    runs = {
        method: run(tiny_run, f"algorithm.adv_estimator={method}", folder=tmp_path / method)
        for method in ("rlsd", "cepo")
    }
    assert differing(runs["rlsd"].parameters, runs["cepo"].parameters) == []
    # An untrained model boxes nothing: wrong rollouts, but no wrong answer, and no pass for a second teacher.
    assert total(runs["cepo"], "references/wrong_used") == 0
    assert total(runs["cepo"], "references/groups_wrong_unextractable") > 0
    assert total(runs["cepo"], "work/teacher_rows") == total(runs["rlsd"], "work/teacher_rows") > 0
    neutral = run(
        tiny_run, "algorithm.adv_estimator=cepo", "algorithm.negative.fallback=neutral", folder=tmp_path / "n"
    )
    grpo = run(tiny_run, "algorithm.adv_estimator=grpo", folder=tmp_path / "grpo")
    assert differing(neutral.parameters, grpo.parameters) == []
    assert total(neutral, "work/teacher_rows") == 0


def test_the_embedded_model_learns_from_its_groups_wrong_answers(tiny_run: list[str], tmp_path: Path) -> None:
    from cepo.microgeo.world import ASSETS

    if not (ASSETS / "model.safetensors").is_file():
        pytest.skip("cepo/microgeo/assets holds no weights")
    options = [
        f"worker.actor.model.model_path={ASSETS}",
        "worker.reward.reward_function=cepo/rewards/math.py:compute_score",
        "data.max_response_length=64",
        "worker.rollout.n=8",
        "trainer.max_steps=1",
    ]
    finished = run(tiny_run, *options, "algorithm.adv_estimator=cepo", folder=tmp_path)
    contrasted = 0
    for group in finished.rollouts:
        shown = group["rollouts"][0]["references"]
        wrong = shown["wrong"]
        assert shown["correct"] == group["ground_truth"]
        if wrong is not None:
            contrasted += 1
            wrong_answers = [extract_answer(each["response"]) for each in group["rollouts"] if each["accuracy"] < 0.5]
            assert wrong in wrong_answers
            assert wrong != group["ground_truth"]
        for rollout in group["rollouts"]:
            signs = {value > 0 for value in rollout["token_advantages"]}
            assert len(signs) == 1 or not any(rollout["token_advantages"])
    assert contrasted >= 1
    assert finished.metrics[0]["references/wrong_used"] > 0.5
