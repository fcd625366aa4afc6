"""Evaluations beside the paper's table in its form."""

from __future__ import annotations

from pathlib import Path

import pytest
from evaluation_folders import evaluation

from cepo.commands.cli import main
from cepo.evaluation.comparison import score_table
from cepo.report.score_tables import Cell, write_table

PAPER = str(Path(__file__).parents[2] / "lab" / "paper.json")


STATED = {
    "Qwen3-VL-2B-Instruct": (39.73, 41.17, 34.96, 35.70, 40.97, 43.43),  # the paper states the fifth as 40.05
    "Qwen3-VL-4B-Instruct": (58.36, 57.43, 56.23, 55.75, 58.51, 60.56),
}


def test_the_papers_averages_follow_from_its_cells_but_one() -> None:
    table = score_table([PAPER])
    for group, averages in STATED.items():
        found = [row.cells["Average"] for row in table.rows if row.group == group]
        assert [round(cell.mean, 2) for cell in found if isinstance(cell, Cell)] == list(averages)
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
    first, second = evaluation(tmp_path / "first", "1000"), evaluation(tmp_path / "second", "1001")
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
    assert [row.cells["DynaMath"] for row in table.rows] == [Cell(mean=25.0, error=25.0), Cell(mean=50.0, error=25.0)]
    assert "difference" not in table.rows[0].cells
