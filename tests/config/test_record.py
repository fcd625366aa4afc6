"""A run's record holds no secrets."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
import yaml
from case_files import cases

from cepo.config import dump_for_record, load_config
from cepo.config.record import decisive_settings
from cepo.files.secrets import masked_argument
from cepo.run_folder.sinks.base import RunDescription
from cepo.run_folder.sinks.external import config_tree
from cepo.run_folder.sinks.tracker import build_tracker

BASE = "config=configs/microgeo/base.yaml"
SECRET = "s3cret-value"


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CEPO_KEY", SECRET)


@pytest.mark.parametrize(
    "argument",
    [
        "worker.reward.reward_function_kwargs={format_weight: 0.5, note: '${oc.env:CEPO_KEY}'}",
        "worker.reward.reward_function_kwargs={nested: {list: [1, 'x-${oc.env:CEPO_KEY}']}}",
        f"worker.reward.reward_function_kwargs={{api_key: {SECRET}}}",
        f"worker.reward.reward_function_kwargs={{judge: {{hf-token: {SECRET}}}}}",
        f"worker.reward.reward_function_kwargs={{headers: {{Authorization: Bearer {SECRET}}}}}",
        f"worker.reward.reward_function_kwargs={{auth: {SECRET}, pwd: {SECRET}, openai_key: [{SECRET}]}}",
        f"worker.reward.reward_function_kwargs={{private_key: '{SECRET}'}}",
        f"worker.reward.reward_function_kwargs={{urls: ['https://judge:{SECRET}@host:8000/v1']}}",
        "trainer.project_name=${oc.env:CEPO_KEY}",
        "data.train_files=['${oc.env:CEPO_KEY}', other]",
    ],
)
def test_a_secret_is_used_and_not_recorded(tmp_path: Path, argument: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config([BASE, argument, "trainer.experiment_name=of-${trainer.project_name}"])
    assert SECRET in repr(config), "the run itself has it"
    text = dump_for_record(config)
    run = RunDescription(folder=tmp_path, config_text=text, max_steps=1)
    monkeypatch.setattr("sys.argv", ["cepo", argument])
    build_tracker(["file"], run).close()
    for file in tmp_path.iterdir():
        assert SECRET not in file.read_text(), file
    assert SECRET not in str(config_tree(run))
    for name in ("config.yaml", "environment.json"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600, name


def test_a_reference_is_recorded_as_written_and_resolves_again(tmp_path: Path) -> None:
    arguments = [BASE, "trainer.project_name=${oc.env:CEPO_KEY}"]
    config = load_config(arguments)
    text = dump_for_record(config)
    assert yaml.safe_load(text)["trainer"]["project_name"] == "${oc.env:CEPO_KEY}"
    (tmp_path / "config.yaml").write_text(text, encoding="utf-8")
    assert load_config([f"config={tmp_path / 'config.yaml'}"]) == config


@pytest.mark.parametrize(
    ("argument", "recorded"),
    cases(__file__, "masked_arguments.yaml"),
)
def test_arguments_are_masked_by_their_names(argument: str, recorded: str) -> None:
    assert masked_argument(argument) == recorded


def test_a_checkpoint_records_a_digest_of_the_rewards_keywords() -> None:
    """Only their equality matters to a resume, and other keywords than those with secret names may be confidential."""

    def recorded(*arguments: str) -> dict[str, object]:
        return decisive_settings(load_config([BASE, *arguments]))

    with_secret = f"worker.reward.reward_function_kwargs={{prompt: {SECRET}}}"
    first = recorded(with_secret)
    assert SECRET not in str(first)
    assert recorded(with_secret) == first
    changed = recorded("worker.reward.reward_function_kwargs={prompt: x}")
    assert first.keys() == changed.keys()
    differing = [key for key in first if first[key] != changed[key]]
    assert differing == ["worker.reward.reward_function_kwargs (digest)"]
