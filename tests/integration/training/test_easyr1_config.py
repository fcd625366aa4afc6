"""EasyR1's own configuration file and its LoRA script train here as they are; data, model and sizes alone are ours."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from easyr1_yaml import LORA_SCRIPT, easyr1s_file
from training_runs import json_lines, run

from cepo.workers.compensated_adamw import CompensatedAdamW

OURS = [
    "data.max_response_length=8",
    "data.rollout_batch_size=2",
    "worker.actor.global_batch_size=2",
    "worker.rollout.name=transformers",
    "worker.rollout.disable_tqdm=true",
    "trainer.logger=[file]",
    "trainer.n_gpus_per_node=1",
    "trainer.max_steps=1",
]


@pytest.mark.heavy
def test_easyr1s_config_file_with_its_lora_and_bf16_overrides_trains_a_step_of_10_responses(
    tmp_path: Path, tiny_model_folder: Path, problem_file: Path, parity_reward: str
) -> None:
    theirs = [easyr1s_file(tmp_path), *LORA_SCRIPT]
    theirs += ["worker.actor.optim.strategy=adamw_bf16", "worker.actor.fsdp.torch_dtype=bf16"]
    data = [f"data.train_files={problem_file}", f"data.val_files={problem_file}"]
    model = [f"worker.actor.model.model_path={tiny_model_folder}", f"worker.reward.reward_function={parity_reward}"]
    done = run([*theirs, *OURS, *data, *model], folder=tmp_path / "run")
    assert isinstance(done.actor.optimizer, CompensatedAdamW)
    assert {parameter.dtype for parameter in done.parameters.values()} == {torch.bfloat16}
    trained = [line for line in done.metrics if "actor/lr" in line]
    assert [line["actor/lr"] for line in trained] == [1e-5]
    assert trained[0]["actor/kl_loss"] >= 0
    # 512 x 512 pixels, to which EasyR1 enlarges a small figure, are 256 tokens of 32 x 32.
    assert trained[0]["prompt_length/mean"] > 256
    adapter = done.folder / "global_step_1" / "actor" / "lora_adapter"
    settings = json.loads((adapter / "adapter_config.json").read_text(encoding="utf-8"))
    assert (settings["r"], settings["lora_alpha"]) == (64, 64)
    assert len(json_lines(done.folder / "generations.jsonl")) == 2 * 3, "before and after the step, 3 responses"
