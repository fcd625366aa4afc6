from __future__ import annotations

import importlib.util
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from training_runs import TWO_TEACHERS, Train, actor_of, around, differing, parameters_of

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


MARKING_REWARD = """
from pathlib import Path

def parity(samples):
    Path(__file__).with_name("a_reward_began").touch()
    return [{"overall": float(sum(map(ord, sample["response"])) % 2 == 0)} for sample in samples]
"""
THREE_STEPS = ["algorithm.adv_estimator=grpo", "trainer.max_steps=3", "worker.actor.optim.lr=3e-3"]
MERGED = ["worker.actor.model.lora.rank=4", "worker.rollout.merge_lora=true"]


def test_rewards_begin_early_and_merged_adapters_are_sampled(train: Train, tmp_path: Path) -> None:
    """With vLLM where it is installed; merged into the weights, an adapter needs no kernels of its. Gaps are below 1e-3."""
    engine = "vllm" if importlib.util.find_spec("vllm") else "transformers"
    (tmp_path / "marking.py").write_text(MARKING_REWARD, encoding="utf-8")
    announced: list[int] = []
    start: dict[str, Any] = {}

    def generate_and_watch(_: Trainer, generate: Any, requests: Any, settings: Any, on_finished: Any) -> Any:
        def watch(index: int, group: Any) -> None:
            announced.append(index)
            begun = time.monotonic()
            while len(announced) == len(requests) and not (tmp_path / "a_reward_began").exists():
                assert time.monotonic() - begun < 300, "no reward began while generation waited for it"
                time.sleep(0.01)
            on_finished(index, group)

        return generate(requests, settings, watch)

    def prepare(trainer: Trainer) -> None:
        backend: Any = trainer.backend
        assert backend.generator_name == engine
        start.update(parameters_of(actor_of(trainer)))
        around("backend.generate", generate_and_watch)(trainer)

    reward = [f"worker.reward.reward_function={tmp_path / 'marking.py'}:parity", f"worker.rollout.name={engine}"]
    finished = train(*THREE_STEPS, *MERGED, *reward, prepare=prepare)
    assert sorted(announced) == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    gaps = [row["rollout/log_prob_gap_mean"] for row in finished.metrics]
    assert len(gaps) == 3
    assert max(gaps) < 1e-3
    assert len(differing(start, finished.parameters)) == len(start)


def test_a_backend_without_announcements_ends_alike(train: Train) -> None:
    def silent(_: Trainer, generate: Any, requests: Any, settings: Any, on_finished: Any = None) -> Any:
        return generate(requests, settings)

    options = ["algorithm.adv_estimator=cepo", "trainer.max_steps=1"]
    early = train(*options)
    late = train(*options, name="late", prepare=around("backend.generate", silent))
    assert len(early.rollouts) == 4
    assert early.rollouts == late.rollouts
    assert not differing(early.parameters, late.parameters)


def test_missed_synchronisations_show_as_a_gap(train: Train) -> None:
    """The gap is above 1e-3."""
    calls: list[int] = []

    def missed(_: Trainer, synchronise: Any) -> None:
        calls.append(1)
        if len(calls) == 1:
            synchronise()

    finished = train(*THREE_STEPS, prepare=around("backend.synchronise_rollout", missed))
    gaps = [row["rollout/log_prob_gap_mean"] for row in finished.metrics]
    assert gaps[0] < 1e-3 < min(gaps[1:])
