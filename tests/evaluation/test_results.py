"""Damaged folders of evaluations."""

from __future__ import annotations

from pathlib import Path

import pytest
from evaluation_folders import evaluation

from cepo.commands.cli import main

DAMAGES = [
    *(("evaluation.json", text) for text in (
        "", "[]", "{}", '{"model": "", "benchmarks": 5}', '{"model": "", "benchmarks": {"": 5}}',
    )),
    *(("generations.jsonl", f"{text}\n") for text in (
        "null", '{"a": 1}', "[" * 100_000,
        '{"benchmark": "dynamath", "problem_id": [], "cluster": "0", "ground_truth": "1", "correct": true}',
    )),
    *(("table.json", text) for text in ("[]", '{"rows": 5}', '{"rows": ["a"]}', '{"rows": [{"group": "a"}]}', "[" * 100_000)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text"), DAMAGES, ids=range(len(DAMAGES)))
def test_a_damaged_evaluation_or_table_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, text: str
) -> None:
    """`tests/commands/test_hostile_folders.py` has more results that are no numbers."""
    first, second = evaluation(tmp_path / "first", "1100"), evaluation(tmp_path / "second", "1110")
    (second / name).write_text(text)
    assert main(["compare", str(first), str(second / name if name == "table.json" else second)]) == 2
    assert str(second / name) in capsys.readouterr().err.replace("\n", "")
