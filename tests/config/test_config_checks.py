"""Faults between settings, missing files, and the derived plan."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from case_files import cases
from pydantic import ValidationError

from cepo.commands.cli import main
from cepo.config import RunConfig, check_config, find_path, load_config, split_function
from cepo.config.checks import SIGNIFICANT_BITS
from cepo.config.path_checks import require_weights
from cepo.errors import ConfigError

BASE = "config=configs/microgeo/base.yaml"
FAULTS: dict[str, list[str]] = cases(__file__, "faults_between_settings.yaml")


def fault(*arguments: str) -> str:
    config = load_config([BASE, *arguments])
    with pytest.raises(ConfigError) as caught:
        check_config(config)
    return str(caught.value)


@pytest.mark.parametrize("arguments", FAULTS)
def test_a_fault_between_settings_names_them_and_the_way_out(arguments: str) -> None:
    message = fault(*arguments.split())
    for part in FAULTS[arguments]:
        assert part.replace("{home}", str(Path.home())) in message


def test_all_faults_between_settings_are_listed_together() -> None:
    """Of two checks that read the same faulty list of data sets, the fault is listed once."""
    message = fault(
        "data.rollout_batch_size=10", "worker.actor.global_batch_size=3", "algorithm.adv_estimator=gae",
        "worker.critic.global_batch_size=4", "worker.rollout.max_model_len=319", "data.image_dir=no/such",
        "worker.reward.reward_function=[no.py,none.py]", "data.train_files='org/name,,org/other'",
    )  # fmt: skip
    first_line, *lines = message.splitlines()
    assert first_line == "7 faults in the settings:"
    expected_parts = [
        "worker.actor.global_batch_size=3",
        "worker.critic.global_batch_size=4",
        "max_model_len=319",
        "single commas",
        "reward_function=no.py",
        "reward_function=none.py",
        "data.image_dir=no/such",
    ]
    for line, part in zip(lines, expected_parts, strict=True):
        assert part in line


def test_a_4_bit_base_without_bitsandbytes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "bitsandbytes" else find_spec(name))
    message = fault("worker.actor.model.lora.rank=8", "worker.actor.model.lora.quantization=nf4")
    assert "quantization=nf4 needs bitsandbytes" in message
    assert "pip install 'bitsandbytes>=0.49'" in message


def test_a_changed_run_is_checked_like_a_loaded_one() -> None:
    config = load_config([BASE])
    with pytest.raises(ValidationError, match=r"max_prompt_length\n  Input should be greater than or equal to 1"):
        replace(config.data, max_prompt_length=0)
    with pytest.raises(ConfigError, match=r"algorithm\.advantage\.scale"):
        check_config(replace(config, methods={"grpo": {"advantage": {"scale": "sd"}}}))


@pytest.mark.parametrize(
    "arguments",
    [
        ["data.train_files=hiyouga/geometry3k@train,hiyouga/geometry3k"],
        ["worker.actor.model.model_path=Qwen/Qwen3-VL-2B-Instruct"],
        ["data.val_files=null", "trainer.val_before_train=false"],
        ["worker.rollout.max_model_len=320", "worker.rollout.max_num_batched_tokens=320"],
    ],
)
def test_a_sound_variation_passes(arguments: list[str]) -> None:
    assert check_config(load_config([BASE, *arguments]))


def test_local_files_and_folders_pass_as_data(tmp_path: Path) -> None:
    (tmp_path / "rows.parquet").write_bytes(b"")
    for name in (tmp_path, tmp_path / "rows.parquet", f"{tmp_path / 'rows.parquet'}@train"):
        assert check_config(load_config([BASE, f"data.train_files={name}"]))


def test_the_plan_counts_samples_updates_and_micro_batches() -> None:
    counted = [
        BASE, "data.rollout_batch_size=24", "worker.actor.global_batch_size=8", "worker.rollout.n=4",
        "worker.actor.micro_batch_size_per_device_for_update=5",
    ]  # fmt: skip
    more = ["worker.actor.ppo_epochs=2", "worker.rollout.top_p=0.9", "worker.actor.model.lora.rank=16"]
    plan = "\n".join(check_config(load_config([*counted, *more])))
    assert "24 prompts x 4 responses = 96" in plan
    assert "updates per step: 6, each over 32 samples in passes of at most 1600 tokens" in plan  # 5 x 320
    assert "256 + 64 = 320" in plan
    assert "run folder: checkpoints/cepo/microgeo-grpo" in plan
    assert "LoRA, rank 16, scale 4" in plan
    assert "top_p or top_k truncates" in plan
    plan = "\n".join(check_config(load_config([*counted, "worker.actor.dynamic_batching=false"])))
    assert "each over 32 samples in 7 micro-batches of at most 5" in plan


def test_only_shipped_files_are_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = load_config([BASE])
    check_config(config)
    assert config.data.format_prompt is not None
    assert Path(config.data.format_prompt).is_absolute()
    assert Path(split_function(config.worker.reward.reward_function)[0]).is_file()
    assert find_path("tests/config") is None
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "own.jinja").write_text("{{ content }}")
    assert load_config([BASE, "data.format_prompt=configs/own.jinja"]).data.format_prompt == "configs/own.jinja"


def test_cepo_config_prints_loadable_yaml_and_the_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", BASE, "algorithm.adv_estimator=cepo"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "# samples per step: 32 prompts x 8 responses = 256" in out
    (tmp_path / "printed.yaml").write_text(out)
    assert load_config([f"config={tmp_path / 'printed.yaml'}"]) == load_config([BASE, "algorithm.adv_estimator=cepo"])


def test_lengths_are_checked_against_a_local_models_positions(tmp_path: Path) -> None:
    model = f"worker.actor.model.model_path={tmp_path}"
    for text in ('{"max_position_embeddings": 319}', '{"text_config": {"max_position_embeddings": 319}}'):
        (tmp_path / "config.json").write_text(text, encoding="utf-8")
        assert f"The model {tmp_path} has positions for 319 tokens" in fault(model)
        longer = "worker.actor.model.override_config.max_position_embeddings=320"
        assert check_config(load_config([BASE, model, longer]))
    (tmp_path / "config.json").write_text("{", encoding="utf-8")
    assert f"{tmp_path / 'config.json'} is not valid JSON" in fault(model)


def test_a_discount_without_effect_is_noted_in_the_plan() -> None:
    note = "note: algorithm.gamma=0.5 has no effect: {}"
    with_discount = "algorithm.gamma=0.5"
    assert note.format("grpo does not read it") in check_config(load_config([BASE, with_discount]))
    config = load_config([BASE, with_discount, "algorithm.lam=0.9", "algorithm.adv_estimator=gae"])
    assert config.methods["gae"] == {"gamma": 0.5, "lam": 0.9}
    assert not [line for line in check_config(config) if line.startswith("note: algorithm")]
    plain = load_config([BASE, with_discount, "algorithm.adv_estimator=reinforce_plus_plus"])
    assert plain.methods["reinforce_plus_plus"] == {"gamma": 0.5}


@pytest.mark.parametrize(
    ("setting", "switch"),
    [
        ("algorithm.kl_coef=0.05", "algorithm.disable_kl=true"),
        ("algorithm.use_kl_loss=true", "algorithm.disable_kl=true"),
        ("algorithm.filter_low=0.2", "algorithm.online_filtering=false"),
    ],
)
def test_what_another_setting_turns_off_is_noted(setting: str, switch: str) -> None:
    """The shipped configurations train without a KL, in which its weight changes nothing."""
    notes = check_config(load_config([BASE, switch, setting]))
    assert f"note: {setting} has no effect: {switch}" in notes
    turned_on = switch.replace("true", "false") if "kl" in switch else switch.replace("false", "true")
    assert not [line for line in check_config(load_config([BASE, turned_on, setting])) if setting in line]


@pytest.mark.parametrize(
    ("settings", "weights_above"),
    [
        (["torch_dtype=bf16"], "0.00051"),  # 1e-6 x 512: eight significant bits
        (["torch_dtype=fp16"], "0.0041"),  # 1e-6 x 4,096: eleven
        (["torch_dtype=bf16", "lora"], "0.00051"),
        (["torch_dtype=bf16", "adamw_bf16"], None),
        (["torch_dtype=fp32"], None),
        ([], None),
    ],
)
def test_the_plan_says_what_16_bit_weights_lose(settings: list[str], weights_above: str | None) -> None:
    """Weights above the number do not change in a step of plain AdamW; the remedy is named."""
    arguments = {
        "torch_dtype=bf16": "worker.actor.fsdp.torch_dtype=bf16",
        "torch_dtype=fp16": "worker.actor.fsdp.torch_dtype=fp16",
        "torch_dtype=fp32": "worker.actor.fsdp.torch_dtype=fp32",
        "lora": "worker.actor.model.lora.rank=8",
        "adamw_bf16": "worker.actor.optim.strategy=adamw_bf16",
    }
    plan = check_config(load_config([BASE, "worker.actor.optim.lr=1e-6", *(arguments[name] for name in settings)]))
    notes = [line for line in plan if "rounds away" in line]
    if weights_above is None:
        assert notes == []
    else:
        assert len(notes) == 1
        assert f"about lr=1e-06 adds to weights above {weights_above}," in notes[0]
        assert "worker.actor.optim.strategy=adamw_bf16 carries it on" in notes[0]


@pytest.mark.parametrize(("dtype", "name"), [(torch.bfloat16, "bf16"), (torch.float16, "fp16")])
def test_the_weights_of_the_plans_note_do_not_change(dtype: torch.dtype, name: str) -> None:
    """A step of torch's own AdamW leaves all weights above the number, and moves most below a quarter of it."""
    bound = 1e-4 * 2 ** (SIGNIFICANT_BITS[name] + 1)
    weights = torch.linspace(0.01, 4, 4_000).mul(bound).to(dtype).requires_grad_()
    initial = weights.detach().clone()
    weights.grad = torch.ones_like(weights)
    torch.optim.AdamW([weights], lr=1e-4, weight_decay=0.0).step()
    is_moved = weights.detach() != initial
    assert not is_moved[initial > 1.02 * bound].any()
    assert is_moved[initial < bound / 4].all()


def test_the_plan_says_what_the_critics_16_bit_weights_lose() -> None:
    setting = "worker.critic.fsdp.torch_dtype=bf16"
    plan = check_config(with_critic(setting))
    assert [line for line in plan if "worker.critic.optim.strategy=adamw_bf16 carries it on" in line]
    assert not [line for line in check_config(load_config([BASE, setting])) if "rounds away" in line]


def with_critic(*arguments: str) -> RunConfig:
    return load_config([BASE, "algorithm.adv_estimator=gae", *arguments])


def test_nulls_of_the_critic_are_the_actors_settings() -> None:
    """They are path and batch size; that other defaults are EasyR1's is held by tests/config/test_easyr1_keys.py."""
    resolved = with_critic("worker.actor.global_batch_size=16").worker.resolved_critic
    assert resolved.model.model_path == "microgeo:model"
    assert resolved.global_batch_size == 16


def test_the_critic_inherits_the_actors_overrides_and_trust() -> None:
    """They come with the actor's path, and the critic's own entries take precedence."""
    arguments = [
        "worker.actor.model.trust_remote_code=true",
        "worker.actor.model.override_config={initializer_range: 1, image_token_id: 2}",
        "worker.critic.model.override_config={image_token_id: 3}",
    ]
    model = with_critic(*arguments).worker.resolved_critic.model
    assert model.trust_remote_code is True
    assert model.override_config == {"initializer_range": 1, "image_token_id": 3}
    model_with_own_path = with_critic(
        *arguments, "worker.critic.model.model_path=org/critic"
    ).worker.resolved_critic.model
    assert model_with_own_path.model_path == "org/critic"
    assert model_with_own_path.trust_remote_code is False
    assert model_with_own_path.override_config == {"image_token_id": 3}


def test_the_plan_names_the_critic_where_one_is_needed() -> None:
    line = "critic: all weights of microgeo:model, 4 optimizer updates per step, learning rate 1e-05"
    settings = ["worker.critic.global_batch_size=16", "worker.critic.ppo_epochs=2", "worker.critic.optim.lr=1e-5"]
    assert line in check_config(with_critic(*settings))
    assert not any("critic" in part for part in check_config(load_config([BASE, *settings])))


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("worker.critic.global_batch_size=20", r"optimizer steps of worker\.critic\.global_batch_size=20 prompts"),
        ("worker.critic.model.model_path=no/such/folder", r"worker\.critic\.model\.model_path=no/such/folder"),
        ("worker.critic.model.model_path=microgeo:train", r"worker\.critic\.model\.model_path=microgeo:train"),
    ],
)
def test_a_fault_in_the_critics_section_matters_where_needed(argument: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_config(with_critic(argument))
    check_config(load_config([BASE, argument]))


def test_null_validation_files_alone_turn_validation_off() -> None:
    """The base file asks for a validation before the run; data.val_files=null ends that, as its description says."""
    config = load_config([BASE, "data.val_files=null"])
    assert config.trainer.val_before_train is False
    assert config.trainer.val_freq == -1
    assert "validation: none (data.val_files is null)" in check_config(config)


@pytest.mark.parametrize(
    ("argument", "note"),
    [
        ("data.val_files=microgeo:train", "data.val_files=microgeo:train is trained on too"),
        ("data.max_pixels=1", "reduced to about 1 x 1"),
        ("data.max_pixels=1280", "neither a side nor tokens: images are reduced to about 35 x 35"),
    ],
)
def test_the_plan_notes_values_that_are_seldom_meant(argument: str, note: str) -> None:
    """Each is accepted and trained with; floor(sqrt(1280)) = 35."""
    notes = [line for line in check_config(load_config([BASE, argument])) if note in line]
    assert len(notes) == 1
    assert not any(note in line for line in check_config(load_config([BASE])))


@pytest.mark.parametrize(
    ("trained_on", "validated_on", "is_noted"),
    [
        ("org/rows", "org/rows@train[-100:]", True),
        ("org/rows@train,org/more", "org/rows@train[:10%]", True),
        ("org/rows@train[:-100]", "org/rows@train[-100:]", False),
        ("org/rows@train", "org/rows@test[:100]", False),
        ("org/more", "org/rows@train[:100]", False),
    ],
)
def test_a_validation_on_a_part_of_the_training_set_is_noted(
    trained_on: str, validated_on: str, is_noted: bool
) -> None:
    config = load_config([BASE, f"data.train_files={trained_on}", f"data.val_files={validated_on}"])
    assert any("is trained on too" in line for line in check_config(config)) == is_noted


def test_weights_that_git_lfs_has_not_fetched_are_named(tmp_path: Path) -> None:
    """The header of such a file would be called too large."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:4d\nsize 12345\n"
    )
    with pytest.raises(ConfigError, match=r"model\.safetensors is a pointer of Git LFS.*git lfs pull"):
        require_weights(str(tmp_path))
