"""A run that cannot fit on its GPU ends before a model is loaded, and says which setting would fit."""

from __future__ import annotations

import dataclasses
import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fake_machine import REPOSITORY, card, fake_machine

from cepo.config import RunConfig, load_config
from cepo.sizing.phases import Demand
from cepo.workers import worker
from cepo.workers.worker import WorkerFacts

GIB = 2**30
DEMAND = Demand(loaded=5 * GIB, kept=2 * GIB, certain=8 * GIB, bound=12 * GIB, engine=6 * GIB)


@pytest.mark.heavy
def test_training_on_a_gpu_of_40_mb_ends_with_code_2(tmp_path: Path) -> None:
    """It ends before anything is written."""
    small = card("a small card", (9, 0), 0.04) | {"free": 39_000_000}
    command = [
        sys.executable, "-m", "cepo.train", f"config={REPOSITORY}/configs/microgeo/quickstart.yaml",
        f"trainer.save_checkpoint_path={tmp_path / 'run'}", "worker.actor.model.lora.rank=0", "worker.rollout.name=vllm",
    ]  # fmt: skip
    done = subprocess.run(
        command, cwd=tmp_path, env=fake_machine(small), capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 2, done.stderr
    message = done.stderr.splitlines()[-1]
    assert "the run does not fit on this GPU (37 MiB of 38 MiB are free)" in message
    assert "while responses are sampled" in message
    assert "use more devices (trainer.n_gpus_per_node)" in message
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def decides(
    monkeypatch: pytest.MonkeyPatch, config: RunConfig, *, free: int, total: int, demand: Demand | None = DEMAND
) -> bool:
    """Whether vLLM would sleep on a GPU on which that much is free once the models are loaded."""
    monkeypatch.setattr(worker, "this_device", lambda: torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, total))
    facts = WorkerFacts(teacher=None, needs_values=False, total_steps=1, most_visuals=(1, 0), demand=demand)  # type: ignore[arg-type]
    return worker._sleeps(config, facts)


def test_a_worker_decides_by_what_is_free_after_loading(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = load_config(["config=configs/geo3k/cepo.yaml", "worker.rollout.name=vllm"])
    caplog.set_level(logging.WARNING, logger="cepo")  # a test before may have asked for less
    share = int(0.6 * 80 * GIB)
    assert not decides(monkeypatch, config, free=share + 12 * GIB, total=80 * GIB)
    assert decides(monkeypatch, config, free=share + 12 * GIB - 1, total=80 * GIB)
    assert not decides(monkeypatch, config, free=share, total=80 * GIB, demand=None)
    assert not caplog.records
    never = dataclasses.replace(config.worker.rollout, sleep="never")
    awake = dataclasses.replace(config, worker=dataclasses.replace(config.worker, rollout=never))
    assert not decides(monkeypatch, awake, free=share + 9 * GIB, total=80 * GIB)
    assert "memory may be short by up to 3.0 GiB" in caplog.text
    other = dataclasses.replace(DEMAND, with_vllm=False)
    assert not decides(monkeypatch, config, free=9 * GIB, total=80 * GIB, demand=other), "only vLLM can sleep"
