"""Reading a configuration: order of sources, base files, references, kinds of values, methods' sections, round trip."""

from __future__ import annotations

import runpy
from dataclasses import replace
from pathlib import Path

import pytest
from config_arguments import REQUIRED, load, message_of, write
from hypothesis import given, settings
from hypothesis import strategies as st

from cepo.algorithms import Estimator, available_estimators, register_estimator, registry
from cepo.config import dump_config, load_config, record_tree
from cepo.config.listing import all_settings
from cepo.config.worker_schema import OptimConfig
from cepo.errors import ConfigError
from cepo.types import TokenBatch, TokenSignal


def test_the_command_line_beats_the_file_which_beats_defaults(tmp_path: Path) -> None:
    file = write(tmp_path, "run.yaml", "data: {seed: 5, max_prompt_length: 7}\n")
    run = load(file, "data.seed=9")
    assert run.data.seed == 9
    assert run.data.max_prompt_length == 7
    assert run.data.max_response_length == 512


@pytest.mark.parametrize(
    ("settings", "seeds"), [([], (5, 5, 5)), (["data.seed=2"], (5, 2, 5)), (["worker.rollout.seed=9"], (5, 5, 9))]
)
def test_one_seed_sets_all_that_are_not_set(tmp_path: Path, settings: list[str], seeds: tuple[int, int, int]) -> None:
    run = load(write(tmp_path, "run.yaml", "trainer: {seed: 5}\ndata: {shuffle: true}\n"), *settings)
    assert (run.trainer.seed, run.data.seed, run.worker.rollout.seed) == seeds


def test_a_wrong_seed_of_the_run_is_the_only_fault() -> None:
    """The seeds that follow it hold the same text, and no file sets them."""
    trainer_fault = "argument 'trainer.seed=x': trainer.seed must be an integer, got the text 'x'."
    quickstart = ["config=microgeo/quickstart", "trainer.seed=x"]
    assert message_of(quickstart) == trainer_fault
    data_fault = "argument 'data.seed=y': data.seed must be an integer, got the text 'y'."
    assert message_of([*quickstart, "data.seed=y"]) == f"{data_fault}\n{trainer_fault}"


def test_base_files_lie_underneath_and_may_chain(tmp_path: Path) -> None:
    (tmp_path / "low").mkdir()
    write(tmp_path / "low", "lowest.yaml", "data: {seed: 1, max_prompt_length: 11, max_response_length: 12}\n")
    write(tmp_path / "low", "middle.yaml", "base: lowest.yaml\ndata: {seed: 2, max_prompt_length: 21}\n")
    file = write(tmp_path, "top.yaml", "base: low/middle.yaml\ndata: {seed: 3}\n")
    run = load(file)
    assert run.data.seed == 3
    assert run.data.max_prompt_length == 21
    assert run.data.max_response_length == 12


def test_base_files_in_a_circle_are_an_error_that_shows_it(tmp_path: Path) -> None:
    write(tmp_path, "one.yaml", "base: two.yaml\n")
    message = message_of([write(tmp_path, "two.yaml", "base: one.yaml\n")])
    assert "circle" in message
    assert f"{tmp_path}/two.yaml -> {tmp_path}/one.yaml -> {tmp_path}/two.yaml" in message


def test_a_reference_to_a_setting_follows_the_value_that_wins(tmp_path: Path) -> None:
    file = write(tmp_path, "run.yaml", "data: {max_prompt_length: '${data.max_response_length}'}\n")
    assert load(file).data.max_prompt_length == 512
    assert load(file, "data.max_response_length=99").data.max_prompt_length == 99


def test_a_value_is_read_as_its_settings_type(monkeypatch: pytest.MonkeyPatch) -> None:
    """Truth values in every usual spelling, numbers from the environment, and text like a number."""
    for text, value in {"yes": True, "1": True, "True": True, "off": False, "0": False}.items():
        assert load(f"data.shuffle={text}").data.shuffle is value
    monkeypatch.setenv("CEPO_TEST_STEPS", "17")
    assert load("trainer.max_steps=${oc.env:CEPO_TEST_STEPS}").trainer.max_steps == 17
    assert load("trainer.experiment_name=007").trainer.experiment_name == "007"


def test_a_mapping_is_merged_from_a_dict_or_from_dots() -> None:
    for argument in ('worker.rollout.val_override_config={"n": 16}', "worker.rollout.val_override_config.n=16"):
        run = load("worker.rollout.val_override_config.temperature=0", argument)
        assert run.worker.rollout.val_override_config == {"temperature": 0.0, "n": 16}
        assert isinstance(run.worker.rollout.val_override_config["temperature"], float)


def test_an_empty_section_in_a_file_keeps_its_defaults(tmp_path: Path) -> None:
    run = load(write(tmp_path, "run.yaml", "data:\n  # nothing here\nworker:\n  rollout:\n"))
    assert run.data.seed == 1
    assert run.worker.rollout.n == 1


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


@pytest.mark.parametrize(
    ("settings", "sizes"),
    [([], (4, 4)), (["worker.actor.fsdp.fsdp_size=2"], (2, 4)), (["worker.critic.fsdp.fsdp_size=-1"], (4, -1))],
)
def test_weights_are_sharded_within_a_machine_unless_set(settings: list[str], sizes: tuple[int, int]) -> None:
    run = load_config(["config=microgeo/quickstart", "trainer.nnodes=2", "trainer.n_gpus_per_node=4", *settings])
    assert (run.worker.actor.fsdp.fsdp_size, run.worker.critic.fsdp.fsdp_size) == sizes


def test_there_are_at_most_230_settings() -> None:
    """Those of the methods and of the critic included; a declaration that actor and critic share counts once."""
    script = Path(__file__).parents[2] / "scripts" / "generate_docs.py"
    declared = runpy.run_path(str(script))["declared_settings"]()
    assert len(declared) <= 230
    keys = {setting.key for setting in declared}
    assert {"worker.actor.optim.lr", "worker.critic.cliprange_value", "algorithm.rlcsd.num_wrong"} <= keys
    repeated = {setting.key for setting in all_settings()} - keys
    assert repeated
    assert all(key.startswith("worker.critic.") for key in repeated)


def test_every_setting_has_a_description_of_one_line() -> None:
    settings = all_settings()
    assert len({setting.key for setting in settings}) == len(settings) > 150
    for setting in settings:
        assert setting.help.endswith("."), setting.key
        assert "\n" not in setting.help, setting.key
    assert OptimConfig().betas == [0.9, 0.999]


def test_methods_with_a_written_section_get_theirs_whole() -> None:
    message = message_of(["algorithm.rlcds.num_wrong=1"])
    assert "unknown key 'algorithm.rlcds.num_wrong'. Did you mean 'algorithm.rlcsd.num_wrong'?" in message
    run = load("algorithm.adv_estimator=cepo", "algorithm.rlcsd.num_wrong=2")
    assert set(run.methods) == {"cepo", "rlcsd"}
    assert run.methods["rlcsd"]["num_wrong"] == 2
    assert run.methods["cepo"]["negative"]["source"] == "peer_answer"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("cepo.teacher.source=ema", "algorithm.teacher.source"),
        ("rlsd.clip_radius=0.2", "algorithm.weight.clip_radius"),
        ("cepo.baseline=hindsight", "algorithm.advantage.baseline"),
        ("opsd.weight=2", "algorithm.distillation.weight"),
        ("sdpo.divergence.kind=jsd", "algorithm.distillation.divergence.kind"),
    ],
)
def test_a_key_of_0_3_is_an_error_that_names_the_present_one(old: str, new: str) -> None:
    argument = f"algorithm.{old}"
    message = message_of([argument])
    assert message == f"argument '{argument}': unknown key '{argument.partition('=')[0]}'. Did you mean '{new}'?"
    load(f"{new}={old.partition('=')[2]}")


def test_another_method_keeps_settings_and_brings_its_presets() -> None:
    arguments = ["algorithm.weight.clip_radius=0.2", "algorithm.positive.source=peer_full"]
    runs = {name: load(f"algorithm.adv_estimator={name}", *arguments) for name in ("cepo", "rlsd", "sdpo")}
    for name, run in runs.items():
        assert run.methods[name]["positive"]["source"] == "peer_full"
    for name in ("cepo", "rlsd"):
        assert runs[name].methods[name]["weight"]["clip_radius"] == 0.2
        assert runs[name].algorithm.teacher.source == "actor"
    assert runs["sdpo"].algorithm.teacher.source == "ema"
    with_snapshot = load("algorithm.adv_estimator=sdpo", "algorithm.teacher.source=snapshot")
    sdpo = with_snapshot.methods["sdpo"]
    assert sdpo["teacher"]["source"] == "snapshot"
    assert sdpo["distillation"]["divergence"]["kind"] == "jsd"


def test_a_record_has_only_the_settings_that_the_method_reads() -> None:
    recorded = record_tree(load("algorithm.adv_estimator=grpo", "algorithm.teacher.source=ema"))["algorithm"]
    assert recorded["advantage"] == {"ddof": 1, "scale": "std"}
    assert not {"teacher", "weight", "gamma"} & set(recorded)


def test_a_plugins_field_cannot_be_named_as_a_shared_section(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry.METHODS, "classes", dict(registry.METHODS.classes))

    class Wrong(Estimator):
        class Config:
            weight: float = 1.0

        def signal(self, batch: TokenBatch, *, step: int) -> TokenSignal:
            raise NotImplementedError

    with pytest.raises(ConfigError, match=r"algorithm\.weight is shared and has the type WeightConfig"):
        register_estimator("wrong_for_config_test")(Wrong)


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


def test_a_plugin_is_imported_before_its_section_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry.METHODS, "classes", dict(registry.METHODS.classes))
    plugin = tmp_path / "custom_for_config_test.py"
    plugin.write_text(PLUGIN.format(name="custom_for_config_test"))
    arguments = [f"trainer.plugins=[{plugin}]", "algorithm.adv_estimator=custom_for_config_test"]
    run = load(*arguments)
    assert run.methods["custom_for_config_test"] == {"strength": 0.25}
    message = message_of([*REQUIRED, *arguments, "algorithm.custom_for_config_test.strenght=1"])
    assert "strength" in message


def test_a_plugin_that_is_missing_or_fails_is_named(tmp_path: Path) -> None:
    assert "gone.py" in message_of([*REQUIRED, "trainer.plugins=[gone.py]"])
    broken = tmp_path / "broken_for_config_test.py"
    broken.write_text("raise RuntimeError('no luck')\n")
    message = message_of([*REQUIRED, f"trainer.plugins=[{broken}]"])
    assert "RuntimeError: no luck" in message
    ends = tmp_path / "ends_for_config_test.py"
    ends.write_text("raise SystemExit(2)\n")
    assert "SystemExit: 2" in message_of([*REQUIRED, f"trainer.plugins=[{ends}]"])
    assert "'nothing' not found" in message_of([*REQUIRED, "trainer.plugins=['${nothing}']"])
    assert "trainer.plugins must be a list" in message_of([*REQUIRED, "trainer.plugins=a.py"])


LOSS_PLUGIN = """
from cepo.losses import PolicyLoss, register_loss

@register_loss("{name}")
class Custom(PolicyLoss):
    class Config:
        clip_ratio_high: float = 4.0
        strength: float = 0.25

    def token_losses(self, tokens):
        return -tokens.advantages * tokens.ratio
"""


@pytest.fixture
def loss_plugin(tmp_path: Path) -> str:
    """The argument that names a file with the loss `loss_for_config_test`."""
    plugin = tmp_path / "loss_for_config_test.py"
    plugin.write_text(LOSS_PLUGIN.format(name="loss_for_config_test"))
    return f"trainer.plugins=[{plugin}]"


def test_a_loss_of_ones_own_has_its_section_and_its_presets(loss_plugin: str) -> None:
    """Its preset of a shared setting holds unless the setting is set; its own settings have their defaults."""
    chosen = "worker.actor.loss_type=loss_for_config_test"
    actor = load(loss_plugin, chosen).worker.actor
    assert actor.clip_ratio_low == 0.2
    assert actor.clip_ratio_high == 4.0
    assert actor.loss == {"loss_for_config_test": {"strength": 0.25}}
    changed = load(
        loss_plugin, chosen, "worker.actor.loss.loss_for_config_test.strength=3", "worker.actor.clip_ratio_high=2"
    )
    assert changed.worker.actor.clip_ratio_high == 2.0
    assert changed.worker.actor.loss == {"loss_for_config_test": {"strength": 3.0}}
    assert load(loss_plugin).worker.actor.clip_ratio_high == 0.28


def test_the_record_of_a_loss_of_ones_own_loads_as_the_same_run(loss_plugin: str, tmp_path: Path) -> None:
    run = load(loss_plugin, "worker.actor.loss_type=loss_for_config_test")
    file = tmp_path / "record.yaml"
    file.write_text(dump_config(run))
    assert load_config([f"config={file}"]) == run


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("worker.actor.loss_type=loss_for_confg_test", "Did you mean 'loss_for_config_test'? Known: cispo, default,"),
        ("worker.actor.loss.loss_for_config_test.strenght=1", "Did you mean 'strength'"),
        ("worker.actor.loss.loss_for_config_test.clip_ratio_high=1", "Write worker.actor.clip_ratio_high."),
        ("worker.actor.loss.loss_for_config_test.strength=much", "strength must be a number, got the text 'much'"),
        ("worker.actor.loss.loss_for_config_test=3", "worker.actor.loss"),
        ("worker.actor.loss.sapoo.x=1", "no policy loss has this name. Did you mean 'sapo'?"),
        ("worker.actor.loss.sapo.tau_positive=2", "Write worker.actor.tau_positive."),
    ],
)
def test_a_mistake_in_a_losss_settings_is_named(loss_plugin: str, argument: str, message: str) -> None:
    text = message_of([*REQUIRED, loss_plugin, argument])
    assert text.startswith(f"argument '{argument}'")
    assert message in text


@pytest.mark.parametrize(
    ("in_file", "arguments", "expected"),
    [
        ("", ["data.rollout_batch_size=8"], 8),
        ("data: {rollout_batch_size: 8}\n", [], 8),
        ("worker: {actor: {global_batch_size: 32}}\n", ["data.rollout_batch_size=8"], 8),
        ("worker: {actor: {global_batch_size: 4}}\n", ["data.rollout_batch_size=8"], 4),
        ("", ["data.rollout_batch_size=8", "worker.actor.global_batch_size=32"], 32),
        ("data: {rollout_batch_size: 8}\nworker: {actor: {global_batch_size: 32}}\n", [], 32),
        ("", [], 256),
    ],
)
def test_a_smaller_rollout_batch_alone_is_enough(
    tmp_path: Path, in_file: str, arguments: list[str], expected: int
) -> None:
    """An optimizer batch that the user has not chosen beside it follows; one that they have chosen remains and is an error."""
    words = [write(tmp_path, "run.yaml", in_file)] if in_file else []
    assert load(*words, *arguments).worker.actor.global_batch_size == expected
