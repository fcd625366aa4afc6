"""Reading a configuration: order of sources, base files, places in messages, types, bounds, round trip."""

from __future__ import annotations

import ast
import logging
import os
import re
import subprocess
import sys
import typing
from collections.abc import Sequence
from dataclasses import FrozenInstanceError, fields, is_dataclass, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cepo.algorithms import available_estimators
from cepo.config import RunConfig, dump_config, load_config
from cepo.config.loader import known_keys
from cepo.config.options import rule_of
from cepo.config.schema import AlgorithmConfig, OptimConfig
from cepo.errors import ConfigError

REPOSITORY = Path(__file__).parents[2]
REQUIRED = ["data.train_files=microgeo:train", "worker.actor.model.model_path=microgeo:model"]


def load(*arguments: str) -> RunConfig:
    return load_config([*REQUIRED, *arguments])


def write(folder: Path, name: str, text: str) -> str:
    (folder / name).write_text(text)
    return f"config={folder / name}"


def message_of(arguments: Sequence[str]) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(arguments)
    return str(caught.value)


def test_resolving_and_checking_a_config_never_imports_torch() -> None:
    code = (
        "import sys; from cepo.config import load_config, check_config, dump_config\n"
        "config = load_config(['config=configs/microgeo/cepo.yaml']); check_config(config); dump_config(config)\n"
        "heavy = {'torch', 'transformers', 'vllm', 'ray', 'datasets'} & set(sys.modules); assert not heavy, heavy"
    )
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, cwd="/")
    assert done.returncode == 0, done.stderr


def test_the_command_line_wins_over_the_file_and_the_file_over_the_default(tmp_path: Path) -> None:
    file = write(tmp_path, "run.yaml", "data: {seed: 5, max_prompt_length: 7}\n")
    run = load(file, "data.seed=9")
    assert (run.data.seed, run.data.max_prompt_length, run.data.max_response_length) == (9, 7, 2048)


def test_a_base_file_lies_underneath_and_bases_may_chain_over_folders(tmp_path: Path) -> None:
    (tmp_path / "low").mkdir()
    write(tmp_path / "low", "lowest.yaml", "data: {seed: 1, max_prompt_length: 11, max_response_length: 12}\n")
    write(tmp_path / "low", "middle.yaml", "base: lowest.yaml\ndata: {seed: 2, max_prompt_length: 21}\n")
    file = write(tmp_path, "top.yaml", "base: low/middle.yaml\ndata: {seed: 3}\n")
    run = load(file)
    assert (run.data.seed, run.data.max_prompt_length, run.data.max_response_length) == (3, 21, 12)


def test_base_files_in_a_circle_are_an_error_that_shows_the_circle(tmp_path: Path) -> None:
    write(tmp_path, "one.yaml", "base: two.yaml\n")
    message = message_of([write(tmp_path, "two.yaml", "base: one.yaml\n")])
    assert "circle" in message
    assert f"{tmp_path}/two.yaml -> {tmp_path}/one.yaml -> {tmp_path}/two.yaml" in message


def test_a_missing_base_file_names_the_line_that_asks_for_it(tmp_path: Path) -> None:
    message = message_of([write(tmp_path, "run.yaml", "# comment\nbase: gone.yaml\n")])
    assert "run.yaml, line 2" in message
    assert "gone.yaml does not exist" in message


def test_a_missing_config_file_is_named_with_the_places_searched() -> None:
    message = message_of(["config=configs/none.yaml"])
    assert message.startswith("config=configs/none.yaml: there is no such file")
    assert "working directory" in message


def test_two_config_files_are_refused() -> None:
    assert "given 2 times: a.yaml, b.yaml" in message_of(["config=a.yaml", "config=b.yaml"])


def test_an_unknown_key_in_a_file_names_file_line_and_nearest_key(tmp_path: Path) -> None:
    message = message_of([write(tmp_path, "run.yaml", "data:\n  seed: 1\n  max_promt_length: 3\n")])
    assert message.startswith(f"{tmp_path}/run.yaml, line 3: unknown key 'data.max_promt_length'.")
    assert "Did you mean 'max_prompt_length'?" in message


def test_an_unknown_key_in_a_base_file_names_the_base_file(tmp_path: Path) -> None:
    write(tmp_path, "base.yaml", "trainer:\n\n  max_step: 3\n")
    message = message_of([write(tmp_path, "run.yaml", "base: base.yaml\n")])
    assert "base.yaml, line 3" in message
    assert "'max_steps'" in message


def test_an_unknown_key_on_the_command_line_names_the_argument() -> None:
    message = message_of(["worker.actor.optim.learning_rate=3"])
    assert message.startswith("argument 'worker.actor.optim.learning_rate=3': unknown key")
    assert "Known under 'worker.actor.optim': lr, betas" in message


def test_a_key_without_its_section_is_told_the_whole_key() -> None:
    assert "Did you mean 'algorithm.adv_estimator'?" in message_of(["adv_estimator=grpo"])


def test_the_internal_field_for_method_sections_is_no_key() -> None:
    assert "unknown key 'algorithm.methods'" in message_of(["algorithm.methods={}"])


@pytest.mark.parametrize(
    ("argument", "part"),
    [
        ("--trainer.max_steps=3", "without the leading dashes"),
        ("trainer.max_steps", "a.b.c=value"),
        ("=3", "a.b.c=value"),
        ("trainer.logger=[console", "not valid YAML"),
        ("trainer.max_steps=${data.seed", "no viable alternative"),
    ],
)
def test_an_argument_of_another_form_is_refused(argument: str, part: str) -> None:
    message = message_of([argument])
    assert message.startswith(f"argument '{argument}'")
    assert part in message


@pytest.mark.parametrize(
    ("argument", "part"),
    [
        ("data.seed=abc", "data.seed must be an integer, got the text 'abc'"),
        ("data.seed=1.5", "data.seed must be an integer, got 1.5"),
        ("data.seed=true", "data.seed must be an integer, got true"),
        ("data.seed=null", "data.seed must be an integer, got null"),
        ("data.shuffle=maybe", "data.shuffle must be true or false, got the text 'maybe'"),
        ("worker.actor.optim.lr=fast", "worker.actor.optim.lr must be a number, got the text 'fast'"),
        (
            "trainer.logger=console",
            "trainer.logger must be a list, each entry one of console, file, tensorboard, wandb, mlflow, swanlab",
        ),
        (
            "trainer.logger=[consol]",
            "trainer.logger[0] must be one of console, file, tensorboard, wandb, mlflow, swanlab, got the text 'consol'",
        ),
        ("trainer.logger=[wandbb]", "Did you mean 'wandb'?"),
        ("data.train_files=[a,b]", "data.train_files must be text, got the list ['a', 'b']"),
        ("trainer.max_steps=x", "trainer.max_steps must be an integer or null"),
        ("worker.actor.model.override_config=3", "must be a mapping of keys to values, got 3"),
        ("data=3", "data must be a section with keys, got 3"),
        ("worker.actor.loss_avg_mode=sequence", "one of token, seq, seq_sum, constant, got the text 'sequence'"),
        ("worker.actor.loss_type=gspoo", "one of default, gspo, gspo_token, cispo, sapo, got the text 'gspoo'"),
        ("worker.rollout.name=vlm", "Did you mean 'vllm'?"),
    ],
)
def test_a_wrong_type_names_key_value_and_what_is_accepted(argument: str, part: str) -> None:
    message = message_of([*REQUIRED, argument])
    assert message.startswith(f"argument '{argument}': ")
    assert part in message


@pytest.mark.parametrize(
    ("argument", "part"),
    [
        ("data.max_prompt_length=0", "must be at least 1, got 0"),
        ("data.val_batch_size=0", "must be -1 (off) or at least 1, got 0"),
        ("worker.actor.optim.betas=[0.9]", "must have 2 entries, got 1"),
        ("worker.actor.optim.betas=[0.9,1.0]", "betas[1] must be at least 0 and below 1, got 1.0"),
        ("worker.actor.optim.lr=.nan", "lr must be at least 0, got nan"),
        ("worker.actor.optim.lr=.inf", "lr must be at least 0, got inf"),
        ("worker.rollout.temperature=0", "must be above 0, got 0.0"),
        ("worker.rollout.gpu_memory_utilization=1.5", "above 0 and at most 1, got 1.5"),
        ("worker.rollout.tensor_parallel_size=2", "at least 1 and at most 1, got 2"),
        ("algorithm.correct_threshold=.nan", "must be a finite number, got nan"),
        ("worker.rollout.val_override_config.n=0", "val_override_config.n must be at least 1, got 0"),
        ("worker.rollout.val_override_config.temprature=1", "Did you mean 'temperature'?"),
        ("worker.rollout.val_override_config.top_k=x", "val_override_config.top_k must be an integer"),
    ],
)
def test_a_value_out_of_bounds_names_the_bound(argument: str, part: str) -> None:
    message = message_of([*REQUIRED, argument])
    assert message.startswith(f"argument '{argument}': ")
    assert part in message


def test_a_wrong_value_in_a_file_names_its_line_even_inside_a_list(tmp_path: Path) -> None:
    file = write(tmp_path, "run.yaml", "worker:\n  actor:\n    optim:\n      betas:\n        - 0.9\n        - 2\n")
    assert "run.yaml, line 4: worker.actor.optim.betas[1]" in message_of([*REQUIRED, file])


def test_a_section_given_as_a_value_is_told_to_be_one_before_references_to_it_fail() -> None:
    message = message_of(["config=configs/microgeo/base.yaml", "algorithm=3"])
    assert message == "argument 'algorithm=3': algorithm must be a section with keys, got 3."


def test_a_required_setting_left_out_is_named_with_its_meaning() -> None:
    message = message_of(["data.train_files=x"])
    assert message.startswith("worker.actor.model.model_path is required and not set.")
    assert "microgeo:model" in message
    assert "is required and not set" in message_of(["data.train_files='???'"])


def test_a_reference_to_another_setting_follows_the_value_that_wins(tmp_path: Path) -> None:
    file = write(tmp_path, "run.yaml", "data: {max_prompt_length: '${data.max_response_length}'}\n")
    assert load(file).data.max_prompt_length == 2048
    assert load(file, "data.max_response_length=99").data.max_prompt_length == 99


def test_a_reference_to_nothing_names_the_line_that_makes_it(tmp_path: Path) -> None:
    file = write(tmp_path, "run.yaml", "data:\n  seed: ${data.sed}\n")
    message = message_of([*REQUIRED, file])
    assert "run.yaml, line 2: data.seed: the reference cannot be resolved" in message
    assert "data.sed" in message


@pytest.mark.parametrize(("text", "value"), [("yes", True), ("1", True), ("True", True), ("off", False), ("0", False)])
def test_truth_values_are_read_in_every_usual_spelling(text: str, value: bool) -> None:
    assert load(f"data.shuffle={text}").data.shuffle is value


def test_numbers_from_an_environment_variable_are_read_as_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CEPO_TEST_STEPS", "17")
    assert load("trainer.max_steps=${oc.env:CEPO_TEST_STEPS}").trainer.max_steps == 17


def test_text_that_looks_like_a_number_stays_text_on_the_command_line_and_needs_quotes_in_a_file(
    tmp_path: Path,
) -> None:
    assert load("trainer.experiment_name=007").trainer.experiment_name == "007"
    file = write(tmp_path, "run.yaml", "trainer:\n  experiment_name: 7\n")
    message = message_of([*REQUIRED, file])
    assert "run.yaml, line 2: trainer.experiment_name must be text, got 7. Write it in quotes." in message


def test_a_mapping_is_merged_whether_written_as_a_dict_or_with_dots() -> None:
    for argument in ('worker.rollout.val_override_config={"n": 16}', "worker.rollout.val_override_config.n=16"):
        run = load("worker.rollout.val_override_config.temperature=0", argument)
        assert run.worker.rollout.val_override_config == {"temperature": 0.0, "n": 16}
        assert isinstance(run.worker.rollout.val_override_config["temperature"], float)


def test_a_list_replaces_the_default_and_defaults_are_not_shared_between_runs() -> None:
    assert load("trainer.logger=[file]").trainer.logger == ["file"]
    first, second = load(), load()
    first.trainer.logger.append("file")
    assert second.trainer.logger == ["console", "file"]


def test_an_empty_section_in_a_file_keeps_its_defaults(tmp_path: Path) -> None:
    run = load(write(tmp_path, "run.yaml", "data:\n  # nothing here\nworker:\n  rollout:\n"))
    assert (run.data.seed, run.worker.rollout.n) == (1, 8)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("data: [1\n", "not valid YAML"),
        ("data: {seed: 1}\ndata: {seed: 2}\n", "not valid YAML"),
        ("- a\n- b\n", "got a list or a text"),
        ("hello\n", "got a list or a text"),
        ("base: [x]\n", "base must be the path of a YAML file"),
    ],
)
def test_a_file_that_is_no_mapping_is_refused_by_name(tmp_path: Path, text: str, part: str) -> None:
    message = message_of([write(tmp_path, "run.yaml", text)])
    assert "run.yaml" in message
    assert part in message


def test_lines_are_found_through_yaml_anchors(tmp_path: Path) -> None:
    text = "data: &shared\n  seed: 3\ntrainer:\n  <<: *shared\n  max_steps: STEPS\n"
    assert load(write(tmp_path, "good.yaml", text.replace("STEPS", "4"))).trainer.seed == 3
    assert "run.yaml, line 5: trainer.max_steps" in message_of([*REQUIRED, write(tmp_path, "run.yaml", text)])


def test_the_chosen_method_gets_its_whole_section_and_a_written_one_of_another_is_kept() -> None:
    run = load("algorithm.adv_estimator=cepo", "algorithm.rlsd.clip_radius=0.2")
    assert set(run.algorithm.methods) == {"cepo", "rlsd"}
    assert run.algorithm.methods["rlsd"]["clip_radius"] == 0.2
    assert run.algorithm.methods["cepo"]["negative"]["source"] == "peer_answer"


def test_an_unknown_method_is_named_with_the_known_ones_and_its_line(tmp_path: Path) -> None:
    file = write(tmp_path, "run.yaml", "algorithm:\n  adv_estimator: gpro\n")
    message = message_of([*REQUIRED, file])
    assert "run.yaml, line 2" in message
    assert "Did you mean 'grpo'?" in message


@pytest.mark.parametrize(
    ("section", "line", "part"),
    [
        ("    lambda_init: 3\n", 4, "lambda_init"),
        ("    clip_radius: 0.5\n    negative:\n      select: lowst_reward\n", 6, "lowest_reward"),
        ("    lamda_init: 0.5\n", 4, "lambda_init"),
        ("    lambda_decay_steps: soon\n", 4, "soon"),
    ],
)
def test_a_fault_in_a_method_section_names_its_line(tmp_path: Path, section: str, line: int, part: str) -> None:
    file = write(tmp_path, "run.yaml", "algorithm:\n  adv_estimator: cepo\n  cepo:\n" + section)
    message = message_of([*REQUIRED, file])
    assert f"run.yaml, line {line}: " in message
    assert part in message


def test_a_section_of_no_method_is_an_unknown_key() -> None:
    message = message_of(["algorithm.ceppo.lambda_init=0"])
    assert "unknown key 'algorithm.ceppo'" in message
    assert "Did you mean 'cepo'?" in message


PLUGIN = """
from dataclasses import dataclass
from cepo.algorithms import Estimator, register_estimator

@register_estimator("{name}")
class Custom(Estimator):
    @dataclass(frozen=True, kw_only=True)
    class Config:
        strength: float = 0.25

    def signal(self, batch, *, step):
        raise NotImplementedError
"""


def test_a_plugin_is_imported_before_its_section_is_checked(tmp_path: Path) -> None:
    plugin = tmp_path / "custom_for_config_test.py"
    plugin.write_text(PLUGIN.format(name="custom_for_config_test"))
    arguments = [f"trainer.plugins=[{plugin}]", "algorithm.adv_estimator=custom_for_config_test"]
    run = load(*arguments)
    assert run.algorithm.methods["custom_for_config_test"] == {"strength": 0.25}
    message = message_of([*REQUIRED, *arguments, "algorithm.custom_for_config_test.strenght=1"])
    assert "strength" in message


def test_a_plugin_that_is_missing_or_fails_is_named(tmp_path: Path) -> None:
    assert "gone.py" in message_of([*REQUIRED, "trainer.plugins=[gone.py]"])
    broken = tmp_path / "broken_for_config_test.py"
    broken.write_text("raise RuntimeError('no luck')\n")
    message = message_of([*REQUIRED, f"trainer.plugins=[{broken}]"])
    assert "RuntimeError: no luck" in message
    assert "'nothing' not found" in message_of([*REQUIRED, "trainer.plugins=['${nothing}']"])
    assert "trainer.plugins must be a list" in message_of([*REQUIRED, "trainer.plugins=a.py"])


@pytest.mark.parametrize("name", available_estimators())
def test_a_dumped_config_loads_to_the_same_run(tmp_path: Path, name: str) -> None:
    run = load(f"algorithm.adv_estimator={name}", "trainer.experiment_name='1e-5'", "data.image_dir='\\${literal}'")
    assert run.data.image_dir == "${literal}"
    text = dump_config(run)
    assert load_config([write(tmp_path, "dumped.yaml", text)]) == run
    assert f"\n  {name}:" in text


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


def test_every_setting_has_a_description_of_one_line() -> None:
    def walk(section: type) -> None:
        hints = typing.get_type_hints(section)
        for field in fields(section):
            if is_dataclass(hints[field.name]):
                walk(hints[field.name])  # type: ignore[arg-type]
            else:
                help = rule_of(field).help
                assert help.endswith("."), f"{section.__name__}.{field.name}"
                assert "\n" not in help
                assert field.metadata["help"] == help

    walk(RunConfig)
    assert "methods" in {field.name for field in fields(AlgorithmConfig)}
    assert len(known_keys()) == len(set(known_keys())) > 80
    assert OptimConfig().betas == [0.9, 0.999]


def test_no_module_of_the_config_knows_a_method() -> None:
    texts = {file: file.read_text() for file in sorted((REPOSITORY / "cepo" / "config").glob("*.py"))}
    found = [
        (file.name, name)
        for file, text in texts.items()
        for name in {*available_estimators(), "opsd", "sdpo"} - {"cepo"}
        for _ in re.finditer(rf"\b{name}\b", text)
    ]
    assert found == []
    # The package has a method's name; as a whole text it stands for the package's folder and the project only.
    constants = [
        (file.name, node.value)
        for file, text in texts.items()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Constant) and node.value == "cepo"
    ]
    assert constants == [("paths.py", "cepo"), ("schema.py", "cepo")]


@pytest.mark.parametrize(
    ("argument", "part"),
    [
        ("worker.hybrid_engine=true", "share the device"),
        ("worker.actor.strategy=fsdp", "FSDP2"),
        ("worker.actor.fsdp.use_orig_params=false", "FSDP2"),
        ("worker.actor.use_torch_compile=true", "not"),
        ("worker.actor.ulysses_size=1", "not split"),
        ("worker.rollout.disable_log_stats=true", "statistics"),
        ("data.filter_overlong_prompts_workers=4", "one process"),
        ("worker.actor.offload.offload_params=true", "not used by this release"),
        ("worker.ref.fsdp.enable_cpu_offload=true", "is built by this release"),
        ("worker.critic.model.lora.rank=8", "trains all its weights"),
        ("worker.critic.offload.offload_optimizer=true", "not used by this release"),
    ],
)
def test_a_key_of_easyr1s_engine_is_accepted_with_one_notice(
    argument: str, part: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="cepo.config"):
        assert load(argument) == load()
    notices = [record.getMessage() for record in caplog.records]
    assert len(notices) == 1
    assert notices[0].startswith(f"argument '{argument}': ")
    assert "has no effect" in notices[0]
    assert part in notices[0]


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["worker.actor.ulysses_size=2"], "must be 1, got 2"),
        (["algorithm.gamma=0.9"], "must be 1"),
    ],
)
def test_a_key_of_easyr1s_engine_that_would_change_the_result_is_an_error(arguments: list[str], part: str) -> None:
    message = message_of([*REQUIRED, *arguments])
    assert message.startswith(f"argument '{arguments[0]}'")
    assert part in message


def test_a_faulty_config_gives_its_error_without_the_notices(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="cepo.config"):
        message_of([*REQUIRED, "worker.actor.padding_free=true", "data.seed=x"])
    assert not caplog.records
