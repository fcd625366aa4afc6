"""What the Tab key completes, asked of the shells themselves."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cepo.cli import main

pytestmark = pytest.mark.heavy  # each shell is a process of its own

BASH = """
source "$1"; cd "$2"
IFS='\t'; read -ra COMP_WORDS <<< "$3"; unset IFS
COMP_CWORD=$(( ${#COMP_WORDS[@]} - 1 )); [[ "${COMP_WORDS[-1]}" == _ ]] && COMP_WORDS[-1]=""
compopt() { echo "$@"; }  # there is no prompt whose options could be set
_cepo_completion cepo
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the program `cepo`, which completion starts, and the script of each shell."""
    folder = tmp_path_factory.mktemp("programs")
    (folder / "cepo").write_text(f"#!{sys.executable}\nfrom cepo.cli import script\nscript()\n")
    (folder / "cepo").chmod(0o755)
    for shell in ("bash", "zsh", "fish"):
        with (folder / f"cepo.{shell}").open("w") as printed, contextlib.redirect_stdout(printed):
            assert main(["completion", shell]) == 0
    return folder


def answered(programs: Path, shell: str, *command: str) -> list[str]:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed here")
    variables = {**os.environ, "PATH": os.pathsep.join([str(programs), os.environ["PATH"]])}
    done = subprocess.run([shell, *command], capture_output=True, text=True, timeout=60, check=False, env=variables)
    assert (done.returncode, done.stderr) == (0, "")
    return [line for line in done.stdout.splitlines() if line]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("tr", ["train"]),
        ("report _", ["-o default"]),
        ("merge --ou", ["--out"]),
        ("completion f", ["fish"]),
    ],
)
def test_bash_completes_commands_and_options(programs: Path, tmp_path: Path, words: str, expected: list[str]) -> None:
    line = "\t".join(["cepo", *words.split()])
    assert (
        answered(programs, "bash", "--norc", "-c", BASH, "bash", f"{programs}/cepo.bash", f"{tmp_path}", line)
        == expected
    )


def test_zsh_takes_the_script_and_has_a_function_for_cepo(programs: Path) -> None:
    program = f"autoload -U compinit; compinit -D -u; source {programs}/cepo.zsh; print $_comps[cepo]"
    assert answered(programs, "zsh", "-f", "-c", program) == ["_cepo_completion"]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("cepo tr", ["train"]),
        ("cepo merge --ou", ["--out"]),
    ],
)
def test_fish_completes_commands_and_options(programs: Path, line: str, expected: list[str]) -> None:
    program = f"source {programs}/cepo.fish; complete -C '{line}'"
    assert [found.split("\t")[0] for found in answered(programs, "fish", "--no-config", "-c", program)] == expected


def test_another_shell_is_refused_with_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "bsh"]) == 2
    assert "'bsh' is not one of 'bash', 'zsh', 'fish'" in capsys.readouterr().err
