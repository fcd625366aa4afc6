"""Keys that no setting has are explained all at once, in the words of the program that they come from."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from config_arguments import REQUIRED, message_of, write

from cepo.config.arguments import settings_in
from cepo.config.listing import all_settings
from cepo.config.other_programs import NAMES, translation_of
from cepo.config.unknown_keys import what_to_write
from cepo.errors import ConfigError

SETTINGS = {setting.key for setting in all_settings()}
SECTIONS = {key.rpartition(".")[0] for key in SETTINGS}
MAPPINGS = ("worker.reward.reward_function_kwargs", "worker.rollout.val_override_config")
LISTED = [(program, name, replacement) for program, names in NAMES.items() for name, replacement in names.items()]


@pytest.mark.parametrize(("program", "name", "replacement"), LISTED, ids=lambda value: str(value)[:40])
def test_what_replaces_a_foreign_name_is_a_setting(program: str, name: str, replacement: str) -> None:
    """A replacement `a.b=V` names a setting, `a.b.*` a section or a mapping; a text in parentheses names neither."""
    key, _, value = name.partition("=")
    assert key not in SETTINGS or value
    if replacement.startswith("("):
        assert replacement.endswith(")")
        return
    if replacement.endswith(".*"):
        section = replacement.removesuffix(".*")
        assert section in SECTIONS or section in MAPPINGS
        return
    translation = translation_of(key, value or "7")
    assert translation is not None
    for setting in translation.settings:
        (word,) = shlex.split(setting)
        assert word.partition("=")[0] in SETTINGS, program


def test_every_unknown_key_is_listed_in_file_order(tmp_path: Path) -> None:
    text = "output_dir: runs\ntrainer:\n  save_steps: 20\n  max_steps: 3\nactor_rollout_ref:\n  rollout:\n    n: 8\n"
    message = message_of([write(tmp_path, "trl.yaml", text), "data.rollout_batchsize=4"])
    lines = message.splitlines()
    assert lines[0] == "4 keys are unknown:"
    assert (
        "line 1: unknown key 'output_dir'. This is a name of TRL and transformers; write trainer.save_checkpoint_path=runs"
        in lines[1]
    )
    assert (
        "line 3: unknown key 'trainer.save_steps'. This is a name of TRL and transformers; write trainer.save_freq=20"
        in lines[2]
    )
    assert (
        "line 7: unknown key 'actor_rollout_ref.rollout.n'. This is a name of verl; write worker.rollout.n=8"
        in lines[3]
    )
    assert "unknown key 'data.rollout_batchsize'. Did you mean 'data.rollout_batch_size'?" in lines[4]


@pytest.mark.parametrize(
    ("argument", "advice"),
    [
        ("learning_rate=1e-6", "write worker.actor.optim.lr=1e-06"),
        ("trainer.learning_rate=1e-6", "write worker.actor.optim.lr=1e-06"),
        ("worker.learning_rate=1e-6", "write worker.actor.optim.lr=1e-06"),
        ("trainer.report_to=wandb", "write 'trainer.logger=[console,wandb]'"),
        ("report_to=none", "write 'trainer.logger=[console]'"),
        ("algorithm.beta=0.04", "write algorithm.use_kl_loss=true algorithm.kl_coef=0.04"),
        ("beta=0.0", "write algorithm.disable_kl=true"),
        ("trainer.save_steps=5", "write trainer.save_freq=5"),
        ("trainer.resume_from_checkpoint=true", "write trainer.find_last_checkpoint=true"),
        ("trainer.resume_from_checkpoint=out/checkpoint-5", "write trainer.load_checkpoint_path=out/checkpoint-5"),
        ("algorithm.lamda=1", "algorithm.weight.lambda_init is the weight of the evidence"),
        ("worker.actor.clip_ratio=0.2", "worker.actor.clip_ratio_low=0.2 worker.actor.clip_ratio_high=0.2"),
        ("worker.reward.score_function=a.py:f", "write worker.reward.reward_function=a.py:f"),
        ("actor_rollout_ref.actor.optim.lr=1", "write worker.actor.optim.lr=1"),
        ("actor_rollout_ref.rollout.val_kwargs.top_p=1", "write worker.rollout.val_override_config.top_p=1"),
        ("actor_rollout_ref.rollout.val_kwargs.do_sample=true", "leave it out: a temperature above 0 samples"),
        ("actor_rollout_ref.actor.megatron.tp=2", "a name of verl, and nothing here has its meaning; leave it out"),
        ("actor_rollout_ref.actor.max_grad_nrm=2", "did you mean 'worker.actor.max_grad_norm'?"),
        ("actor_rollout_ref.rollout.enforce_eager=true", "write worker.rollout.enforce_eager=true"),
        ("algorithm.use_kl_in_reward=false", "leave it out: a KL enters the loss by algorithm.use_kl_loss=true"),
        ("worker.rollout.max_tokens=512", "write data.max_response_length=512"),
        ("algorithm.method=cepo", "write algorithm.adv_estimator=cepo"),
        ("worker.actor.lora.r=16", "write worker.actor.model.lora.rank=16"),
        ("steps=5", "write trainer.max_steps=5"),
        ("trainer.gpus=2", "write trainer.n_gpus_per_node=2"),
        ("algorithm.norm_adv_by_std_in_grpo=false", "write algorithm.advantage.scale=none"),
        ("freeze_vit=true", "write worker.actor.model.freeze_vision_tower=true"),
        ("num_processes=8", "write trainer.n_gpus_per_node=8"),
        ("gradient_accumulation_steps=8", "worker.actor.global_batch_size is the number of prompts per optimizer step"),
        ("algorithm.gae.gae_lambda=0.9", "write algorithm.lam=0.9"),
        ("algorithm.cepo.lambda_init=1", "Did you mean 'algorithm.weight.lambda_init'?"),
        ("algorithm.adv_estimator=DAPO", "write algorithm.adv_estimator=grpo algorithm.online_filtering=true "),
        ("worker.actor.loss_type=dr_grpo", "write worker.actor.loss_avg_mode=constant algorithm.advantage.scale=none"),
        ("--resume=true", "write trainer.find_last_checkpoint=true"),
        ("Data.seed=1", "Did you mean"),
    ],
)
def test_a_foreign_name_leads_to_ours_at_every_level(argument: str, advice: str) -> None:
    assert advice in message_of([*REQUIRED, argument])


@pytest.mark.parametrize("flag", [("--num_generations=8",), ("--num_generations", "8"), ("--num-generations", "8")])
def test_a_flag_of_another_program_costs_no_second_try(flag: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match=r"This is a name of TRL and transformers; write worker\.rollout\.n=8$"):
        settings_in(flag, what_to_write)


def test_a_long_list_of_known_names_is_cut() -> None:
    message = message_of([*REQUIRED, "trainer.qqq=1"])
    assert "... (cepo help trainer lists all" in message
    assert len(message) < 400


def test_a_list_after_a_flag_is_one_value() -> None:
    """TRL and ms-swift take several words after a flag; the next flag ends them."""
    words = [
        "--reward_funcs",
        "accuracy",
        "format",
        "--lora_target_modules",
        "q_proj",
        "v_proj",
        "--num_generations",
        "8",
    ]
    with pytest.raises(ConfigError) as caught:
        settings_in(words, what_to_write)
    lines = str(caught.value).splitlines()
    assert len(lines) == 4
    assert lines[2].endswith("write 'worker.actor.model.lora.target_modules=[q_proj,v_proj]'")
    assert lines[3].endswith("write worker.rollout.n=8")
