"""The engine samples from the weights that the trainer scores with, after every synchronisation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from training_runs import differing, run

from cepo.trainer.loop import Trainer

pytestmark = pytest.mark.heavy

THREE_STEPS = ["algorithm.adv_estimator=grpo", "trainer.max_steps=3", "worker.actor.optim.lr=3e-3"]


def test_vllm_and_the_trainer_agree_to_1e_3_at_each_of_3_steps(tiny_run: list[str], tmp_path: Path) -> None:
    """Merged into the weights, an adapter needs no kernels of vLLM's. `test_families` has an adapter apart and all weights."""
    pytest.importorskip("vllm", reason="vLLM is not installed")
    start: dict[str, object] = {}

    def prepare(trainer: Trainer) -> None:
        from training_runs import actor_of, parameters_of

        assert trainer.backend.generator_name == "vllm"
        engine: Any = trainer.backend
        engine = engine.generator
        assert engine._settings.lora_rank == 0
        start.update(parameters_of(actor_of(trainer)))

    merged = ["worker.rollout.name=vllm", "worker.actor.model.lora.rank=4", "worker.rollout.merge_lora=true"]
    finished = run(tiny_run, *THREE_STEPS, *merged, folder=tmp_path, prepare=prepare)
    gaps = [row["rollout/log_prob_gap_mean"] for row in finished.metrics]
    assert len(gaps) == 3
    assert max(gaps) < 1e-3
    moved = differing(start, finished.parameters)  # type: ignore[arg-type]
    assert len(moved) == len(start)


def test_missed_synchronisations_show_as_a_gap(tiny_run: list[str], tmp_path: Path) -> None:
    """The gap is above 1e-3."""

    def prepare(trainer: Trainer) -> None:
        synchronise = trainer.backend.synchronise_rollout
        calls = iter([synchronise, *[lambda: None] * 3])
        trainer.backend.synchronise_rollout = lambda: next(calls)()  # type: ignore[method-assign]

    finished = run(tiny_run, *THREE_STEPS, folder=tmp_path, prepare=prepare)
    gaps = [row["rollout/log_prob_gap_mean"] for row in finished.metrics]
    assert gaps[0] < 1e-3 < min(gaps[1:])
