"""Keys that no setting has are explained all at once, in the words of the program that they come from."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from case_files import cases
from config_arguments import REQUIRED, message_of, write

from cepo.config.arguments import settings_in
from cepo.config.listing import all_settings
from cepo.config.other_programs import NAMES, translation_of
from cepo.config.unknown_keys import what_to_write
from cepo.errors import ConfigError

FOREIGN_NAMES: dict[str, str] = cases(__file__, "foreign_names.yaml")
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


@pytest.mark.parametrize(("argument", "advice"), FOREIGN_NAMES.items())
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
