"""Methods that the definitions make equal give equal weights, bit for bit, and work that is not needed is not done."""

from __future__ import annotations

import pytest
import torch
from training_runs import TWO_TEACHERS, Train, differing

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


def test_methods_that_the_definitions_make_equal_give_equal_bits(train: Train) -> None:
    """After 2 steps; test_packed_passes.py counts the rows of real teacher passes."""
    grpo, rlsd, cepo = (train(f"algorithm.adv_estimator={method}", name=method) for method in ("grpo", "rlsd", "cepo"))
    without = train(*TWO_TEACHERS, "algorithm.weight.lambda_init=0", name="without")
    assert differing(grpo.parameters, without.parameters) == []
    assert [(row["work/teacher_rows"], row["evidence/lambda"]) for row in without.metrics] == [(0, 0), (0, 0)]
    with_evidence = train(*TWO_TEACHERS, name="with")
    assert differing(grpo.parameters, with_evidence.parameters) != []
    assert with_evidence.total("work/teacher_rows") >= 16
    for finished in (grpo, with_evidence):
        assert finished.total("actor/skipped_updates") == 0
        assert 0 < finished.total("work/live_fraction") < 2  # some groups are flat, so skipping has something to skip
    # An untrained model boxes nothing: wrong rollouts, but no wrong answer, and no pass for a second teacher.
    assert differing(rlsd.parameters, cepo.parameters) == []
    assert cepo.total("references/wrong_used") == 0
    assert cepo.total("references/groups_wrong_unextractable") > 0
    assert cepo.total("work/teacher_rows") == rlsd.total("work/teacher_rows") > 0
    neutral = train("algorithm.adv_estimator=cepo", "algorithm.negative.fallback=neutral", name="neutral")
    assert differing(neutral.parameters, grpo.parameters) == []
    assert neutral.total("work/teacher_rows") == 0


def test_skipping_rows_is_the_dense_computation_bit_for_bit(train: Train) -> None:
    options = [*ROW_BY_ROW, *TWO_TEACHERS, "trainer.max_steps=1"]
    skipping = train(*options)
    everything = train(*options, name="dense", prepare=dense)
    assert skipping.total("work/live_fraction") < everything.total("work/live_fraction") == 1
    assert skipping.total("tokens/update") < everything.total("tokens/update")
    assert differing(skipping.parameters, everything.parameters) == []
