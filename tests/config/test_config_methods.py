"""Sections of methods in a configuration, and methods of plugins."""

from __future__ import annotations

from pathlib import Path

import pytest
from config_arguments import REQUIRED, load, message_of

from cepo.algorithms import Estimator, base, register_estimator
from cepo.config import record_tree
from cepo.errors import ConfigError
from cepo.types import TokenBatch, TokenSignal


def test_only_the_chosen_method_gets_its_whole_section() -> None:
    run = load("algorithm.adv_estimator=cepo", "algorithm.rlcsd.num_wrong=2")
    assert set(run.methods) == {"cepo", "rlcsd"}
    assert run.methods["rlcsd"]["num_wrong"] == 2
    assert run.methods["cepo"]["negative"]["source"] == "peer_answer"


def test_a_section_of_no_method_is_an_unknown_key() -> None:
    message = message_of(["algorithm.rlcds.num_wrong=1"])
    assert "unknown key 'algorithm.rlcds'" in message
    assert "Did you mean 'rlcsd'?" in message


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("cepo.teacher.source=ema", "algorithm.teacher.source"),
        ("rlsd.clip_radius=0.2", "algorithm.weight.clip_radius"),
        ("cepo.baseline=hindsight", "algorithm.advantage.baseline"),
        ("opsd.weight=2", "algorithm.distillation.weight"),
        ("sdpo.divergence.kind=jsd", "algorithm.distillation.divergence.kind"),
        ("gae.gae_lambda=0.9", "algorithm.lam"),
    ],
)
def test_a_key_of_0_3_is_an_error_that_names_the_present_one(old: str, new: str) -> None:
    argument = f"algorithm.{old}"
    message = message_of([argument])
    assert message == f"argument '{argument}': unknown key '{argument.partition('=')[0]}'. Did you mean '{new}'?"
    load(f"{new}={old.partition('=')[2]}")


def test_another_method_keeps_settings_and_brings_its_presets() -> None:
    given = ["algorithm.weight.clip_radius=0.2", "algorithm.positive.source=peer_full"]
    runs = {name: load(f"algorithm.adv_estimator={name}", *given) for name in ("cepo", "rlsd", "sdpo")}
    assert [run.methods[name]["positive"]["source"] for name, run in runs.items()] == ["peer_full"] * 3
    assert [runs[name].methods[name]["weight"]["clip_radius"] for name in ("cepo", "rlsd")] == [0.2, 0.2]
    assert [run.algorithm.teacher.source for run in runs.values()] == ["actor", "actor", "ema"]
    chosen = load("algorithm.adv_estimator=sdpo", "algorithm.teacher.source=snapshot")
    assert chosen.methods["sdpo"]["teacher"]["source"] == "snapshot"
    assert chosen.methods["sdpo"]["distillation"]["divergence"]["kind"] == "jsd"


def test_a_record_has_only_the_settings_that_the_method_reads() -> None:
    recorded = record_tree(load("algorithm.adv_estimator=grpo", "algorithm.teacher.source=ema"))["algorithm"]
    assert recorded["advantage"] == {"ddof": 1, "scale": "std"}
    assert not {"teacher", "weight", "gamma"} & set(recorded)


def test_a_plugins_field_cannot_be_named_as_a_shared_section(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "_registry", dict(base._registry))

    class Wrong(Estimator):
        class Config:
            weight: float = 1.0

        def signal(self, batch: TokenBatch, *, step: int) -> TokenSignal:
            raise NotImplementedError

    with pytest.raises(ConfigError, match=r"algorithm\.weight is shared by the methods and has the type WeightConfig"):
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
    monkeypatch.setattr(base, "_registry", dict(base._registry))
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
    assert "'nothing' not found" in message_of([*REQUIRED, "trainer.plugins=['${nothing}']"])
    assert "trainer.plugins must be a list" in message_of([*REQUIRED, "trainer.plugins=a.py"])
