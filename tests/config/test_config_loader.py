"""Reading a configuration: order of sources, base files, references, kinds of values, round trip."""

from __future__ import annotations

import runpy
from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import pytest
from config_arguments import load, message_of, write
from hypothesis import given, settings
from hypothesis import strategies as st

from cepo.algorithms import available_estimators
from cepo.config import dump_config, load_config
from cepo.config.listing import all_settings
from cepo.config.schema import OptimConfig


def test_the_command_line_beats_the_file_which_beats_defaults(tmp_path: Path) -> None:
    file = write(tmp_path, "run.yaml", "data: {seed: 5, max_prompt_length: 7}\n")
    run = load(file, "data.seed=9")
    assert (run.data.seed, run.data.max_prompt_length, run.data.max_response_length) == (9, 7, 512)


@pytest.mark.parametrize(
    ("settings", "seeds"), [([], (5, 5, 5)), (["data.seed=2"], (5, 2, 5)), (["worker.rollout.seed=9"], (5, 5, 9))]
)
def test_one_seed_sets_all_that_are_not_set(tmp_path: Path, settings: list[str], seeds: tuple[int, int, int]) -> None:
    run = load(write(tmp_path, "run.yaml", "trainer: {seed: 5}\ndata: {shuffle: true}\n"), *settings)
    assert (run.trainer.seed, run.data.seed, run.worker.rollout.seed) == seeds


def test_a_wrong_seed_of_the_run_is_the_only_fault() -> None:
    """The seeds that follow it hold the same text, and no file sets them."""
    fault = "argument 'trainer.seed=x': trainer.seed must be an integer, got the text 'x'."
    quickstart = ["config=microgeo/quickstart", "trainer.seed=x"]
    assert message_of(quickstart) == fault
    own = "argument 'data.seed=y': data.seed must be an integer, got the text 'y'."
    assert message_of([*quickstart, "data.seed=y"]) == f"{own}\n{fault}"


def test_base_files_lie_underneath_and_may_chain(tmp_path: Path) -> None:
    (tmp_path / "low").mkdir()
    write(tmp_path / "low", "lowest.yaml", "data: {seed: 1, max_prompt_length: 11, max_response_length: 12}\n")
    write(tmp_path / "low", "middle.yaml", "base: lowest.yaml\ndata: {seed: 2, max_prompt_length: 21}\n")
    file = write(tmp_path, "top.yaml", "base: low/middle.yaml\ndata: {seed: 3}\n")
    run = load(file)
    assert (run.data.seed, run.data.max_prompt_length, run.data.max_response_length) == (3, 21, 12)


def test_base_files_in_a_circle_are_an_error_that_shows_it(tmp_path: Path) -> None:
    write(tmp_path, "one.yaml", "base: two.yaml\n")
    message = message_of([write(tmp_path, "two.yaml", "base: one.yaml\n")])
    assert "circle" in message
    assert f"{tmp_path}/two.yaml -> {tmp_path}/one.yaml -> {tmp_path}/two.yaml" in message


def test_a_reference_to_a_setting_follows_the_value_that_wins(tmp_path: Path) -> None:
    file = write(tmp_path, "run.yaml", "data: {max_prompt_length: '${data.max_response_length}'}\n")
    assert load(file).data.max_prompt_length == 512
    assert load(file, "data.max_response_length=99").data.max_prompt_length == 99


@pytest.mark.parametrize(("text", "value"), [("yes", True), ("1", True), ("True", True), ("off", False), ("0", False)])
def test_truth_values_are_read_in_every_usual_spelling(text: str, value: bool) -> None:
    assert load(f"data.shuffle={text}").data.shuffle is value


def test_numbers_from_environment_variables_are_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CEPO_TEST_STEPS", "17")
    assert load("trainer.max_steps=${oc.env:CEPO_TEST_STEPS}").trainer.max_steps == 17


def test_text_like_a_number_stays_text() -> None:
    assert load("trainer.experiment_name=007").trainer.experiment_name == "007"


def test_a_mapping_is_merged_from_a_dict_or_from_dots() -> None:
    for argument in ('worker.rollout.val_override_config={"n": 16}', "worker.rollout.val_override_config.n=16"):
        run = load("worker.rollout.val_override_config.temperature=0", argument)
        assert run.worker.rollout.val_override_config == {"temperature": 0.0, "n": 16}
        assert isinstance(run.worker.rollout.val_override_config["temperature"], float)


def test_a_list_replaces_the_default_and_is_not_shared() -> None:
    assert load("trainer.logger=[file]").trainer.logger == ["file"]
    first, second = load(), load()
    first.trainer.logger.append("file")
    assert second.trainer.logger == ["console", "file"]


def test_an_empty_section_in_a_file_keeps_its_defaults(tmp_path: Path) -> None:
    run = load(write(tmp_path, "run.yaml", "data:\n  # nothing here\nworker:\n  rollout:\n"))
    assert (run.data.seed, run.worker.rollout.n) == (1, 1)


@pytest.mark.parametrize("name", available_estimators())
def test_a_dumped_config_loads_to_the_same_run(tmp_path: Path, name: str) -> None:
    run = load(f"algorithm.adv_estimator={name}", "trainer.experiment_name='1e-5'", "data.image_dir='\\${literal}'")
    assert run.data.image_dir == "${literal}"
    text = dump_config(run)
    assert load_config([write(tmp_path, "dumped.yaml", text)]) == run
    assert f"adv_estimator: {name}\n" in text


@pytest.mark.heavy
@settings(max_examples=25, deadline=None)
@given(
    name=st.text(alphabet=st.characters(codec="utf-8", exclude_categories=["C"]), max_size=12),
    lr=st.floats(min_value=0, max_value=1),
    kwargs=st.dictionaries(
        st.sampled_from("abc"), st.one_of(st.none(), st.booleans(), st.integers(), st.text("x:# '\"1e-"))
    ),
)
def test_any_text_and_number_survives_dump_and_load(
    tmp_path_factory: pytest.TempPathFactory, name: str, lr: float, kwargs: dict[str, object]
) -> None:
    run = load(f"worker.actor.optim.lr={lr!r}")
    reward = replace(run.worker.reward, reward_function_kwargs=kwargs)
    run = replace(run, trainer=replace(run.trainer, project_name=name), worker=replace(run.worker, reward=reward))
    folder = tmp_path_factory.mktemp("dump")
    assert load_config([write(folder, "dumped.yaml", dump_config(run))]) == run


def test_settings_cannot_be_changed_after_loading() -> None:
    with pytest.raises(FrozenInstanceError):
        load().data.seed = 3  # type: ignore[misc]


def test_there_are_at_most_220_settings() -> None:
    """Those of the methods and of the critic included; a declaration that actor and critic share counts once."""
    script = Path(__file__).parents[2] / "scripts" / "generate_docs.py"
    declared = runpy.run_path(str(script))["declared_settings"]()
    assert len(declared) <= 220
    keys = {setting.key for setting in declared}
    assert {"worker.actor.optim.lr", "worker.critic.cliprange_value", "algorithm.rlcsd.num_wrong"} <= keys
    repeated = {setting.key for setting in all_settings()} - keys
    assert repeated
    assert all(key.startswith("worker.critic.") for key in repeated)


def test_every_setting_has_a_description_of_one_line() -> None:
    found = all_settings()
    assert len({setting.key for setting in found}) == len(found) > 150
    for setting in found:
        assert setting.help.endswith("."), setting.key
        assert "\n" not in setting.help, setting.key
    assert OptimConfig().betas == [0.9, 0.999]
