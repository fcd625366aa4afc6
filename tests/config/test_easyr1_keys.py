"""EasyR1's keys: the table against the reference it was made from, and this package's defaults against the table."""

from __future__ import annotations

import logging
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from config_arguments import LORA_SCRIPT, REQUIRED, easyr1s_file, file_with, load, message_of
from jinja2 import StrictUndefined
from jinja2.sandbox import SandboxedEnvironment

from cepo.config import check_config, load_config
from cepo.config.easyr1 import EASYR1_KEYS, ENGINE_KEYS, TABLE, engine_key_of
from cepo.config.listing import settings_of

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
    ours, theirs = OURS[key], EASYR1_KEYS[key].default
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
    assert (run.data.train_files, run.data.prompt_key, run.data.max_prompt_length) == (
        "hiyouga/math12k@train",
        "problem",
        2048,
    )
    assert (run.algorithm.kl_penalty, run.algorithm.kl_coef, run.algorithm.use_kl_loss) == ("low_var_kl", 1e-2, True)
    assert (run.worker.rollout.n, run.worker.actor.global_batch_size) == (5, 128)
    assert run.worker.rollout.val_override_config == {"temperature": 0.6, "top_p": 0.95, "n": 1}
    assert (run.trainer.logger, run.trainer.n_gpus_per_node) == (["file", "wandb"], 8)


def test_easyr1s_geo3k_lora_overrides_resolve_over_its_file(tmp_path: Path) -> None:
    run = load_config([easyr1s_file(tmp_path), *LORA_SCRIPT])
    lora = run.worker.actor.model.lora
    assert (lora.rank, lora.alpha, lora.exclude_modules, run.worker.actor.optim.lr) == (64, 64, ".*visual.*", 1e-5)
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
