"""The command line itself: versions, help, completion, and `cepo doctor` with whole configurations."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import cepo
import cepo.train
from cepo.commands.cli import cli, main
from cepo.config.listing import settings_of
from cepo.microgeo.world import build_world

REPOSITORY = Path(cepo.__file__).resolve().parents[1]


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(words) == 0
    return capsys.readouterr().out


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys, "--version") == f"cepo {cepo.__version__}\n"


def test_an_unknown_option_is_named_and_not_its_value(capsys: pytest.CaptureFixture[str]) -> None:
    """The option was taken for the data, and its value was blamed."""
    assert main(["show", "microgeo:model", "--step", "99"]) == 2
    assert "No such option '--step'" in capsys.readouterr().err


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    for word in ("--help", "-h", "help"):
        command_list = printed(capsys, word).partition("Commands:")[2]
        assert re.findall(r"^  (\w+)  ", command_list, flags=re.MULTILINE) == list(cli.commands)


def test_help_loads_neither_the_settings_nor_torch() -> None:
    script = "import sys; from cepo.commands.cli import main; main(['--help']); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert not {"torch", "pydantic", "omegaconf", "rich"} & set(done.stdout.split())


def test_help_for_a_section_lists_each_setting_with_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    listed_settings = re.findall(r"^(data\.\w+)=(\S+)$", printed(capsys, "help", "data"), flags=re.MULTILINE)
    assert [key for key, _ in listed_settings] == [
        setting.key for setting in settings_of() if setting.key.startswith("data.")
    ]
    assert dict(listed_settings)["data.max_prompt_length"] == "512"
    assert dict(listed_settings)["data.seed"] == "1"


@pytest.mark.parametrize(
    "words",
    [["--out", "a", "--dry-run"], ["--out=a", "dry_run=true"], ["out=a", "dry_run=yes"]],
)
def test_a_commands_own_argument_has_two_spellings(words: list[str]) -> None:
    options = cli.commands["evaluate"].make_context("evaluate", [*words, "a.b=1"]).params
    assert options["out"] == "a"
    assert options["dry_run"] is True
    assert options["settings"] == ("a.b=1",)


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal that breaks no line of a report."""
    monkeypatch.setenv("COLUMNS", "400")


@pytest.mark.heavy
@pytest.mark.usefixtures("wide")
def test_the_embedded_worlds_config_could_start_here(capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing of its data is read."""
    report = " ".join(printed(capsys, "doctor", "config=configs/microgeo/base.yaml").split())
    assert "1,315,392 parameters" in report
    assert "device │ ok │ CPU (" in report
    assert "Training can start." in report


@pytest.mark.heavy
@pytest.mark.usefixtures("wide")
def test_a_model_of_9_trillion_parameters_exits_1_and_names_lora(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "model"
    shutil.copytree(build_world().model_path, model)
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    config["text_config"] |= {"hidden_size": 65536, "intermediate_size": 2**18, "num_hidden_layers": 128}
    config["text_config"] |= {"num_attention_heads": 512, "num_key_value_heads": 512, "head_dim": 128}
    config["vision_config"]["out_hidden_size"] = 65536
    (model / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert main(["doctor", "config=configs/microgeo/base.yaml", f"worker.actor.model.model_path={model}"]) == 1
    report = " ".join(capsys.readouterr().out.split())
    assert "Training cannot start" in report
    assert "fits each worker │ fail" in report
    assert "-> what helps: LoRA (worker.actor.model.lora.rank=16)" in report
    assert "checkpoints │ fail" in report
    assert report.count("│ fail │") == 2


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("grpo", "It is a method; write cepo train config=FILE algorithm.adv_estimator=grpo"),
        ("geo3k/cepo", "It is a configuration; write cepo train config=geo3k/cepo"),
        ("trainer.max_steps=3", "It is a setting; write cepo train config=FILE trainer.max_steps=3"),
        ("sft", "TRL fine-tunes on worked responses: examples/sft_first"),
        ("serve", "cepo merge --checkpoint CHECKPOINT --out FOLDER writes a model that vllm serve loads"),
        ("webui", "Commands: train, quickstart, config, "),
    ],
)
def test_a_word_that_is_no_command_is_told_its_place(word: str, meant: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([word]) == 2
    assert f"No such command '{word}'. {meant}" in capsys.readouterr().err


def test_a_file_in_the_place_of_a_library_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "trl.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "trl", raising=False)
    assert main(["help", "data"]) == 2
    assert (
        f"{tmp_path / 'trl.py'} takes the place of the library trl; give the file another name"
        in capsys.readouterr().err
    )
