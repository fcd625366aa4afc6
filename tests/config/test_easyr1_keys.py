"""EasyR1's keys: the table against the reference it was made from, and this package's defaults against the table."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from easyr1_yaml import LORA_SCRIPT, easyr1s_file, file_with
from jinja2 import StrictUndefined
from jinja2.sandbox import SandboxedEnvironment

from cepo.config import check_config, load_config
from cepo.config.easyr1 import EASYR1_KEYS, ENGINE_KEYS, TABLE, EasyR1Key, engine_key_of
from cepo.config.listing import settings_of

REPOSITORY = Path(__file__).resolve().parents[2]
NAMES_DATA_AND_MODEL = ["data.train_files=microgeo:train", "worker.actor.model.model_path=microgeo:model"]
OURS = {setting.key: setting.default for setting in settings_of()}
HONOURED = [key for key in EASYR1_KEYS if engine_key_of(key) is None]


def reference() -> str:
    folder = Path(os.environ.get("CEPO_REFERENCE", REPOSITORY.parent / "shared" / "reference"))
    if not (folder / "EASYR1.md").is_file():
        pytest.skip(f"the reference EASYR1.md is not in {folder}; CEPO_REFERENCE names its folder")
    return (folder / "EASYR1.md").read_text(encoding="utf-8")


def chapter(text: str, number: str) -> str:
    """The text under one heading `number` up to the next heading of any level."""
    return re.split(r"^#{2,3} ", text.split(f"### {number} ", 1)[1], maxsplit=1, flags=re.MULTILINE)[0]


def names_in(cell: str) -> list[str]:
    """`a.{b, c}` is a.b and a.c; `a.b_for_c / _for_d` is a.b_for_c and a.b_for_d."""
    cell = cell.replace("`", "").strip()
    if "{" in cell:
        prefix, inside = cell.rstrip("}").split("{")
        return [prefix + name.strip() for name in inside.split(",")]
    first, _, second = cell.partition(" / ")
    return [first, first[: first.rindex(second[: second.index("_", 1)])] + second] if second else [first]


def values_in(cell: str, count: int) -> list[str]:
    cell = re.sub(r"\*\*|[`≠]", "", cell).strip()
    if count > 1 and cell not in ("–", "—", "as actor"):
        return [value.strip() for value in re.split(r" / |, (?![^(]*\))", cell)]
    return [cell] * count


def written(text: str) -> Any:
    """A value of the reference's tables; what follows an arrow or stands in brackets behind null is an explanation."""
    text = text.split(" → ")[0].split("(bf16)")[0].strip().strip('"')
    if text.startswith("{") and len(text) > 2:
        return {name: written(value) for name, value in (part.split() for part in text[1:-1].split(","))}
    if text.startswith(("(", "[")) and not any(mark in text for mark in "\"'"):
        return [written(part.strip()) for part in text[1:-1].split(",")]
    if re.fullmatch(r"-?[\d.]+(e-?\d+)?", text):
        return float(text)
    return {"null": None, "true": True, "false": False, "": ""}.get(text, yaml.safe_load(text) if text else "")


def rows_of_the_reference(text: str) -> Iterator[tuple[str, str, Any, Any]]:
    """(key, type, default, shipped value or the dash) for each key of sections 1.1 to 1.7, as written there."""
    actor: dict[str, str] = {}
    for number in ("1.1", "1.2", "1.3", "1.4", "1.5", "1.6", "1.7"):
        for line in chapter(text, number).splitlines():
            if not re.match(r"\| (data|algorithm|worker|trainer)\.", line):
                continue
            cells = [cell.strip() for cell in line.strip("|").split(" | ")]
            keys = names_in(cells[0])
            defaults = values_in(cells[2], len(keys))
            shipped = "—" if number == "1.5" else values_in(cells[3], 1)[0]
            for key, default in zip(keys, defaults, strict=True):
                name = key.split(".", 2)[2] if key.count(".") > 1 else key
                if number == "1.3":
                    actor[name] = default
                yield key, cells[1], actor[name] if default == "as actor" else default, shipped


def test_the_table_has_every_key_of_easyr1_and_no_other() -> None:
    found: dict[str, EasyR1Key] = {"worker.hybrid_engine": EASYR1_KEYS["worker.hybrid_engine"]}
    assert "`worker.hybrid_engine`: bool, true, absent from YAML" in reference()
    for key, kind, default, shipped in rows_of_the_reference(reference()):
        assert key not in found
        ours = EASYR1_KEYS[key]
        named = kind.split(" (")[0].replace("Tuple[str]", "list")
        found[key] = EasyR1Key(
            ours.kind if kind == "–" else named,
            written(default),
            () if shipped == "—" else (written(shipped),),
        )
    assert found == dict(EASYR1_KEYS)
    assert len(found) == 176


def test_easyr1s_internal_fields_are_those_of_the_reference() -> None:
    listed = re.findall(r"`(worker\.[^`]*)`", chapter(reference(), "1.8").split("Shipped scripts")[0])
    of_an_earlier_release = (
        "worker.reward.reward_type"  # scripts written for it set the key; the reference describes the last
    )
    assert {name for cell in listed for name in names_in(cell)} | {of_an_earlier_release} == set(TABLE.internal)


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
        run = load_config([file_with(tmp_path, defaults), *NAMES_DATA_AND_MODEL])
    without_effect = [key for key in EASYR1_KEYS if engine_key_of(key)]
    (notice,) = [record.getMessage() for record in caplog.records]
    assert notice.startswith(f"{len(without_effect)} EasyR1 keys without effect here:")
    for key in without_effect:
        reason = engine_key_of(key)
        assert reason is not None
        assert f"{key} ({tmp_path / 'config.yaml'}, line " in notice
        assert reason.why in notice
    for key in HONOURED:
        value: Any = run
        for part in key.split("."):
            value = getattr(value, part)
        if f"{key}=" not in "".join(NAMES_DATA_AND_MODEL):
            expected = OURS[key] if key in TABLE.none_given else defaults[key]
            assert value == expected, key


OTHER_SCRIPTS = {
    "bf16": ["worker.actor.fsdp.torch_dtype=bf16", "worker.actor.optim.strategy=adamw_bf16"],
    "gspo": [
        "worker.actor.loss_type=gspo_token",
        "worker.actor.loss_avg_mode=seq",
        "worker.actor.clip_ratio_low=3e-4",
        "worker.actor.clip_ratio_high=4e-4",
        "algorithm.disable_kl=True",
    ],
    "dapo": [
        "worker.actor.clip_ratio_low=0.2",
        "worker.actor.clip_ratio_high=0.28",
        "algorithm.disable_kl=True",
        "algorithm.online_filtering=True",
        "data.mini_rollout_batch_size=128",
        "trainer.max_try_make_batch=-1",
    ],
    "cispo": ["worker.actor.loss_type=cispo", "worker.actor.clip_ratio_low=0.0", "worker.actor.clip_ratio_high=4.0"],
    "compile": ["worker.ref.use_torch_compile=False", "worker.actor.use_torch_compile=False"],
    "logger": ["trainer.logger=['console','wandb']", 'worker.rollout.val_override_config={"n":16}'],
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
    plan = check_config(load_config([easyr1s_file(tmp_path), *LORA_SCRIPT]))
    assert "samples per step: 512 prompts x 5 responses = 2560, on each of 8 devices at most 320" in plan


@pytest.mark.parametrize("name", OTHER_SCRIPTS)
def test_overrides_of_easyr1s_other_scripts_resolve(name: str, tmp_path: Path) -> None:
    run = load_config([easyr1s_file(tmp_path), *LORA_SCRIPT, *OTHER_SCRIPTS[name]])
    assert run.worker.actor.model.lora.rank == 64
