"""EasyR1's keys: the table against its reference, this package's defaults against the table, keys of other programs."""

from __future__ import annotations

import logging
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from config_arguments import LORA_SCRIPT, REQUIRED, easyr1s_file, file_with, load, message_of, write
from jinja2 import StrictUndefined
from jinja2.sandbox import SandboxedEnvironment

from cepo.config import check_config, load_config
from cepo.config.easyr1 import EASYR1_KEYS, ENGINE_KEYS, TABLE, engine_key_of
from cepo.config.listing import settings_of
from cepo.config.other_programs import NAMES
from cepo.errors import ConfigError

REPOSITORY = Path(__file__).resolve().parents[2]
OURS = {setting.key: setting.default for setting in settings_of()}
HONOURED = [key for key in EASYR1_KEYS if engine_key_of(key) is None]


def test_the_table_is_that_of_easyr1s_commit() -> None:
    """It was compared with the 176 keys of commit b44b311, their types, defaults and values in its YAML file."""
    table = [(key, entry.kind, entry.default, entry.shipped) for key, entry in EASYR1_KEYS.items()]
    assert len(table) == 176
    assert sha256(repr(table).encode()).hexdigest()[:16] == "2428104ee923cca3"


def test_every_key_is_honoured_or_has_a_reason() -> None:
    assert {key for key in [*EASYR1_KEYS, *TABLE.internal] if engine_key_of(key) is None} == set(HONOURED)
    assert set(HONOURED) <= set(OURS)
    assert not {key for key in OURS if engine_key_of(key)}
    for section in ENGINE_KEYS:
        assert any(key == section or key.startswith(f"{section}.") for key in [*EASYR1_KEYS, *TABLE.internal]), section


@pytest.mark.parametrize("key", HONOURED)
def test_a_default_is_easyr1s_or_differs_for_a_stated_reason(key: str) -> None:
    ours = OURS[key]
    theirs = EASYR1_KEYS[key].default
    assert (ours != theirs) == (key in TABLE.other_default), f"{key}: {ours!r} here, {theirs!r} in EasyR1"
    assert type(ours) is type(theirs) or key in TABLE.other_default


def test_each_honoured_key_has_at_most_one_remark() -> None:
    assert set(TABLE.other_default) | set(TABLE.other_meaning) <= set(HONOURED)
    assert not set(TABLE.other_default) & set(TABLE.other_meaning)


def test_a_yaml_with_every_default_resolves_with_one_notice(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    defaults = {key: entry.default for key, entry in EASYR1_KEYS.items()}
    with caplog.at_level(logging.WARNING, logger="cepo.config"):
        run = load_config([file_with(tmp_path, defaults), *REQUIRED])
    without_effect = [key for key in EASYR1_KEYS if engine_key_of(key)]
    (notice,) = [record.getMessage() for record in caplog.records]
    assert notice.startswith(f"{len(without_effect)} EasyR1 keys without effect here:")
    for key in without_effect:
        reason = engine_key_of(key)
        assert reason is not None
        assert f"{key} ({tmp_path / 'config.yaml'}, line " in notice
        assert notice.count(f"\n  {reason.why}: ") == 1
    for key in HONOURED:
        value: Any = run
        for part in key.split("."):
            value = getattr(value, part)
        if f"{key}=" not in "".join(REQUIRED):
            expected = OURS[key] if key in TABLE.none_given else defaults[key]
            assert value == expected, key


OTHER_SCRIPTS = {
    "bf16": "worker.actor.fsdp.torch_dtype=bf16 worker.actor.optim.strategy=adamw_bf16",
    "gspo": "worker.actor.loss_type=gspo_token worker.actor.loss_avg_mode=seq worker.actor.clip_ratio_low=3e-4 "
    "worker.actor.clip_ratio_high=4e-4 algorithm.disable_kl=True",
    "dapo": "worker.actor.clip_ratio_low=0.2 worker.actor.clip_ratio_high=0.28 algorithm.disable_kl=True "
    "algorithm.online_filtering=True data.mini_rollout_batch_size=128 trainer.max_try_make_batch=-1",
    "cispo": "worker.actor.loss_type=cispo worker.actor.clip_ratio_low=0.0 worker.actor.clip_ratio_high=4.0",
    "compile": "worker.ref.use_torch_compile=False worker.actor.use_torch_compile=False",
    "logger": 'trainer.logger=["console","wandb"] worker.rollout.val_override_config={"n":16}',
}


def test_easyr1s_prompt_templates_are_shipped() -> None:
    for name, mark in (("math", "\\boxed{}"), ("r1v", "<answer>"), ("dapo", "Answer:")):
        text = (REPOSITORY / "examples" / "format_prompt" / f"{name}.jinja").read_text(encoding="utf-8")
        rendered = SandboxedEnvironment(undefined=StrictUndefined).from_string(text).render(content=" Find x. ")
        assert "Find x." in rendered
        assert mark in rendered
        assert "Find x. \n" not in rendered


def test_easyr1s_own_config_file_resolves_with_its_values(tmp_path: Path) -> None:
    run = load_config([easyr1s_file(tmp_path)])
    assert run.data.train_files == "hiyouga/math12k@train"
    assert run.data.prompt_key == "problem"
    assert run.data.max_prompt_length == 2048
    assert run.algorithm.kl_penalty == "low_var_kl"
    assert run.algorithm.kl_coef == 1e-2
    assert run.algorithm.use_kl_loss is True
    assert run.worker.rollout.n == 5
    assert run.worker.actor.global_batch_size == 128
    assert run.worker.rollout.val_override_config == {"temperature": 0.6, "top_p": 0.95, "n": 1}
    assert run.trainer.logger == ["file", "wandb"]
    assert run.trainer.n_gpus_per_node == 8


def test_easyr1s_geo3k_lora_overrides_resolve_over_its_file(tmp_path: Path) -> None:
    run = load_config([easyr1s_file(tmp_path), *LORA_SCRIPT])
    lora = run.worker.actor.model.lora
    assert lora.rank == 64
    assert lora.alpha == 64
    assert lora.exclude_modules == ".*visual.*"
    assert run.worker.actor.optim.lr == 1e-5
    assert "samples per step: 512 prompts x 5 responses = 2560, on each of 8 devices at most 320" in check_config(run)


@pytest.mark.parametrize("name", OTHER_SCRIPTS)
def test_overrides_of_easyr1s_other_scripts_resolve(name: str, tmp_path: Path) -> None:
    run = load_config([easyr1s_file(tmp_path), *LORA_SCRIPT, *OTHER_SCRIPTS[name].split()])
    assert run.worker.actor.model.lora.rank == 64


@pytest.mark.parametrize("argument", ["worker.hybrid_engine=true", "worker.critic.model.lora.rank=8"])
def test_an_engine_key_as_an_argument_only_gives_a_notice(argument: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="cepo.config"):
        assert load(argument) == load()
    (notice,) = [record.getMessage() for record in caplog.records]
    assert notice.startswith("1 EasyR1 key without effect here:")
    assert f"{argument.partition('=')[0]} (argument '{argument}')" in notice


def test_a_faulty_config_gives_its_error_without_the_notices(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="cepo.config"):
        message_of([*REQUIRED, "worker.actor.strategy=fsdp", "data.seed=x"])
    assert not caplog.records


FORK = "the CEPO authors' fork of EasyR1"
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
    answers = [line.partition("; write ")[2] for line in message.splitlines()]
    return [argument for answer in answers for argument in answer.split()]


def test_the_forks_script_gets_its_values_in_arguments_that_load() -> None:
    message = message_of([*REQUIRED, *FORK_SCRIPT])
    for argument in FORK_SCRIPT[1:]:
        assert f"argument '{argument}': unknown key '{argument.partition('=')[0]}'. This is a name of {FORK}" in message
    run = load(*instead(message))
    assert run.algorithm.adv_estimator == "cepo"
    section = run.methods["cepo"]
    weight = {key: section["weight"][key] for key in ("lambda_init", "lambda_decay_steps", "clip_radius")}
    assert weight == {"lambda_init": 0.4, "lambda_decay_steps": 20, "clip_radius": 0.2}
    assert section["teacher"]["source"] == "actor"
    assert section["positive"]["source"] == "ground_truth"


def test_forks_keys_in_a_file_are_answered_with_their_lines(tmp_path: Path) -> None:
    text = "algorithm:\n  adv_estimator: rlsd\n  rlsd_epsilon_w: 0.1\n  rlsd_teacher_sync_freq: 10\n"
    message = message_of([*REQUIRED, write(tmp_path, "run.yaml", text)])
    answer = f"This is a name of {FORK}; write algorithm.weight.clip_radius=0.1\n"
    assert f"{tmp_path / 'run.yaml'}, line 3: unknown key 'algorithm.rlsd_epsilon_w'. {answer}" in message
    assert load(*instead(message)).algorithm.teacher.sync_every == 10


@pytest.mark.parametrize(
    ("argument", "settings"),
    [
        ("worker.actor.cepo_needs_ref=true", "algorithm.teacher.source=reference"),
        (
            "algorithm.cepo_use_cot_teacher=True",
            "algorithm.positive.source=peer_prefix algorithm.negative.source=peer_prefix",
        ),
        ("algorithm.use_cepo=false", ""),
        ("algorithm.cepo_histogram_freq=5", ""),
    ],
)
def test_a_switch_is_answered_by_what_it_turned_on(argument: str, settings: str) -> None:
    message = message_of([*REQUIRED, argument])
    assert f"This is a name of {FORK}; {'write' if settings else 'leave it out'}" in message
    assert " ".join(instead(message)) == settings
    assert load(*settings.split())


def test_12_keys_are_replaced_and_none_is_a_setting_here() -> None:
    replaced = [name for name, settings in NAMES[FORK].items() if not settings.startswith("(")]
    assert len(replaced) == 12
    for name in replaced:
        with pytest.raises(ConfigError, match="authors' fork"):
            load(name if "=" in name else f"{name}=1")


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
