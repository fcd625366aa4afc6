"""Whole runs of methods: their own switches, which are equal by definition, what happens when, and how few files they need."""

from __future__ import annotations

import importlib.util
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from actors import differing
from training_runs import (
    ONE_STEP,
    REPOSITORY,
    TWO_TEACHERS,
    Train,
    actor_of,
    around,
    parameters_of,
)

from cepo.trainer.loop import Trainer

pytestmark = pytest.mark.heavy


def test_a_fifth_of_the_tokens_learns_by_entropy(train: Train) -> None:
    """All rows of opsd learn; cut responses, most of an untrained model's, do not."""
    settings = ["algorithm.adv_estimator=opsd", "algorithm.top_entropy=0.2", ONE_STEP]
    [row] = train(*settings).metrics
    assert row["rollout/learning_tokens"] == pytest.approx(0.2, abs=0.01)
    assert row["rollout/vocabulary_entropy"] > 1.0
    assert row["actor/grad_norm"] > 0
    [filtered] = train(*settings, "algorithm.overlong_filter=true", name="filtered").metrics
    assert filtered["work/live_fraction"] < row["work/live_fraction"]


def test_an_adaptive_coefficient_moves_and_survives_a_resume(train: Train) -> None:
    settings = [
        f"algorithm.{setting}" for setting in ("disable_kl=false", "kl_type=adaptive", "kl_coef=0.1", "kl_horizon=160")
    ]
    train(*settings, "trainer.save_freq=1", ONE_STEP)
    resumed = train(*settings, "trainer.save_freq=1", "trainer.max_steps=2")
    coefficients = [row["critic/kl_coef"] for row in resumed.steps]
    # The KL of the first step is 0, so the error is cut at -0.2; 16 sequences of a horizon of 160 make that -2 %.
    assert coefficients == pytest.approx([0.1, 0.1 * (1 - 0.2 * 16 / 160)])


def test_the_critic_alone_is_trained_during_its_warm_up(train: Train) -> None:
    initial_weights: dict[str, Any] = {}

    def remember(trainer: Trainer) -> None:
        initial_weights.update(parameters_of(actor_of(trainer)))

    frozen = ["worker.actor.model.freeze_vision_tower=true", "worker.actor.ppo_epochs=2"]
    finished = train("algorithm.adv_estimator=gae", "trainer.critic_warmup=2", *frozen, prepare=remember)
    assert differing(initial_weights, finished.parameters) == []
    assert finished.actor.module.encoder._known == {}, "features of a step's images are freed at its end"
    assert all("critic/vf_loss" in row for row in finished.steps)


ROW_BY_ROW = [
    "worker.actor.padding_free=false",
    "worker.actor.dynamic_batching=false",
    "worker.actor.micro_batch_size_per_device_for_update=1",
    "worker.actor.micro_batch_size_per_device_for_experience=1",
]
"""Then a row's numbers do not depend on which other rows get a pass."""


def dense(trainer: Trainer) -> None:
    """Every row gets every pass."""
    trainer.estimator.live_rows = lambda rewards, group_ids, has_reference: torch.ones(len(rewards), dtype=torch.bool)  # type: ignore[method-assign]


def test_methods_that_the_definitions_make_equal_give_equal_bits(once: Train) -> None:
    """After 2 steps; test_packed_passes.py counts the rows of real teacher passes."""
    grpo = once("algorithm.adv_estimator=grpo")
    rlsd = once("algorithm.adv_estimator=rlsd")
    cepo = once("algorithm.adv_estimator=cepo")
    without = once(*TWO_TEACHERS, "algorithm.weight.lambda_init=0")
    assert differing(grpo.parameters, without.parameters) == []
    assert [(row["work/teacher_rows"], row["evidence/lambda"]) for row in without.metrics] == [(0, 0), (0, 0)]
    with_evidence = once(*TWO_TEACHERS)
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
    neutral = once("algorithm.adv_estimator=cepo", "algorithm.negative.fallback=neutral")
    assert differing(neutral.parameters, grpo.parameters) == []
    assert neutral.total("work/teacher_rows") == 0


def test_skipping_rows_is_the_dense_computation_bit_for_bit(train: Train) -> None:
    options = [*ROW_BY_ROW, *TWO_TEACHERS, ONE_STEP]
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


def test_a_backend_without_announcements_ends_alike(once: Train, train: Train) -> None:
    def silent(_: Trainer, generate: Any, requests: Any, settings: Any, on_finished: Any = None) -> Any:
        return generate(requests, settings)

    options = ["algorithm.adv_estimator=cepo", ONE_STEP]
    early = once(*options)
    late = train(*options, prepare=around("backend.generate", silent))
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


OTHER_ROOMS = {
    "commands",
    "config",
    "credit",
    "doctor",
    "evaluation",
    "integrations",
    "report",
    "run_folder",
}
"""Rooms that a prompt does not pass on its way from its row to the gradient of its loss."""


def test_a_prompt_passes_no_room_of_another_subject(train: Train) -> None:
    """From its row to the gradient of its loss, in a step of the method of the paper on one device.

    A file counts if one of its functions runs in the trainer's thread between the first call of `Trainer.sample` and the end
    of the first update.
    """
    files: set[str] = set()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and frame.f_code.co_name != "<module>" and path.is_relative_to(REPOSITORY / "cepo"):
            files.add(str(path.relative_to(REPOSITORY / "cepo")))

    def first(_: Trainer, sample: Any, step: int) -> Any:
        sys.setprofile(note)
        return sample(step)

    def last(_: Trainer, update: Any, *arguments: Any) -> Any:
        try:
            return update(*arguments)
        finally:
            sys.setprofile(None)

    def prepare(trainer: Trainer) -> None:
        around("sample", first)(trainer)
        around("update", last)(trainer)

    train(*TWO_TEACHERS, ONE_STEP, prepare=prepare)
    assert {"data/dataset.py", "trainer/loop.py", "losses/objective.py"} <= files
    rooms = {file.partition("/")[0] for file in files}
    assert not rooms & OTHER_ROOMS, sorted(files)
