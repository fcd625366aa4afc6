"""What the Tab key completes, asked of the shells themselves."""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from cepo.cli import COMMANDS, main
from cepo.commands.completion import OPTIONS, TAKE_SETTINGS
from cepo.config.listing import settings_of

BASH = """
source "$1"; cd "$2"
COMP_LINE="$3" COMP_POINT=${#3}
read -ra COMP_WORDS <<< "$3"; [[ "$3" == *' ' ]] && COMP_WORDS+=("")
COMP_CWORD=$(( ${#COMP_WORDS[@]} - 1 ))
compopt() { :; }  # there is no prompt whose options could be set
_cepo
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """The completion of the shell that the test names."""
    shell = request.param
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed here")
    file = tmp_path_factory.mktemp("completion") / f"cepo.{shell}"
    with file.open("w", encoding="utf-8") as printed, contextlib.redirect_stdout(printed):
        assert main(["completion", shell]) == 0
    return file


def answered(command: list[str]) -> list[str]:
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return [line.strip() for line in done.stdout.splitlines() if line.strip()]


@pytest.mark.parametrize("script", ["bash"], indirect=True)
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("cepo ", [*COMMANDS, "--help", "--version"]),
        ("cepo tr", ["train"]),
        ("cepo train trainer.max_step", ["trainer.max_steps="]),
        ("cepo train config=a.yaml worker.rollout.na", ["worker.rollout.name="]),
        ("cepo train worker.rollout.name=", ["auto", "vllm", "transformers"]),
        ("cepo train worker.rollout.name=v", ["vllm"]),
        ("cepo train data.shuffle=t", ["true"]),
        ("cepo train algorithm.adv_estimator=rl", ["rlcsd", "rloo", "rlsd"]),
        ("cepo config algorithm.distillation.divergence.clip", ["algorithm.weight.clip_radius="]),
        ("cepo evaluate checkp", ["checkpoint="]),
        ("cepo train checkp", []),
        ("cepo train config=ru", ["run.yaml"]),
        ("cepo train --", ["--help"]),
        ("cepo report ru", ["run.yaml"]),
        ("cepo merge --up", ["--upload"]),
        ("cepo completion f", ["fish"]),
    ],
)
def test_bash_completes_commands_settings_their_values_and_files(
    script: Path, tmp_path: Path, line: str, expected: list[str]
) -> None:
    (tmp_path / "run.yaml").touch()
    assert answered(["bash", "--norc", "-c", BASH, "bash", str(script), str(tmp_path), line]) == expected


@pytest.mark.parametrize("script", ["bash"], indirect=True)
def test_bash_completes_every_key_and_words_in_place_of_files(script: Path, tmp_path: Path) -> None:
    for command in TAKE_SETTINGS:
        found = answered(["bash", "--norc", "-c", BASH, "bash", str(script), str(tmp_path), f"cepo {command} "])
        assert {f"{setting.key}=" for setting in settings_of()} | {"config="} <= set(found)
        assert len(found) == len(set(found))


@pytest.mark.parametrize("script", ["zsh"], indirect=True)
def test_zsh_takes_the_script_and_has_a_function_for_cepo(script: Path) -> None:
    program = f"autoload -U compinit; compinit -D -u; source {script}; print $_comps[cepo]; print $+functions[_cepo]"
    assert answered(["zsh", "-f", "-c", program]) == ["_cepo", "1"]


ZSH = """
compdef() { :; }; _describe() { print -l -- $commands; }; _files() { print files; }; compset() { :; }
compadd() { print -l -- ${(P)@[-1]}; }  # the array that its last argument names
source $1; words=(${(s: :)2} ""); CURRENT=$3; PREFIX=$4; _cepo
"""


@pytest.mark.parametrize("script", ["zsh"], indirect=True)
@pytest.mark.parametrize(
    ("line", "current", "prefix", "expected"),
    [
        ("cepo", 2, "", "train:train a model"),
        ("cepo train", 3, "trainer.max_s", "trainer.max_steps"),
        ("cepo train", 3, "worker.rollout.name=v", "vllm"),
        ("cepo train", 3, "data.train_files=", "files"),
    ],
)
def test_zsh_offers_commands_settings_their_values_and_files(
    script: Path, line: str, current: int, prefix: str, expected: str
) -> None:
    assert expected in answered(["zsh", "-f", "-c", ZSH, "zsh", str(script), line, str(current), prefix])


@pytest.mark.parametrize("script", ["fish"], indirect=True)
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("cepo tr", ["train"]),
        ("cepo train worker.rollout.name=v", ["worker.rollout.name=vllm"]),
        ("cepo train trainer.max_step", ["trainer.max_steps="]),
        ("cepo merge --up", ["--upload"]),
    ],
)
def test_fish_completes_commands_settings_and_their_values(
    script: Path, tmp_path: Path, line: str, expected: list[str]
) -> None:
    program = f"cd {tmp_path}; source {script}; complete -C '{line}'"
    assert [found.split("\t")[0] for found in answered(["fish", "--no-config", "-c", program])] == expected


@pytest.mark.parametrize("command", OPTIONS)
def test_the_completed_options_are_those_of_the_commands_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with contextlib.suppress(SystemExit):  # argparse ends the process after its help
        main([command, "--help"])
    assert set(re.findall(r"--[a-z][a-z-]*", capsys.readouterr().out)) - {"--help"} == set(OPTIONS[command])


def test_another_shell_is_refused_with_the_nearest_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "bsh"]) == 2
    assert "Did you mean 'bash'?" in capsys.readouterr().err
