"""The commands that the pages show resolve to configurations that could be trained."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from cepo.config import check_config, load_config

REPOSITORY = Path(__file__).parents[2]
BLOCK = re.compile(r"^```bash\n(.*?)^```", re.MULTILINE | re.DOTALL)
ARRAY = re.compile(r"^(\w+)=\((.*?)\)$", re.MULTILINE | re.DOTALL)


def commands_of(page: str) -> list[list[str]]:
    """Returns the words behind `cepo train` and `cepo config`, without commands that have variables of the reader's."""
    commands: list[list[str]] = []
    for block in BLOCK.findall(page):
        text = ARRAY.sub("", block.replace("\\\n", " "))
        for name, words in ARRAY.findall(block):
            text = text.replace(f'"${{{name}[@]}}"', " ".join(words.split()))
        for line in text.splitlines():
            is_command = re.match(r" *cepo (train|config) ", line)
            has_variable = "$" in line or "YOUR" in line
            if is_command and not has_variable:
                words = shlex.split(line, comments=True)
                commands.append(words[2:])
    return commands


COMMANDS = [
    (page.stem, words)
    for page in sorted((REPOSITORY / "docs").glob("*.md"))
    for words in commands_of(page.read_text(encoding="utf-8"))
]


def test_an_array_of_settings_is_put_into_its_commands() -> None:
    page = """```bash\nOWN=(a=1\n     'b=[2]')\ncepo train config=x "${OWN[@]}" \\\n    c=3  # why\ncepo train $MORE\n```\n"""
    assert commands_of(page) == [["config=x", "a=1", "b=[2]", "c=3"]]
    assert {"own-data", "configuration", "methods", "data"} <= {name for name, _ in COMMANDS}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A reader's folder: a checkout's examples, and the files that the pages have the reader make."""
    (tmp_path / "examples").symlink_to(REPOSITORY / "examples")
    for name in ("problems.csv", "photos/0001.jpg", "sft-first/train.jsonl", "sft-first/held_out.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    return tmp_path


@pytest.mark.parametrize(("page", "words"), COMMANDS, ids=lambda value: value if isinstance(value, str) else "")
def test_a_pages_command_resolves(page: str, words: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    plan = check_config(load_config(words))
    assert any(line.startswith("length: ") for line in plan), page
