"""What a faulty configuration is told: the place, the key or value, and what is accepted; no text at all breaks the reader."""

from __future__ import annotations

from pathlib import Path

import pytest
from config_arguments import REQUIRED, load, message_of, write
from fuzzing import only_our_errors
from hypothesis import example, given
from hypothesis import strategies as st

from cepo.config import check_config, dump_config, load_config
from cepo.config.listing import all_settings
from cepo.errors import ConfigError
from cepo.files.trees import nested


def test_a_fault_of_the_command_line_itself_is_told() -> None:
    assert "given 2 times: a.yaml, b.yaml" in message_of(["config=a.yaml", "config=b.yaml"])
    assert "unknown key 'methods'" in message_of(["methods={}"]), "the field for the methods' sections is no key"
    message = message_of(["config=configs/microgeo/base.yaml", "algorithm=3"])
    assert message == "argument 'algorithm=3': algorithm must be a section with keys, got 3."


def test_an_empty_value_before_another_setting_is_no_space() -> None:
    assert message_of(["=3"]).startswith("argument '=3': settings have the form a.b.c=value,")
    assert "no space beside the equals sign" in message_of([*REQUIRED, "trainer.max_steps=", "3"])
    assert "no space beside the equals sign" in message_of([*REQUIRED, "trainer.max_steps", "=3"])
    assert load("data.format_prompt=", "trainer.max_steps=3").trainer.max_steps == 3


@pytest.mark.parametrize("name", ["save_checkpoint_path", "load_checkpoint_path", "project_name", "experiment_name"])
@pytest.mark.parametrize("value", ["a\nb", "'a\n b'", '"a\\nb"', '"a\\u202eb"', '"a\\eb"'])
def test_a_folder_has_a_name_without_line_ends(name: str, value: str) -> None:
    """YAML would make a space of the first, and the run would be written elsewhere than its user said."""
    with pytest.raises(ConfigError, match="line end"):
        load_config(["config=configs/microgeo/base.yaml", f"trainer.{name}={value}"])


@pytest.mark.parametrize("setting", ["experiment_name=../mine", "project_name=/mine", "experiment_name=a/../../b"])
def test_a_name_leads_to_no_other_folder(setting: str) -> None:
    """A run is written below `checkpoints/`, unless its folder is named."""
    message = message_of([*REQUIRED, f"trainer.{setting}"])
    assert "is a path; give a name, and the run folder as trainer.save_checkpoint_path=FOLDER" in message


def test_the_run_folder_may_be_anywhere(tmp_path: Path) -> None:
    for folder in (str(tmp_path), "../beside"):
        assert load(f"trainer.save_checkpoint_path={folder}").trainer.save_checkpoint_path == folder


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


def test_a_mapping_may_have_lines() -> None:
    config = load_config(["config=configs/microgeo/base.yaml", "worker.reward.reward_function_kwargs={a: 1,\n b: x}"])
    assert config.worker.reward.reward_function_kwargs == {"a": 1, "b": "x"}


def test_an_unknown_key_in_a_base_file_names_the_base_file(tmp_path: Path) -> None:
    write(tmp_path, "base.yaml", "trainer:\n\n  max_step: 3\n")
    message = message_of([write(tmp_path, "run.yaml", "base: base.yaml\n")])
    assert "base.yaml, line 3" in message
    assert "'trainer.max_steps'" in message


@pytest.mark.parametrize(
    ("argument", "part"),
    [
        ("trainer.max_steps", "a.b.c=value"),
        ("trainer.logger=[console", "not valid YAML"),
        ("trainer.max_steps=${data.seed", "no viable alternative"),
        ("worker.actor.optim.speed=3", "Known under 'worker.actor.optim': lr, betas"),
        ("data.seed=abc", "data.seed must be an integer, got the text 'abc'"),
        ("data.seed=1.5", "data.seed must be an integer, got 1.5"),
        ("data.seed=true", "data.seed must be an integer, got true"),
        ("data.seed=null", "data.seed must be an integer, got null"),
        ("data.shuffle=maybe", "data.shuffle must be true or false, got the text 'maybe'"),
        ("worker.actor.optim.lr=fast", "worker.actor.optim.lr must be a number, got the text 'fast'"),
        ("trainer.logger=console", "trainer.logger must be a list, each entry one of console, file, tensorboard"),
        ("trainer.logger=console", "Write trainer.logger=[console]."),
        ("data.train_files=[]", "data.train_files must be text, got []"),
        ("trainer.max_steps=x", "trainer.max_steps must be an integer or null"),
        ("worker.actor.model.override_config=3", "must be a mapping of keys to values, got 3"),
        ("worker.actor.loss_avg_mode=sequence", "one of token, seq, seq_sum, constant, got the text 'sequence'"),
        ("worker.rollout.name=vlm", "Did you mean 'vllm'?"),
        ("data.max_prompt_length=0", "must be at least 1, got 0"),
        ("data.val_batch_size=0", "must be -1 (off) or at least 1, got 0"),
        ("worker.actor.optim.betas=[0.9]", "should have at least 2 items"),
        ("worker.actor.optim.betas=[0.9,1.0]", "betas[1] must be at least 0 and below 1, got 1.0"),
        ("worker.actor.optim.lr=.nan", "lr must be at least 0 and at most 1, got nan"),
        ("worker.actor.optim.lr=1e6", "worker.actor.optim.lr must be at least 0 and at most 1, got 1000000.0"),
        ("worker.rollout.gpu_memory_utilization=1.5", "above 0 and at most 1, got 1.5"),
        ("algorithm.correct_threshold=.nan", "must be a finite number, got nan"),
        ("worker.rollout.val_override_config.n=0", "val_override_config.n must be at least 1, got 0"),
        ("worker.rollout.val_override_config.temprature=1", "Did you mean 'temperature'?"),
        ("worker.rollout.val_override_config.top_k=x", "val_override_config.top_k must be an integer"),
        *((f"worker.critic.cliprange_value={each}", "cliprange_value must be") for each in ("0", "-1", ".inf", "null")),
        ("worker.actor.ulysses_size=2", "must be 1, got 2. Sequence parallelism (Ulysses) is not available"),
        ("worker.rollout.name=sglang", "SGLang is not available: updated weights are handed to the engine"),
        ("worker.hybrid_engine=false", "must be true, got false"),
        ("worker.actor.hybrid_engine=true", "Did you mean 'worker.hybrid_engine'?"),
    ],
)
def test_a_faulty_argument_names_itself_and_what_is_accepted(argument: str, part: str) -> None:
    message = message_of([*REQUIRED, argument])
    assert message.startswith(f"argument '{argument}': ")
    assert part in message


def test_a_required_setting_left_out_is_named_with_its_meaning() -> None:
    message = message_of(["data.train_files=x"])
    assert message.startswith("worker.actor.model.model_path is required and not set.")
    assert "microgeo:model" in message
    assert "is required and not set" in message_of(["data.train_files='???'"])


METHOD = "algorithm:\n  adv_estimator: cepo\n"


@pytest.mark.parametrize(
    ("text", "start", "part"),
    [
        ("data: [1\n", ", line 2: this is not valid YAML", ""),
        ("data: {seed: 1}\ndata: {seed: 2}\n", ", line 2: this is not valid YAML", ""),
        ("- a\n- b\n", ": a config file must have sections", "got a list or a text"),
        ("hello\n", ": a config file must have sections", "got a list or a text"),
        ("base: [x]\n", ", line 1: base must be the path of a YAML file", ""),
        ("# comment\nbase: gone.yaml\n", ", line 2: base file gone.yaml does not exist", ""),
        ("data:\n  seed: ${data.sed}\n", ", line 2: data.seed: the reference cannot be resolved", "'data.sed'"),
        ("trainer:\n  experiment_name: 7\n", ", line 2: trainer.experiment_name must be text, got 7.", "Write it in quotes."),
        ("data:\n  seed: 1\n  max_promt_length: 3\n", ", line 3: unknown key ", "'data.max_prompt_length'?"),
        ("worker:\n  actor:\n    optim:\n      betas:\n      - 0.9\n      - 2\n", ", line 4: ", "optim.betas[1]"),
        ("algorithm:\n  adv_estimator: gpro\n", ", line 2: ", "Did you mean 'grpo'?"),
        (METHOD + "  weight:\n    lambda_init: 3\n", ", line 4: ", "lambda_init"),
        (METHOD + "  weight:\n    clip_radius: 0.5\n  negative:\n    select: lowst_reward\n", ", line 6: ", "lowest_reward"),
        (METHOD + "  weight:\n    lamda_init: 0.5\n", ", line 4: ", "lambda_init"),
        (METHOD + "  weight:\n    lambda_decay_steps: soon\n", ", line 4: ", "soon"),
        (METHOD + "  rlcsd:\n    num_wrong: soon\n", ", line 4: ", "algorithm.rlcsd.num_wrong"),
        (METHOD + "  rlcsd: 3\n", ", line 3: ", "must be a section"),
        (METHOD + "  cepo:\n    lamda_init: 0.5\n", ", line 4: ", "lambda_init"),
    ],
)  # fmt: skip
def test_a_faulty_file_is_named_with_its_line(tmp_path: Path, text: str, start: str, part: str) -> None:
    message = message_of([*REQUIRED, write(tmp_path, "run.yaml", text)])
    assert message.startswith(f"{tmp_path}/run.yaml{start}")
    assert part in message


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


@given(st.lists(st.text(max_size=40), max_size=3))
def test_any_words_for_arguments_give_our_error(words: list[str]) -> None:
    attempt(words)


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
    import yaml

    content = yaml.safe_dump(nested(dict(pairs)), allow_unicode=True).encode("utf-8", "replace")
    attempt([f"config={written(tmp_path_factory, content)}", *REQUIRED])


def written(factory: pytest.TempPathFactory, content: bytes) -> Path:
    file = factory.getbasetemp() / "fuzzed.yaml"
    file.write_bytes(content)
    return file
