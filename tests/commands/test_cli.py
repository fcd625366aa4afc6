"""The command line itself: versions, help, and what is said where no command was given."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import cepo
import cepo.train
from cepo.cli import COMMANDS, main
from cepo.commands.checkpoint_arguments import split_arguments
from cepo.config.listing import settings_of

REPOSITORY = Path(cepo.__file__).resolve().parents[1]


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *arguments], cwd=REPOSITORY, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.parametrize("word", ["--version", "-V"])
def test_the_version_is_that_of_the_package(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([word]) == 0
    assert capsys.readouterr().out == f"cepo {cepo.__version__}\n"


@pytest.mark.parametrize("word", ["--help", "-h", "help"])
def test_help_names_every_command(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([word]) == 0
    assert re.findall(r"^  (\w+) ", capsys.readouterr().out, flags=re.MULTILINE) == list(COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself_and_begins_nothing(name: str) -> None:
    done = command("cepo", name, "--help")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: ")
    assert f"cepo {name}" in done.stdout.splitlines()[0]
    assert done.stderr == ""


def test_the_module_form_of_training_has_the_same_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--help"]) == 0
    assert command("cepo.train", "--help").stdout == capsys.readouterr().out


def test_help_for_a_section_lists_each_setting_with_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--help", "data"]) == 0
    shown = re.findall(r"^(data\.\w+)=(\S+)$", capsys.readouterr().out, flags=re.MULTILINE)
    assert [key for key, _ in shown] == [setting.key for setting in settings_of() if setting.key.startswith("data.")]
    assert dict(shown)["data.max_prompt_length"] == "512"
    assert dict(shown)["data.seed"] == "1"


def test_help_for_a_method_has_its_settings(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--help", "algorithm.weight"]) == 0
    assert "algorithm.weight.clip_radius=" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["train", "config"])
def test_help_for_a_section_that_there_is_not_names_the_nearest(
    name: str, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    assert main([name, "--help", "worker.rolout"]) == 2
    assert "Did you mean 'worker.rollout'?" in capsys.readouterr().err + caplog.text


def test_no_command_at_all_is_told_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "usage: cepo COMMAND" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("word", "part"),
    [
        ("trian", "Did you mean 'train'?"),
        ("evalute", "Did you mean 'evaluate'?"),
        ("--train", "Did you mean 'train'?"),
        ("xyz", "unknown command 'xyz'. Commands: train, quickstart, config"),
        ("base.yaml", "write cepo train config=base.yaml"),
        ("config=base.yaml", "write cepo train config=base.yaml"),
    ],
)
def test_a_wrong_command_gets_the_nearest_one(word: str, part: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([word]) == 2
    error = capsys.readouterr().err
    assert part in error
    assert len(error.splitlines()) == 1


def test_python_3_6_reads_the_first_file_and_3_10_is_refused(tmp_path: Path) -> None:
    source = (REPOSITORY / "cepo" / "__init__.py").read_text(encoding="utf-8")
    compile(source, "cepo/__init__.py", "exec", flags=0x400, _feature_version=6)  # ast.PyCF_ONLY_AST
    older = tmp_path / "cepo.py"
    older.write_text(f"import sys\nsys.version_info = (3, 9, 18)\n{source}", encoding="utf-8")
    done = subprocess.run([sys.executable, str(older)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "this is Python 3.9" in done.stderr
    assert "PYTHON=python3.11" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    "words", [["--out", "a", "--dry-run=true"], ["--out=a", "dry_run=true"], ["out=a", "--dry_run", "true"]]
)
def test_a_commands_own_argument_has_two_spellings(words: list[str]) -> None:
    own, settings = split_arguments([*words, "a.b=1"], ("out", "dry_run"))
    assert (own, settings) == ({"out": "a", "dry_run": "true"}, ["a.b=1"])


def test_an_option_may_be_written_like_a_setting(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", str(tmp_path), "out=x.docx"]) == 2
    assert "--out x.docx: the ending must be one of .md, .tex, .csv, .json, .html" in capsys.readouterr().err
