"""Evaluations compared problem by problem, beside the paper's table in its form, and damaged ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from evaluation_folders import evaluation, graded

from cepo.commands.cli import main
from cepo.errors import DataError
from cepo.evaluation.comparison import compare_evaluations, score_table
from cepo.evaluation.results import GENERATIONS_FILE
from cepo.report.score_tables import Cell, write_table
from cepo.run_folder.writing import encode_line

PAPER = str(Path(__file__).parents[2] / "lab" / "paper.json")


def test_a_paired_difference_drops_what_both_models_share(tmp_path: Path) -> None:
    # Differences per problem: 0, 0, 1, 0. Their mean is 0.25, their sd 0.5, the error 0.25; unpaired it would be 0.38.
    first = evaluation(tmp_path / "first", "1001")
    second = evaluation(tmp_path / "second", "1011")
    (paired,) = compare_evaluations(first, second)
    (back,) = compare_evaluations(second, first)
    assert paired.benchmark == "dynamath"
    assert paired.num_problems == 4
    assert paired.first == 0.5
    assert paired.second == 0.75
    assert paired.difference["mean"] == 0.25
    assert paired.difference["error"] == pytest.approx(0.25)
    assert back.difference["mean"] == -0.25
    assert back.difference["error"] == pytest.approx(0.25)


def test_a_paired_difference_is_clustered_by_variants(tmp_path: Path) -> None:
    """Of 4 variants of 2 questions, both of the second question change: differences 0, 0, 1, 1 in clusters 0, 0, 1, 1.

    The residual sums of the clusters are -1 and 1: error^2 = 2 / 1 * (1 + 1) / 16, so 0.5. Unclustered it were 0.289.
    """
    first = tmp_path / "first"
    second = tmp_path / "second"
    for folder, right in ((first, "1100"), (second, "1111")):
        evaluation(folder, right)
        rows = [graded(number, digit == "1", cluster=str(number // 2)) for number, digit in enumerate(right)]
        (folder / GENERATIONS_FILE).write_bytes(b"".join(map(encode_line, rows)))
    (paired,) = compare_evaluations(first, second)
    assert paired.difference == {"mean": 0.5, "error": pytest.approx(0.5), "num_clusters": 2}


def test_responses_without_a_verdict_are_not_compared(tmp_path: Path) -> None:
    first = evaluation(tmp_path / "first", "10")
    second = evaluation(tmp_path / "second", "11")
    for folder in (first, second):
        with (folder / GENERATIONS_FILE).open("ab") as file:
            file.write(encode_line(graded(2, False) | {"correct": None}))
    (paired,) = compare_evaluations(first, second)
    assert paired.num_problems == 2
    assert paired.first == 0.5
    assert paired.second == 1.0


@pytest.mark.parametrize(
    ("right", "changed", "words"),
    [
        ("1", {}, "used different problems"),
        ("11", {"ground_truth": "6"}, "used different problems"),
        ("11", {"benchmark": "mmmu"}, "nothing to compare"),
        (None, {}, "no finished evaluation"),
    ],
)
def test_evaluations_of_other_problems_are_not_paired(
    tmp_path: Path, right: str | None, changed: dict[str, Any], words: str
) -> None:
    first = evaluation(tmp_path / "first", "11")
    second = tmp_path / "other"
    if right is not None:
        evaluation(second, right, **changed)
    with pytest.raises(DataError, match=words):
        compare_evaluations(first, second)
    if right is None:
        with pytest.raises(DataError, match=words):
            score_table([str(tmp_path)])


STATED = {
    "Qwen3-VL-2B-Instruct": (39.73, 41.17, 34.96, 35.70, 40.97, 43.43),  # the paper states the fifth as 40.05
    "Qwen3-VL-4B-Instruct": (58.36, 57.43, 56.23, 55.75, 58.51, 60.56),
}


def test_the_papers_averages_follow_from_its_cells_but_one() -> None:
    table = score_table([PAPER])
    for group, averages in STATED.items():
        cells = [row.cells["Average"] for row in table.rows if row.group == group]
        assert [round(cell.mean, 2) for cell in cells if isinstance(cell, Cell)] == list(averages)
    (last,) = [row for row in table.rows if row.name == "CEPO" and row.group.startswith("Qwen3-VL-2B")]
    average = last.cells["Average"]
    assert isinstance(average, Cell)
    # sqrt(0.7^2 + 2.3^2 + 2.5^2 + 1.7^2 + 1.2^2) / 5
    assert average.error == pytest.approx(0.8090, abs=1e-4)


def test_the_papers_table_is_printed_in_its_form(tmp_path: Path) -> None:
    table = score_table([PAPER])
    for ending in ("tex", "md", "json"):
        write_table(table, tmp_path / f"paper.{ending}")
    latex = (tmp_path / "paper.tex").read_text("utf-8")
    assert r"CEPO & \textbf{51.44}$_{\pm0.70}$ & \textbf{37.72}$_{\pm2.30}$ & \textbf{25.99}$_{\pm2.50}$" in latex
    assert r"\multicolumn{7}{l}{\textit{Qwen3-VL-4B-Instruct}} \\" in latex
    assert latex.count(r"\textbf{") == 6 + 2 * 6  # the heads, and a best cell of each column and model
    assert "| GRPO | 50.36 ± 0.70 | 37.50 ± 2.30 |" in (tmp_path / "paper.md").read_text("utf-8")
    assert score_table([str(tmp_path / "paper.json")]).rows == table.rows


def test_evaluations_stand_beside_the_paper_with_a_difference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second gains one of 4 problems: by 25 points with error sd(0, 0, 0, 1) / sqrt(4) = 25."""
    first = evaluation(tmp_path / "first", "1000")
    second = evaluation(tmp_path / "second", "1001")
    monkeypatch.setenv("COLUMNS", "160")
    assert main(["compare", PAPER, str(first), str(second)]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(
        "second and first cannot be told apart: +25.0 points (95 % interval -24.0 to +74.0), "
        "50.0 % against 25.0 % on DynaMath."
    )
    assert "org/base" in printed
    assert "+25.00 ± 25.00" in printed
    table = score_table([str(first), str(second)])
    of_first, of_second, differences = table.rows
    assert (of_first.cells["DynaMath"], of_second.cells["DynaMath"]) == (
        Cell(mean=25.0, error=25.0),
        Cell(mean=50.0, error=25.0),
    )
    assert differences.name == "second less first"
    assert set(differences.cells.values()) == {"+25.00 ± 25.00"}  # of the benchmark, and on average
    write_table(table, tmp_path / "table.json")
    assert [row.name for row in score_table([str(tmp_path / "table.json")]).rows] == ["first", "second"]


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
    first = evaluation(tmp_path / "first", "1100")
    second = evaluation(tmp_path / "second", "1110")
    (second / name).write_text(text)
    assert main(["compare", str(first), str(second / name if name == "table.json" else second)]) == 2
    assert str(second / name) in capsys.readouterr().err.replace("\n", "")
