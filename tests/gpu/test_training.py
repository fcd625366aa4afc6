"""Two steps of the Geometry3K launcher's configuration: Qwen3-VL-2B's own sizes on a GPU, with random weights."""

from __future__ import annotations

import json
import math
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_places import LOG_PROB_LIMITS, REPOSITORY, Place, weights_of

from cepo.config import check_config, load_config
from cepo.microgeo.world import split_problems, write_problems
from cepo.train import build_trainer
from cepo.workers.worker import Worker

FINITE = ("actor/pg_loss", "actor/grad_norm", "actor/lr", "reward/mean", "response_length/mean", "timing_s/step")


def settings(place: Place, model: Path, folder: Path) -> list[str]:
    """configs/geo3k/cepo.yaml with fewer and shorter responses, and what an untrained model and no network need."""
    train, _ = split_problems(0, 8, 1)
    write_problems(folder / "train.parquet", train)
    return [
        f"config={REPOSITORY}/configs/geo3k/cepo.yaml",
        f"data.train_files={folder / 'train.parquet'}",
        "data.val_files=null",
        f"data.min_pixels={place.min_pixels}",
        f"data.max_response_length={place.response}",
        "data.rollout_batch_size=4",
        f"worker.actor.model.model_path={model}",
        "worker.actor.global_batch_size=4",
        "worker.rollout.name=transformers",
        f"worker.rollout.n={place.samples}",
        f"worker.reward.reward_function={REPOSITORY}/tests/reward_functions.py:parity",
        "algorithm.negative.source=peer_full",
        "trainer.max_steps=2",
        "trainer.val_before_train=false",
        "trainer.val_freq=-1",
        "trainer.save_freq=-1",
        "trainer.logger=[file]",
        f"trainer.save_checkpoint_path={folder / 'run'}",
    ]


def test_two_steps_of_geo3k_with_two_teachers_move_the_adapter(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, figure: Any
) -> None:
    monkeypatch.chdir(REPOSITORY)  # the configuration names its prompt template from there
    config = load_config(settings(place, place.checkpoint(place.whole), tmp_path))
    check_config(config)
    assert config.worker.actor.model.enable_gradient_checkpointing
    assert config.worker.actor.fsdp.mp_param_dtype == config.worker.rollout.dtype == "bf16"
    if place.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    with ExitStack() as stack:
        trainer = build_trainer(config, stack)
        assert isinstance(trainer.backend, Worker)
        actor = trainer.backend.actor
        parameters = sum(parameter.numel() for parameter in actor.module.parameters())
        initial_weights = weights_of(actor)
        trainer.fit()
        trained_weights = weights_of(actor)
        packed = actor.passes.packed
    figure("parameters", parameters)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [json.loads(line) for line in lines]
    assert [step["step"] for step in steps] == [1, 2]
    for number, step in enumerate(steps, start=1):
        assert all(math.isfinite(step[name]) for name in FINITE)
        assert step["work/teacher_rows"] > 0
        assert step["actor/skipped_updates"] == 0
        assert step["actor/grad_norm"] > 0
        assert step["rollout/log_prob_gap_mean"] <= LOG_PROB_LIMITS["bf16"][0]
        assert step["rollout/log_prob_gap_max"] <= LOG_PROB_LIMITS["bf16"][2]
        for name in ("timing_s/step", "rollout/log_prob_gap_mean", "rollout/log_prob_gap_max", "work/tokens_saved"):
            figure(f"step {number} {name}", step[name])
    assert packed, "the packed path gave way to padded rows"
    adapter = [name for name in initial_weights if "lora_B" in name]
    assert adapter
    assert not any(torch.equal(initial_weights[name], trained_weights[name]) for name in adapter)
    assert all(bool(tensor.isfinite().all()) for tensor in trained_weights.values())
    if place.device == "cuda":
        assert parameters > 2.1e9
        peak = figure("peak GiB", torch.cuda.max_memory_allocated() / 2**30)
        assert parameters * 2 / 2**30 < steps[-1]["perf/max_memory_allocated_gb"] <= peak
