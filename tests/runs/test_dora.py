"""DoRA: the magnitude of each adapted row is trained too, and the rollout engine samples from the merged weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from training_runs import FinishedRun, actor_of, run

from cepo.cli import main
from cepo.rollout.generator import FullWeights
from cepo.workers.actor import Actor
from cepo.workers.distributed import MergedWeights

pytestmark = pytest.mark.heavy

DORA = [
    "worker.actor.model.lora.rank=4",
    "worker.actor.model.lora.alpha=8",
    "worker.actor.model.lora.use_dora=true",
    "worker.actor.optim.lr=1e-2",
    "worker.actor.fsdp.mp_param_dtype=fp32",
    "worker.rollout.dtype=fp32",
]


@pytest.fixture(scope="module")
def trained(tiny_run: list[str], tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    """Two steps with the engine that `auto` chooses: vLLM, where it is installed."""
    options = [*DORA, "worker.rollout.name=auto", "worker.rollout.enforce_eager=true"]
    return run(tiny_run, *options, folder=tmp_path_factory.mktemp("dora"))


def test_doras_magnitudes_move_and_the_engine_follows(trained: FinishedRun) -> None:
    magnitudes = {name: value for name, value in trained.parameters.items() if "lora_magnitude_vector" in name}
    base = {
        name: value for name, value in actor_of(trained.trainer).module.state_dict().items() if "base_layer" in name
    }
    assert len(magnitudes) == len(base) == 28  # 4 layers with 7 linear ones
    moved = 0
    for name, magnitude in magnitudes.items():
        weight = base[name.replace("lora_magnitude_vector.default", "base_layer")]
        weight = weight.full_tensor() if hasattr(weight, "full_tensor") else weight
        moved += float((magnitude - torch.linalg.norm(weight, dim=1)).abs().max()) > 1e-3
    assert moved == 28
    assert trained.metrics[1]["rollout/log_prob_gap_max"] < 1e-4


def test_merged_weights_are_those_that_the_written_model_has(trained: FinishedRun, tmp_path: Path) -> None:
    checkpoint = trained.folder / "global_step_2"
    assert main(["merge", "--checkpoint", str(checkpoint), "--out", str(tmp_path / "merged"), "--dtype", "fp32"]) == 0
    written = load_file(tmp_path / "merged" / "model.safetensors")
    actor = actor_of(trained.trainer)
    weights = actor.rollout_weights()
    assert isinstance(weights, FullWeights)
    assert isinstance(weights.tensors, MergedWeights)
    assert set(written) == set(weights.tensors) - {"lm_head.weight"}
    changed = 0
    for name, tensor in written.items():
        torch.testing.assert_close(weights.tensors[name], tensor, rtol=0, atol=1e-6)
        changed += name.endswith("_proj.weight") and ".layers." in name
    assert changed == 28


BuildActor = Callable[..., Actor]
