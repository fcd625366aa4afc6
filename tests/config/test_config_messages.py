"""What a faulty configuration is told: the place, the key or value, and what is accepted; no text at all breaks the reader."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from case_files import cases
from config_arguments import REQUIRED, load, message_of, write
from fuzzing import only_our_errors
from hypothesis import example, given
from hypothesis import strategies as st

from cepo.config import check_config, dump_config, load_config
from cepo.config.listing import all_settings
from cepo.errors import ConfigError
from cepo.files.trees import nested

FOLDER = Path(__file__).parent
FAULTY_ARGUMENTS: dict[str, list[str]] = cases(__file__, "faulty_arguments.yaml")
FAULTY_FILES: list[dict[str, str]] = cases(__file__, "faulty_files.yaml")


def test_a_fault_of_the_command_line_itself_is_told() -> None:
    assert "given 2 times: a.yaml, b.yaml" in message_of(["config=a.yaml", "config=b.yaml"])
    assert "unknown key 'methods'" in message_of(["methods={}"]), "the field for the methods' sections is no key"
    message = message_of(["config=configs/microgeo/base.yaml", "algorithm=3"])
    assert message == "argument 'algorithm=3': algorithm must be a section with keys, got 3."


def test_an_empty_value_before_another_setting_is_no_space() -> None:
    assert message_of(["=3"]).startswith("argument '=3': settings have the form a.b.c=value,")
    assert "no space beside the equals sign" in message_of([*REQUIRED, "trainer.max_steps=", "3"])
    assert "no space beside the equals sign" in message_of([*REQUIRED, "trainer.max_steps", "=3"])


@pytest.mark.parametrize("key", ["data.train_files", "trainer.load_checkpoint_path"])
def test_a_value_that_the_shell_left_out_is_no_null(key: str) -> None:
    """`trainer.load_checkpoint_path=$UNSET` would start a run anew."""
    assert f"nothing follows the equals sign, as with a variable that the shell does not know. Write {key}=null" in (
        message_of([*REQUIRED, f"{key}="])
    )


@pytest.mark.parametrize("name", ["save_checkpoint_path", "load_checkpoint_path", "project_name", "experiment_name"])
@pytest.mark.parametrize("value", ['"a\\nb"', '"a\\u202eb"', '"a\\eb"'])
def test_a_folder_has_a_name_without_line_ends(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match="line end"):
        load_config(["config=configs/microgeo/base.yaml", f"trainer.{name}={value}"])


@pytest.mark.parametrize("setting", ["experiment_name=../mine", "project_name=/mine", "experiment_name=a/../../b"])
def test_a_name_leads_to_no_other_folder(setting: str) -> None:
    """A run is written below `checkpoints/`, unless its folder is named."""
    message = message_of([*REQUIRED, f"trainer.{setting}"])
    assert "is a path; give a name, and the run folder as trainer.save_checkpoint_path=FOLDER" in message


def test_a_run_of_no_steps_is_refused() -> None:
    """It would load the model, train nothing, and report success."""
    assert "trainer.max_steps must be at least 1, got 0" in message_of([*REQUIRED, "trainer.max_steps=0"])


@pytest.mark.parametrize("value", ["#x.jsonl", "a #x.jsonl", "[a] # b", "'a' #b"])
@pytest.mark.parametrize("key", ["data.train_files", "data.val_files"])
def test_no_part_of_an_argument_is_lost_as_a_comment(key: str, value: str) -> None:
    with pytest.raises(ConfigError, match=r"comment in YAML.*quote"):
        load_config(["config=configs/microgeo/base.yaml", f"{key}={value}"])


@pytest.mark.parametrize("value", ["a#x.jsonl", "'a #x.jsonl'", '"#x.jsonl"'])
def test_a_number_sign_in_a_name_is_part_of_it(value: str) -> None:
    config = load_config(["config=configs/microgeo/base.yaml", f"data.val_files={value}"])
    assert config.data.val_files == value.strip("'\"")


def test_an_unknown_key_in_a_base_file_names_the_base_file(tmp_path: Path) -> None:
    write(tmp_path, "base.yaml", "trainer:\n\n  max_step: 3\n")
    message = message_of([write(tmp_path, "run.yaml", "base: base.yaml\n")])
    assert "base.yaml, line 3" in message
    assert "'trainer.max_steps'" in message


@pytest.mark.parametrize("argument", FAULTY_ARGUMENTS)
def test_a_faulty_argument_names_itself_and_what_is_accepted(argument: str) -> None:
    message = message_of([*REQUIRED, argument])
    assert message.startswith(f"argument '{argument}': ")
    for part in FAULTY_ARGUMENTS[argument]:
        assert part in message


def test_a_required_setting_left_out_is_named_with_its_meaning() -> None:
    message = message_of(["data.train_files=x"])
    assert message.startswith("worker.actor.model.model_path is required and not set.")
    assert "microgeo:model" in message
    assert "is required and not set" in message_of(["data.train_files='???'"])


@pytest.mark.parametrize("case", FAULTY_FILES)
def test_a_faulty_file_is_named_with_its_line(tmp_path: Path, case: dict[str, str]) -> None:
    message = message_of([*REQUIRED, write(tmp_path, "run.yaml", case["text"])])
    assert message.startswith(f"{tmp_path}/run.yaml{case['start']}")
    assert case["part"] in message


def test_lines_are_found_through_yaml_anchors(tmp_path: Path) -> None:
    text = "data: &shared\n  seed: 3\ntrainer:\n  <<: *shared\n  max_steps: STEPS\n"
    assert load(write(tmp_path, "good.yaml", text.replace("STEPS", "4"))).trainer.seed == 3
    assert "run.yaml, line 5: trainer.max_steps" in message_of([*REQUIRED, write(tmp_path, "run.yaml", text)])


KEYS = [setting.key for setting in all_settings()]
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(min_value=10**300, max_value=10**310),
    st.floats(),
    st.text(max_size=20),
    st.sampled_from(
        ["${data.seed}", "${oc.env:HOME}", "${", "???", "~nobody/x", "x" * 5000, "\x00", "1e999", "nan", "[", "{a"]
    ),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=6), inner, max_size=3)),
)
WORDS = st.one_of(
    st.sampled_from(KEYS), st.sampled_from(KEYS).map(lambda key: key.rpartition(".")[0]), st.text(max_size=20)
)


def attempt(arguments: list[str]) -> None:
    with only_our_errors():
        config = load_config(arguments)
        dump_config(config)
        check_config(config)


@given(st.lists(st.tuples(WORDS, VALUES.map(str) | st.text(max_size=30)), max_size=4))
def test_any_arguments_give_a_run_or_our_error(pairs: list[tuple[str, str]]) -> None:
    attempt([*REQUIRED, *(f"{key}={value}" for key, value in pairs)])


@given(content=st.binary(max_size=100) | st.text(max_size=200).map(lambda text: text.encode(errors="surrogatepass")))
def test_any_content_of_a_file_gives_a_run_or_our_error(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    attempt([f"config={written(tmp_path_factory, content)}", *REQUIRED])


@given(pairs=st.lists(st.tuples(st.sampled_from(KEYS), VALUES), max_size=4))
@example(pairs=[("data.train_weights", {"": None, ".": None})])  # a dotted key leads into a value
def test_any_values_of_known_keys_give_a_run_or_our_error(
    tmp_path_factory: pytest.TempPathFactory, pairs: list[tuple[str, object]]
) -> None:

    content = yaml.safe_dump(nested(dict(pairs)), allow_unicode=True).encode("utf-8", "replace")
    attempt([f"config={written(tmp_path_factory, content)}", *REQUIRED])


def written(factory: pytest.TempPathFactory, content: bytes) -> Path:
    file = factory.getbasetemp() / "fuzzed.yaml"
    file.write_bytes(content)
    return file
