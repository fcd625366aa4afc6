"""Keys of the authors' fork: the error's arguments give the run that the keys meant."""

from __future__ import annotations

from pathlib import Path

import pytest
from config_arguments import REQUIRED, easyr1s_file, load, message_of, write

from cepo.config import check_config, load_config
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


def instead(message: str) -> list[str]:
    """The arguments that the message has in place of the keys, one line for each key."""
    return [word for line in message.splitlines()[1:] for word in line.rpartition("): ")[2].split() if "=" in word]


def test_the_forks_script_gets_its_values_in_arguments_that_load() -> None:
    message = message_of([*REQUIRED, *FORK_SCRIPT])
    for argument in FORK_SCRIPT[1:]:
        assert f"{argument.partition('=')[0]} (argument '{argument}'): " in message
    run = load(*instead(message))
    assert run.algorithm.adv_estimator == "cepo"
    section = run.methods["cepo"]
    weight = {key: section["weight"][key] for key in ("lambda_init", "lambda_decay_steps", "clip_radius")}
    assert weight == {"lambda_init": 0.4, "lambda_decay_steps": 20, "clip_radius": 0.2}
    assert (section["teacher"]["source"], section["positive"]["source"]) == ("actor", "ground_truth")


def test_forks_keys_in_a_file_are_answered_with_their_lines(tmp_path: Path) -> None:
    text = "algorithm:\n  adv_estimator: rlsd\n  rlsd_epsilon_w: 0.1\n  rlsd_teacher_sync_freq: 10\n"
    message = message_of([*REQUIRED, write(tmp_path, "run.yaml", text)])
    assert f"rlsd_epsilon_w ({tmp_path / 'run.yaml'}, line 3): algorithm.weight.clip_radius=0.1\n" in message
    assert load(*instead(message)).algorithm.teacher.sync_every == 10


@pytest.mark.parametrize(
    ("argument", "settings"),
    [
        ("worker.actor.cepo_needs_ref=true", "algorithm.teacher.source=reference"),
        (
            "algorithm.cepo_use_cot_teacher=yes",
            "algorithm.positive.source=peer_prefix algorithm.negative.source=peer_prefix",
        ),
        ("algorithm.use_cepo=false", "nothing"),
        ("algorithm.cepo_histogram_freq=5", "nothing"),
    ],
)
def test_a_switch_is_answered_by_what_it_turned_on(argument: str, settings: str) -> None:
    assert message_of([*REQUIRED, argument]).endswith(
        f"{argument.partition('=')[0]} (argument '{argument}'): {settings}"
    )
    assert load(*(settings.split() if settings != "nothing" else []))


def test_12_keys_are_replaced_and_none_is_a_setting_here() -> None:
    assert len(TABLE.fork) == 12
    for row in TABLE.fork:
        with pytest.raises(ConfigError, match="authors' fork"):
            load(row.replace("=V", "=1"))


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


def test_the_authors_script_runs_with_these_arguments(tmp_path: Path) -> None:
    script = [easyr1s_file(tmp_path), *FORK_SCRIPT_WITHOUT_ITS_KEYS, "trainer.n_gpus_per_node=1"]
    arguments = instead(message_of([*script, *FORK_SCRIPT]))
    config = load_config([*script, *arguments])
    plan = check_config(config)
    assert "method: cepo, teacher views: correct, wrong" in plan
    assert any(line.startswith("optimizer updates per step: 2, each over 128 samples") for line in plan)
    assert "trained weights: LoRA, rank 16, scale 4" in plan
    lost = load_config([*script, *arguments, "data.format_prompt=../../examples/format_prompt/math_short.jinja"])
    with pytest.raises(ConfigError, match=r"math_short\.jinja: there is no such file"):
        check_config(lost)
