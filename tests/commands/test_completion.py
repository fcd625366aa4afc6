"""What the Tab key completes, asked of a shell itself."""

from __future__ import annotations

import contextlib
import os
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


@pytest.mark.parametrize(
    ("words", "expected"),
    [("tr", ["train"]), ("report _", ["-o default"]), ("merge --ou", ["--out"]), ("completion f", ["fish"])],
)
def test_bash_completes_commands_and_options(programs: Path, tmp_path: Path, words: str, expected: list[str]) -> None:
    typed = "\t".join(["cepo", *words.split()])
    command = ["bash", "--norc", "-c", BASH, "bash", f"{programs}/cepo.bash", f"{tmp_path}", typed]
    variables = {**os.environ, "PATH": os.pathsep.join([str(programs), os.environ["PATH"]])}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=variables)
    assert (done.returncode, done.stderr) == (0, "")
    assert [line for line in done.stdout.splitlines() if line] == expected


def test_scripts_for_zsh_and_fish_ask_the_same_program(programs: Path) -> None:
    """Click writes them; bash above shows that what they ask for is answered."""
    for shell in ("zsh", "fish"):
        assert f"_CEPO_COMPLETE={shell}_complete" in (programs / f"cepo.{shell}").read_text()
