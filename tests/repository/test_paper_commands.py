"""Every command in the table of the paper's tables and figures resolves to a configuration that could be trained."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cepo.config import check_config, load_config

REPOSITORY = Path(__file__).parents[2]
CONFIGS = REPOSITORY / "configs"
PAGE = REPOSITORY / "docs" / "geo3k.md"


def rows_of_the_table() -> list[list[str]]:
    section = PAGE.read_text(encoding="utf-8").partition("## The paper's tables and figures, by command")[2]
    lines = section.partition("\n## ")[0].splitlines()
    rows: list[list[str]] = []
    for line in lines:
        if line.startswith("| "):
            rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows[2:]  # after the header and its line


def configurations_of(commands: str) -> list[Path]:
    """Returns the files that the sweeps and launchers in a cell train, and those that `config=` names."""
    files: list[Path] = []
    for arguments in re.findall(r"sweep\.sh ([^`]+)`", commands):
        for name in arguments.split():
            place = CONFIGS / "geo3k" / name
            files.extend(sorted(place.rglob("*.yaml")) if place.is_dir() else [place.with_name(place.name + ".yaml")])
    files.extend(CONFIGS / "geo3k" / f"{name}.yaml" for name in re.findall(r"scripts/geo3k/(\w+)\.sh`", commands))
    files.extend(CONFIGS / f"{name}.yaml" for name in re.findall(r"config=(\w+/\w+)", commands))
    return files


def test_the_table_has_every_table_and_figure_of_the_paper() -> None:
    names = " ".join(row[0] for row in rows_of_the_table())
    for kind, numbers in (("Figure", ("1", "2", "3a", "3b", "3c", "4", "5")), ("Table", ("1", "2", "3", "4", "5"))):
        for number in numbers:
            assert re.search(rf"{kind} {number}\b", names), f"{kind} {number}"
    assert "Tables 6 and 7" in names


@pytest.mark.parametrize("row", rows_of_the_table(), ids=lambda row: row[0])
def test_the_commands_of_a_row_resolve(row: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    _, commands, difference = row
    assert difference
    files = configurations_of(commands)
    if not files:
        assert commands.startswith(("none:", "the same runs:"))
    for file in files:
        plan = check_config(load_config([f"config={file}"]))
        assert any(line.startswith("length: ") for line in plan)


@pytest.mark.parametrize("file", sorted((CONFIGS / "mmfine").glob("*_solutions.yaml")), ids=lambda file: file.stem)
def test_solutions_of_mmfine_are_read_whole(file: Path) -> None:
    config = load_config([f"config={file}"])
    positive = config.methods[config.algorithm.adv_estimator]["positive"]
    assert (positive["source"], positive["num_tokens"]) == ("solution", 4096)
    assert config.data.solution_key == "qwen3vl_235b_thinking_response"
    assert config.data.max_prompt_length >= 4096 + 4096
