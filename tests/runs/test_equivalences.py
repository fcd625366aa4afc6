"""Methods that the definitions make equal give equal weights, bit for bit, and work that is not needed is not done."""

from __future__ import annotations

import pytest
import torch
from training_runs import TWO_TEACHERS, FinishedRun, Train, differing, run

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


def dense(trainer: Trainer) -> None:
    """Every row gets every pass."""
    trainer.estimator.live_rows = lambda rewards, group_ids: torch.ones(len(rewards), dtype=torch.bool)  # type: ignore[method-assign]


@pytest.fixture(scope="module")
def grpo(tiny_run: list[str], tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    return run(tiny_run, "algorithm.adv_estimator=grpo", folder=tmp_path_factory.mktemp("grpo"))


def test_cepo_with_lambda_0_is_grpo_without_a_teacher_pass(grpo: FinishedRun, train: Train) -> None:
    """The weights are equal bit for bit after 2 steps. test_packed_passes.py counts the rows of real teacher passes."""
    without = train(*TWO_TEACHERS, "algorithm.weight.lambda_init=0")
    assert differing(grpo.parameters, without.parameters) == []
    assert [(row["work/teacher_rows"], row["evidence/lambda"]) for row in without.metrics] == [(0, 0), (0, 0)]
    with_evidence = train(*TWO_TEACHERS, name="with")
    assert differing(grpo.parameters, with_evidence.parameters) != []
    assert with_evidence.total("work/teacher_rows") >= 16
    for finished in (grpo, with_evidence):
        assert finished.total("actor/skipped_updates") == 0
        assert 0 < finished.total("work/live_fraction") < 2  # some groups are flat, so skipping has something to skip


def test_skipping_rows_is_the_dense_computation_bit_for_bit(train: Train) -> None:
    options = [*ROW_BY_ROW, *TWO_TEACHERS, "trainer.max_steps=1"]
    skipping = train(*options)
    everything = train(*options, name="dense", prepare=dense)
    assert skipping.total("work/live_fraction") < everything.total("work/live_fraction") == 1
    assert skipping.total("tokens/update") < everything.total("tokens/update")
    assert differing(skipping.parameters, everything.parameters) == []


def test_cepo_without_wrong_answers_is_rlsd_bit_for_bit(grpo: FinishedRun, train: Train) -> None:
    rlsd, cepo = (train(f"algorithm.adv_estimator={method}", name=method) for method in ("rlsd", "cepo"))
    assert differing(rlsd.parameters, cepo.parameters) == []
    # An untrained model boxes nothing: wrong rollouts, but no wrong answer, and no pass for a second teacher.
    assert cepo.total("references/wrong_used") == 0
    assert cepo.total("references/groups_wrong_unextractable") > 0
    assert cepo.total("work/teacher_rows") == rlsd.total("work/teacher_rows") > 0
    neutral = train("algorithm.adv_estimator=cepo", "algorithm.negative.fallback=neutral", name="neutral")
    assert differing(neutral.parameters, grpo.parameters) == []
    assert neutral.total("work/teacher_rows") == 0


def test_the_embedded_model_learns_from_its_groups_wrong_answers(train: Train) -> None:
    from cepo.microgeo.world import ASSETS

    options = [
        "algorithm.adv_estimator=cepo",
        f"worker.actor.model.model_path={ASSETS}",
        "worker.reward.reward_function=cepo/rewards/math.py:compute_score",
        "data.max_response_length=64",
        "worker.rollout.n=8",
        "trainer.max_steps=1",
    ]
    finished = train(*options)
    contrasted = 0
    for group in finished.rollouts:
        shown = group["rollouts"][0]["references"]
        assert shown["correct"] == group["ground_truth"] != shown["wrong"]
        if shown["wrong"] is not None:
            contrasted += 1
            assert shown["wrong"] in [
                extract_answer(each["response"]) for each in group["rollouts"] if each["accuracy"] < 0.5
            ]
        for rollout in group["rollouts"]:
            signs = {value > 0 for value in rollout["token_advantages"]}
            assert len(signs) == 1 or not any(rollout["token_advantages"])
    assert contrasted >= 1
    assert finished.metrics[0]["references/wrong_used"] > 0.5
