"""Figures of evaluations worked out by hand, evaluations in pairs, and beside the paper's table in its form."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cepo.cli import main
from cepo.errors import DataError
from cepo.evaluation.results import (
    GENERATIONS_FILE,
    Estimate,
    benchmark_figures,
    clustered_mean,
    compare_evaluations,
    macro_average,
    pass_at_k,
    score_table,
    write_results,
)
from cepo.report.score_tables import Cell, write_table
from cepo.tracking.run_folder import encode_line
from lab.harness import main as harness

PAPER = str(Path(__file__).parents[2] / "lab" / "paper.json")
STATED = {
    "Qwen3-VL-2B-Instruct": (39.73, 41.17, 34.96, 35.70, 40.97, 43.43),  # the paper states the fifth as 40.05
    "Qwen3-VL-4B-Instruct": (58.36, 57.43, 56.23, 55.75, 58.51, 60.56),
}


def graded(problem: int, correct: bool, *, cluster: str | None = None, **changed: Any) -> dict[str, Any]:
    row = {
        "benchmark": "dynamath", "problem_id": str(problem), "cluster": cluster or str(problem), "kind": "numeric",
        "choices": [], "sample": 0, "ground_truth": "1", "response": rf"\boxed{{{int(correct)}}}", "answer": "5",
        "correct": correct, "length": 10, "finished": True, "scores": {},
    }  # fmt: skip
    return row | changed


def evaluation(folder: Path, right: str, **changed: Any) -> Path:
    """An evaluation of problems that are each right or wrong as `right` says with 1 and 0."""
    folder.mkdir(parents=True)
    rows = [graded(number, verdict == "1", **changed) for number, verdict in enumerate(right)]
    (folder / GENERATIONS_FILE).write_bytes(b"".join(encode_line(row) for row in rows))
    figures = {"mean": right.count("1") / len(right), "error": 0.25, "num_clusters": len(right)}
    write_results(folder, {"model": "org/base"}, {"dynamath": {"accuracy": figures}})
    return folder


@pytest.mark.parametrize(
    ("values", "clusters", "mean", "error"),
    [
        # sd = sqrt((3 * 0.25^2 + 0.75^2) / 3) = 0.5, over sqrt(4); ten copies of each response change nothing.
        ([1.0, 1.0, 1.0, 0.0], [1, 2, 3, 4], 0.75, 0.25),
        ([1.0, 1.0, 1.0, 0.0] * 10, [1, 2, 3, 4] * 10, 0.75, 0.25),
        ([1.0, 1.0, 1.0, 0.0] * 10, range(40), 0.75, math.sqrt(0.1875 / 39)),
        # Mean 0.5; residual sums: 0.5 + 0.5 - 0.5 = 0.5 and -0.5. error^2 = 2 / 1 * (0.25 + 0.25) / 16.
        ([1.0, 1.0, 0.0, 0.0], ["a", "a", "a", "b"], 0.5, math.sqrt(2 * 0.5 / 16)),
        ([1.0, 0.0], ["a", "a"], 0.5, None),
    ],
)
def test_an_error_is_that_of_clusters(
    values: list[float], clusters: Sequence[Any], mean: float, error: float | None
) -> None:
    expected = Estimate(mean=mean, error=pytest.approx(error), num_clusters=len(set(clusters)))
    assert clustered_mean(values, clusters) == expected


@given(st.lists(st.lists(st.floats(0, 1), min_size=3, max_size=3), min_size=2, max_size=8))
def test_equal_clusters_give_the_standard_error_of_their_means(groups: list[list[float]]) -> None:
    means = [sum(group) / 3 for group in groups]
    centre = sum(means) / len(means)
    expected = math.sqrt(sum((mean - centre) ** 2 for mean in means) / (len(means) - 1) / len(means))
    estimate = clustered_mean(
        [value for group in groups for value in group], [number for number, _ in enumerate(groups) for _ in range(3)]
    )
    assert (estimate["mean"], estimate["error"]) == pytest.approx((centre, expected), abs=1e-12)
    with pytest.raises(DataError, match="nothing was graded"):
        clustered_mean([], [])


@pytest.mark.parametrize(
    ("right", "samples", "k", "chance"),
    [(1, 4, 1, 0.25), (1, 4, 2, 0.5), (2, 4, 2, 5 / 6), (0, 4, 4, 0.0), (1, 4, 4, 1.0), (3, 4, 2, 1.0)],
)
def test_pass_at_k_is_the_chance_that_k_hold_a_right_one(right: int, samples: int, k: int, chance: float) -> None:
    assert pass_at_k(right, samples, k) == pytest.approx(chance)


def test_figures_of_2_problems_with_2_responses_each() -> None:
    rows = [
        graded(0, True, length=4),
        graded(0, False, length=6, finished=False, answer=None),
        graded(1, False, length=20, kind="choice"),
        graded(1, False, length=10, kind="choice"),
    ]
    figures = benchmark_figures(rows)
    assert (figures["num_problems"], figures["num_responses"], figures["num_right"]) == (2, 4, 1)
    assert figures["accuracy"] == {"mean": 0.25, "error": pytest.approx(0.25), "num_clusters": 2}
    assert {kind: each["mean"] for kind, each in figures["by_kind"].items()} == {"choice": 0.0, "numeric": 0.5}
    assert figures["response_length"] == {"mean": 10.0, "median": 8.0, "max": 20}
    assert (figures["share_cut_off"], figures["share_without_answer"]) == (0.25, 0.25)
    assert {k: each["mean"] for k, each in figures["pass_at_k"].items()} == {"1": 0.25, "2": 0.5}
    assert "worst_variant" not in figures


def test_the_worst_variant_of_each_question_counts() -> None:
    rows = [graded(number, number < 3, cluster="aabb"[number]) for number in range(4)]
    figures = benchmark_figures(rows, has_variants=True)
    assert figures["accuracy"]["mean"] == 0.75
    assert figures["accuracy"]["num_clusters"] == 2
    assert figures["worst_variant"]["mean"] == 0.5
    assert "pass_at_k" not in figures


def test_an_average_of_two_has_half_the_root_of_squared_errors() -> None:
    two = [Estimate(mean=0.4, error=0.03, num_clusters=9), Estimate(mean=0.6, error=0.04, num_clusters=9)]
    assert macro_average(two) == {"mean": 0.5, "error": pytest.approx(0.025), "num_benchmarks": 2}
    assert macro_average([*two, Estimate(mean=0.5, error=None, num_clusters=1)])["error"] is None


def test_a_paired_difference_drops_what_both_models_share(tmp_path: Path) -> None:
    # Differences per problem: 0, 0, 1, 0. Their mean is 0.25, their sd 0.5, the error 0.25; unpaired it would be 0.38.
    first, second = evaluation(tmp_path / "first", "1001"), evaluation(tmp_path / "second", "1011")
    (paired,), (back,) = compare_evaluations(first, second), compare_evaluations(second, first)
    assert (paired.benchmark, paired.num_problems, paired.first, paired.second) == ("dynamath", 4, 0.5, 0.75)
    assert (paired.difference["mean"], paired.difference["error"]) == (0.25, pytest.approx(0.25))
    assert (back.difference["mean"], back.difference["error"]) == (-0.25, pytest.approx(0.25))


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
    first, other = evaluation(tmp_path / "first", "11"), tmp_path / "other"
    if right is not None:
        evaluation(other, right, **changed)
    with pytest.raises(DataError, match=words):
        compare_evaluations(first, other)
    if right is None:
        with pytest.raises(DataError, match=words):
            score_table([str(tmp_path)])


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
    assert "org/base" in printed
    assert "+25.00 ± 25.00" in printed
    table = score_table([str(first), str(second)])
    assert [row.cells["DynaMath"] for row in table.rows] == [Cell(mean=25.0, error=25.0), Cell(mean=50.0, error=25.0)]
    assert "difference" not in table.rows[0].cells


def test_evaluations_are_graded_by_lmms_evals_rules(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The paper's table and theirs stand in one table; rows of an older form, without options, are named."""
    first, second = evaluation(tmp_path / "first", "1000"), evaluation(tmp_path / "second", "1101")
    assert harness(["--out", str(tmp_path / "theirs.json"), str(first), str(second)]) == 0
    assert "by lmms-eval's rules" in capsys.readouterr().out
    rows = {row.name: row.cells for row in score_table([PAPER, str(tmp_path / "theirs.json")]).rows}
    assert rows["first"]["DynaMath"] == Cell(mean=25.0, error=pytest.approx(25.0))
    assert rows["second"]["Average"] == Cell(mean=75.0, error=pytest.approx(25.0))
    file = first / "generations.jsonl"
    file.write_text(file.read_text("utf-8").replace('"choices":', '"others":'), encoding="utf-8")
    with pytest.raises(DataError, match="older than the column of options"):
        harness([str(first)])


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
