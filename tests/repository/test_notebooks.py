"""The notebooks of examples/ run from top to bottom, in a folder of their own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from isolation import restored_process

REPOSITORY = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted(REPOSITORY.glob("examples/*.ipynb"))


def cells(notebook: Path) -> list[dict[str, Any]]:
    return json.loads(notebook.read_text(encoding="utf-8"))["cells"]


def executed(notebook: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The names that the cells define; plain Python, without magic commands, so that no kernel is needed."""
    monkeypatch.chdir(folder)
    names: dict[str, Any] = {"__name__": "__main__"}
    with restored_process():
        for number, cell in enumerate(each for each in cells(notebook) if each["cell_type"] == "code"):
            exec(compile("".join(cell["source"]), f"{notebook.name}, code cell {number + 1}", "exec"), names)
    return names


def test_there_are_two_notebooks_without_outputs() -> None:
    """Outputs would change with each run, and grow the repository."""
    assert [notebook.name for notebook in NOTEBOOKS] == ["first_run.ipynb", "own_parts.ipynb"]
    for notebook in NOTEBOOKS:
        assert notebook.stat().st_size < 12_000
        assert [cell["outputs"] for cell in cells(notebook) if cell.get("outputs")] == []


@pytest.mark.heavy
def test_the_first_run_shows_the_credit_of_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = executed(NOTEBOOKS[0], tmp_path, monkeypatch)
    assert list(names["correct"].shares) == list(names["run"].metrics["reward/correct"])
    assert len(names["correct"].shares) == 4
    credit = names["credit"]
    assert len(credit) > 0
    assert list(credit) == ["tokens", "delta", "weight", "token_advantages"]
    assert (tmp_path / "first_run" / "report.html").is_file()


@pytest.mark.heavy
def test_own_data_reward_and_method_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The advantage of each response grows from its first token to its last."""
    names = executed(NOTEBOOKS[1], tmp_path, monkeypatch)
    rollouts = names["run"].rollouts
    learning = [
        advantages for advantages in rollouts["token_advantages"] if len(advantages) > 1 and advantages[-1] != 0
    ]
    assert learning, "all groups had equal rewards"
    assert all(abs(each[0]) < abs(each[-1]) for each in learning)
    assert (tmp_path / "own_parts_model" / "config.json").is_file()
