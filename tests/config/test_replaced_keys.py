"""Keys of the authors' fork: the error's lines, pasted, give the run that the keys meant."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from config_arguments import REQUIRED, load, message_of, write
from easyr1_yaml import easyr1s_file

from cepo.config import RunConfig, check_config, load_config
from cepo.config.easyr1 import TABLE
from cepo.errors import ConfigError

FORK_SCRIPT = [
    "algorithm.adv_estimator=grpo",
    "algorithm.cepo_use_cot_teacher=False",
    "algorithm.cepo_cot_prefix_len=512",
    "algorithm.use_cepo=True",
    "algorithm.cepo_lambda_init=0.4",
    "algorithm.cepo_warmup_steps=20",
    "algorithm.cepo_eps_w=0.2",
    "algorithm.cepo_lambda_schedule=linear",
    "worker.actor.cepo_needs_ref=False",
]


def pasted(message: str, folder: Path) -> tuple[RunConfig, RunConfig]:
    """The runs of the message's YAML lines and of its arguments."""
    _, lines, _, arguments = message.split("\n\n")[:4]
    return load(write(folder, "pasted.yaml", lines)), load(*arguments.split("\n")[0].split())


def test_the_forks_script_gets_its_values_in_lines_that_resolve(tmp_path: Path) -> None:
    message = message_of([*REQUIRED, *FORK_SCRIPT])
    for argument in FORK_SCRIPT[1:]:
        assert f"{argument.partition('=')[0]} (argument '{argument}')" in message
    for run in pasted(message, tmp_path):
        assert run.algorithm.adv_estimator == "cepo"
        section = run.methods["cepo"]
        weight = {key: section["weight"][key] for key in ("lambda_init", "lambda_decay_steps", "clip_radius")}
        assert weight == {"lambda_init": 0.4, "lambda_decay_steps": 20, "clip_radius": 0.2}
        assert (section["teacher"]["source"], section["positive"]["source"]) == ("actor", "ground_truth")


def test_forks_keys_in_a_file_are_answered_in_its_form(tmp_path: Path) -> None:
    text = "algorithm:\n  adv_estimator: rlsd\n  rlsd_lambda_init: 0.3\n  rlsd_epsilon_w: 0.1\n  rlsd_teacher_sync_freq: 10\n"
    message = message_of([*REQUIRED, write(tmp_path, "run.yaml", text)])
    assert f"algorithm.rlsd_epsilon_w ({tmp_path / 'run.yaml'}, line 4)" in message
    assert "\n\nalgorithm:\n  weight:\n    lambda_init: 0.3\n    clip_radius: 0.1\n  teacher:\n" in message
    for run in pasted(message, tmp_path):
        assert run.algorithm.teacher.sync_every == 10


@pytest.mark.parametrize(
    ("argument", "key", "value"),
    [
        ("worker.actor.cepo_needs_ref=true", "teacher.source", "reference"),
        ("algorithm.cepo_use_cot_teacher=yes", "negative.source", "peer_prefix"),
    ],
)
def test_a_switch_that_is_on_is_answered_by_what_it_turned_on(
    argument: str, key: str, value: str, tmp_path: Path
) -> None:
    for run in pasted(message_of([*REQUIRED, argument]), tmp_path):
        setting: Any = run.algorithm
        for part in key.split("."):
            setting = getattr(setting, part)
        assert setting == value


def test_keys_that_said_nothing_are_to_be_removed() -> None:
    message = message_of([*REQUIRED, "algorithm.use_cepo=false", "algorithm.cepo_histogram_freq=5"])
    assert "they need no replacement" in message
    assert "algorithm.cepo_histogram_freq (argument" in message
    message = message_of([*REQUIRED, "algorithm.use_cepo=true", "algorithm.cepo_histogram_freq=5"])
    assert "These have no replacement: algorithm.cepo_histogram_freq." in message


def test_12_keys_are_replaced_and_none_is_a_setting_here() -> None:
    assert len(TABLE.fork) == 12
    for key in TABLE.fork:
        with pytest.raises(ConfigError, match="authors' fork"):
            load(f"{key}=1")


FORK_SCRIPT_WITHOUT_ITS_KEYS = [
    "data.train_files=hiyouga/geometry3k@train", "data.val_files=hiyouga/geometry3k@test",
    "data.filter_overlong_prompts_workers=64", "data.rollout_batch_size=32", "data.max_prompt_length=768",
    "data.max_response_length=2048", "algorithm.disable_kl=True", "algorithm.use_kl_loss=False",
    "algorithm.online_filtering=False", "worker.actor.clip_ratio_low=0.2", "worker.actor.clip_ratio_high=0.28",
    "worker.actor.model.model_path=Qwen/Qwen3-VL-2B-Instruct", "worker.actor.model.lora.rank=16",
    "worker.actor.optim.lr=5e-6", "worker.actor.global_batch_size=16", "worker.actor.use_torch_compile=False",
    "worker.actor.micro_batch_size_per_device_for_update=4",
    "worker.actor.micro_batch_size_per_device_for_experience=32", "worker.actor.fsdp.enable_full_shard=False",
    "worker.actor.fsdp.torch_dtype=bf16", "worker.actor.optim.strategy=adamw_bf16", "worker.rollout.n=8",
    "worker.ref.use_torch_compile=False", "worker.ref.fsdp.enable_cpu_offload=False",
    "worker.rollout.enforce_eager=False", "worker.rollout.max_model_len=2816",
    "worker.rollout.tensor_parallel_size=1", "trainer.total_epochs=1", "trainer.max_steps=50",
    'trainer.logger=["console","wandb"]', "trainer.save_limit=2",
]  # fmt: skip


def test_the_authors_script_runs_with_the_pasted_lines(tmp_path: Path) -> None:
    script = [easyr1s_file(tmp_path), *FORK_SCRIPT_WITHOUT_ITS_KEYS, "trainer.n_gpus_per_node=1"]
    arguments = message_of([*script, *FORK_SCRIPT]).split("On the command line:\n\n")[1].split()
    config = load_config([*script, *arguments])
    plan = check_config(config)
    assert "method: cepo, teacher views: correct, wrong" in plan
    assert any(line.startswith("optimizer updates per step: 2, each over 128 samples") for line in plan)
    assert "trained weights: LoRA, rank 16, scale 4" in plan
    lost = load_config([*script, *arguments, "data.format_prompt=../../examples/format_prompt/math_short.jinja"])
    with pytest.raises(ConfigError, match=r"math_short\.jinja: there is no such file"):
        check_config(lost)
