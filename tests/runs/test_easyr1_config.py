from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from config_arguments import LORA_SCRIPT, easyr1s_file
from tiny_checkpoints import VISION_FAMILIES, write_checkpoint
from training_runs import FinishedRun, json_lines, run

from cepo.workers.trained import CompensatedAdamW

pytestmark = pytest.mark.heavy

Run = Callable[..., FinishedRun]


@pytest.fixture
def run_of(tmp_path: Path, problem_file: Path, parity_reward: str) -> Run:
    """Trains with EasyR1's configuration and overrides, on data, a model and sizes of ours."""

    def run_of(model: Path, theirs: list[str], *further: str, data: Path = problem_file) -> FinishedRun:
        ours = [
            "data.max_response_length=8",
            "data.rollout_batch_size=2",
            f"data.train_files={data}",
            f"data.val_files={data}",
            f"worker.actor.model.model_path={model}",
            "worker.actor.global_batch_size=2",
            f"worker.reward.reward_function={parity_reward}",
            "worker.rollout.name=transformers",
            "worker.rollout.disable_tqdm=true",
            "trainer.logger=[file]",
            "trainer.n_gpus_per_node=1",
            "trainer.max_steps=1",
        ]
        return run([easyr1s_file(tmp_path), *theirs, *ours, *further], folder=tmp_path / "run")

    return run_of


def test_easyr1s_config_with_its_lora_overrides_trains_a_step(tiny_model_folder: Path, run_of: Run) -> None:
    """The step has 10 responses."""
    done = run_of(tiny_model_folder, LORA_SCRIPT)
    trained = [line for line in done.metrics if "actor/lr" in line]
    assert [line["actor/lr"] for line in trained] == [1e-5]
    assert trained[0]["actor/kl_loss"] >= 0
    # 512 x 512 pixels, to which EasyR1 enlarges a small figure, are 256 tokens of 32 x 32.
    assert trained[0]["prompt_length/mean"] > 256
    adapter = done.folder / "global_step_1" / "actor" / "lora_adapter"
    settings = json.loads((adapter / "adapter_config.json").read_text(encoding="utf-8"))
    assert (settings["r"], settings["lora_alpha"]) == (64, 64)
    assert len(json_lines(done.folder / "generations.jsonl")) == 2 * 3, "before and after the step, 3 responses"


IN_BF16 = ["worker.actor.fsdp.torch_dtype=bf16", "worker.actor.optim.strategy=adamw_bf16"]
LORA = ["worker.actor.model.lora.rank=64", "worker.actor.model.lora.alpha=64", "worker.actor.optim.lr=1e-5"]
SECOND = pytest.mark.nightly("settings of the 7B or the 32B script; experts are trained in test_families")
SCRIPTS = [
    pytest.param("qwen2_5_vl", [], marks=SECOND, id="qwen2_5_vl_3b_geo3k_grpo"),
    pytest.param("qwen2_5_vl", ["worker.actor.loss_type=cispo"], id="qwen2_5_vl_7b_geo3k_cispo"),
    pytest.param("qwen2_5_vl", IN_BF16, id="qwen2_5_vl_32b_geo3k_grpo"),
    pytest.param("qwen3_vl_moe", IN_BF16, marks=SECOND, id="qwen3_vl_30b_geo3k_grpo"),
    pytest.param("qwen2", [], id="qwen2_5_7b_math_grpo"),
    pytest.param("qwen3", LORA, id="qwen3_4b_math_grpo_lora"),
]
"""EasyR1's scripts: the family of the model that each names, and what it overrides beside data, model, lengths and devices.

From examples/ of hiyouga/EasyR1 (Apache-2.0), read on 2026-11-22."""


@pytest.mark.parametrize(("family", "overrides"), SCRIPTS)
def test_easyr1s_script_trains_two_steps_with_its_family(
    family: str, overrides: list[str], run_of: Run, tmp_path: Path, problem_file: Path
) -> None:
    data = problem_file
    if family not in VISION_FAMILIES:  # the columns of EasyR1's math data
        data = tmp_path / "math.jsonl"
        rows = [{"problem": f"What is {number} + 3?", "answer": str(number + 3)} for number in range(4)]
        data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    further = ["data.max_prompt_length=1024", "data.max_response_length=4", "worker.rollout.n=2"]
    further += ["worker.rollout.tensor_parallel_size=1", "trainer.val_before_train=false", "trainer.val_freq=-1"]
    model = write_checkpoint(family, tmp_path / "model")
    done = run_of(model, overrides, *further, "trainer.max_steps=2", data=data)
    assert len(done.steps) == 2
    assert all(line["actor/kl_loss"] >= 0 for line in done.steps)
    if overrides == IN_BF16:
        assert isinstance(done.actor.optimizer, CompensatedAdamW)
        assert {parameter.dtype for parameter in done.parameters.values()} == {torch.bfloat16}
    assert all(line["rollout/log_prob_gap_mean"] < 0.2 for line in done.steps if "rollout/log_prob_gap_mean" in line)
