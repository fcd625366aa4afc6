"""The package's one door: what it imports, who imports what of it, and the reward functions for other trainers."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import cepo
from cepo import answers

PACKAGE = Path(cepo.__file__).parent
ANSWERS = PACKAGE / "answers"
FORMER_NAMES = {
    "answers_equal": answers.equal,
    "extract_answer": answers.marked_answer,
    "normalise_answer": answers.normal_form,
    "is_numeric_answer": answers.is_number,
    "decimal_value": answers.decimal_value,
    "value_key": answers.value_key,
}


def modules_imported_by(file: Path) -> Iterator[str]:
    """The modules of cepo that a file imports."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            names = [str(node.module)]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        for name in names:
            if name.partition(".")[0] == "cepo":
                yield name


@pytest.mark.parametrize("file", sorted(ANSWERS.glob("*.py")), ids=lambda file: file.name)
def test_answers_import_nothing_else_of_cepo(file: Path) -> None:
    foreign_modules = [name for name in modules_imported_by(file) if not name.startswith("cepo.answers.")]
    assert foreign_modules == []


def test_other_rooms_come_through_the_door() -> None:
    behind_the_door: list[str] = []
    for file in sorted(PACKAGE.rglob("*.py")):
        if file.parent == ANSWERS:
            continue
        for name in modules_imported_by(file):
            if name.startswith("cepo.answers."):
                behind_the_door.append(f"{file}: {name}")
    assert behind_the_door == []


@pytest.mark.heavy
def test_the_door_needs_no_torch() -> None:
    program = "import sys, cepo.answers; print({'torch', 'pydantic', 'transformers'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "set()"


@pytest.mark.parametrize("name", FORMER_NAMES)
def test_the_names_of_cepo_rewards_stay(name: str) -> None:
    rewards = importlib.import_module("cepo.rewards")
    assert getattr(rewards, name) is FORMER_NAMES[name]


def test_the_former_module_stays_for_one_release_and_warns() -> None:
    sys.modules.pop("cepo.rewards.answers", None)
    with pytest.warns(DeprecationWarning, match="is now cepo.rewards"):
        former = importlib.import_module("cepo.rewards.answers")
    assert former.answers_equal("1/2", "0.5")


def test_trl_rewards_texts_and_conversations() -> None:
    conversation = [{"role": "assistant", "content": r"so \boxed{500 cm}"}]
    parts = [{"role": "assistant", "content": [{"type": "text", "text": "The answer is 5, as drawn."}]}]
    rewards = answers.trl_reward(
        completions=[r"\boxed{5 m}", conversation, parts, "I do not know."], answer=["5 m"] * 4, prompts=["?"] * 4
    )
    assert rewards == [1.0, 1.0, 1.0, 0.0]


def test_verl_rewards_one_response() -> None:
    assert answers.verl_reward("geo3k", r"so \boxed{60^\circ}", "60", extra_info={"index": 1}) == 1.0
    assert answers.verl_reward("geo3k", r"so \boxed{61}", "60") == 0.0
