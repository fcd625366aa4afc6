"""The engine samples from the weights that the trainer scores with, and rewards begin while others are still generated."""

from __future__ import annotations

import importlib.util
import time
from pathlib import Path
from typing import Any

import pytest
from training_runs import Train, actor_of, around, differing, parameters_of

from cepo.trainer.loop import Trainer

pytestmark = pytest.mark.heavy

MARKING_REWARD = """
from pathlib import Path

def parity(samples):
    Path(__file__).with_name("a_reward_began").touch()
    verdicts = [float(sum(map(ord, sample["response"])) % 2 == 0) for sample in samples]
    return [{"overall": verdict, "accuracy": verdict} for verdict in verdicts]
"""
THREE_STEPS = ["algorithm.adv_estimator=grpo", "trainer.max_steps=3", "worker.actor.optim.lr=3e-3"]


def wait_until_there(file: Path) -> None:
    start = time.monotonic()
    while not file.exists():
        assert time.monotonic() - start < 300, f"{file.name} was not made while generation waited for it"
        time.sleep(0.01)


def test_the_first_reward_begins_before_generation_ends(train: Train, tmp_path: Path) -> None:
    engine = "vllm" if importlib.util.find_spec("vllm") else "transformers"
    (tmp_path / "marking.py").write_text(MARKING_REWARD, encoding="utf-8")
    announced: list[int] = []

    def generate_and_watch(_: Trainer, generate: Any, requests: Any, settings: Any, on_finished: Any) -> Any:
        def watch(index: int, group: Any) -> None:
            announced.append(index)
            if len(announced) == len(requests):
                wait_until_there(tmp_path / "a_reward_began")
            on_finished(index, group)

        return generate(requests, settings, watch)

    reward = [f"worker.reward.reward_function={tmp_path / 'marking.py'}:parity", f"worker.rollout.name={engine}"]
    prepare = around("backend.generate", generate_and_watch)
    finished = train("algorithm.adv_estimator=grpo", "trainer.max_steps=1", *reward, prepare=prepare)
    assert sorted(announced) == [0, 1, 2, 3]
    assert 0 < finished.metrics[0]["work/rollout_prefix_hits"] <= 3 / 4


def test_a_backend_without_announcements_ends_alike(train: Train) -> None:
    def silent(_: Trainer, generate: Any, requests: Any, settings: Any, on_finished: Any = None) -> Any:
        return generate(requests, settings)

    options = ["algorithm.adv_estimator=cepo", "trainer.max_steps=1"]
    early = train(*options)
    late = train(*options, name="late", prepare=around("backend.generate", silent))
    assert len(early.rollouts) == 4
    assert early.rollouts == late.rollouts
    assert [row["reward/mean"] for row in early.metrics] == [row["reward/mean"] for row in late.metrics]
    assert not differing(early.parameters, late.parameters)


def test_vllm_and_the_trainer_agree_to_1e_3_at_each_of_3_steps(train: Train) -> None:
    """Merged into the weights, an adapter needs no kernels of vLLM's. `test_families` has an adapter apart and all weights."""
    pytest.importorskip("vllm", reason="vLLM is not installed")
    start: dict[str, Any] = {}

    def prepare(trainer: Trainer) -> None:
        engine: Any = trainer.backend
        assert engine.generator_name == "vllm"
        assert engine.generator._settings.lora_rank == 0
        start.update(parameters_of(actor_of(trainer)))

    merged = ["worker.rollout.name=vllm", "worker.actor.model.lora.rank=4", "worker.rollout.merge_lora=true"]
    finished = train(*THREE_STEPS, *merged, prepare=prepare)
    gaps = [row["rollout/log_prob_gap_mean"] for row in finished.metrics]
    assert len(gaps) == 3
    assert max(gaps) < 1e-3
    assert len(differing(start, finished.parameters)) == len(start)


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
