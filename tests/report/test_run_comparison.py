"""Runs of several methods and seeds beside each other, with numbers worked out by hand."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from pathlib import Path

import pytest
from rich.console import Console
from run_folders import report_pixels, validated, write_run

from cepo.commands.report import run_compare_command
from cepo.errors import DataError
from cepo.report import compare_runs


def method_run(folder: Path, estimator: str, seed: int, accuracies: Sequence[float], extra: str = "") -> Path:
    config = f"algorithm:\n  adv_estimator: {estimator}\ntrainer:\n  seed: {seed}\n{extra}"
    return write_run(folder, validated(*accuracies, every=10), config=config)


def test_three_seeds_have_deviation_10_and_error_6_points(tmp_path: Path) -> None:
    """The accuracies are 40, 50 and 60 percent."""
    ends = (0.4, 0.5, 0.6)
    folders = [method_run(tmp_path / f"c{k}", "cepo", k, (0.3, 0.7 - 0.01 * k, end)) for k, end in enumerate(ends)]
    folders.append(method_run(tmp_path / "g", "grpo", 0, (0.3, 0.35, 0.4)))
    comparison = compare_runs(folders)
    cepo, grpo = comparison.methods
    assert (cepo.estimator, grpo.estimator) == ("cepo", "grpo")
    assert cepo.end.mean == pytest.approx(0.5)
    assert cepo.end.deviation == pytest.approx(0.1)
    assert cepo.end.error == pytest.approx(0.1 / math.sqrt(3))
    assert cepo.start.deviation == pytest.approx(0.0)
    assert (cepo.best_step, cepo.best.mean) == (10, pytest.approx(0.69))
    assert cepo.rise.mean == pytest.approx(0.2)
    assert grpo.end.deviation is None
    markdown = comparison.markdown()
    assert "| cepo | 3 | 0.300 ± 0.000 (se 0.000), step 0 | 0.690 ± 0.010 (se 0.006), step 10 |" in markdown
    assert "| 0.500 ± 0.100 (se 0.058), step 20 | +20.0 ± 10.0 (se 5.8) | 0.400, 0.500, 0.600 |" in markdown
    assert "| grpo | 1 | 0.300, step 0 | 0.400, step 20 | 0.400, step 20 | +10.0 | 0.400 |" in markdown
    assert len(comparison.notes) == 1


def test_runs_are_compared_at_steps_that_all_measured(tmp_path: Path) -> None:
    folders = [
        method_run(tmp_path / "a", "cepo", 0, (0.3, 0.4, 0.9)),
        method_run(tmp_path / "b", "cepo", 1, (0.3, 0.5)),
    ]
    (method,) = compare_runs(folders).methods
    assert method.steps == (0, 10)
    assert method.end.mean == pytest.approx(0.45)


def test_repeats_with_other_rates_or_one_seed_are_named(tmp_path: Path) -> None:
    folders = [
        method_run(tmp_path / f"r{k}", name, 0, (0.3, 0.4), f"worker:\n  actor:\n    optim:\n      lr: {rate}\n")
        for k, (name, rate) in enumerate((("cepo", 1e-6), ("cepo", 5e-6), ("grpo", 1e-6)))
    ]
    notes = "\n".join(compare_runs(folders).notes)
    assert "The runs of cepo differ in worker.actor.optim.lr" in notes
    assert "Some runs of cepo have the same seeds" in notes
    assert "worker.actor.optim.lr differs (cepo: 1e-06, 5e-06; grpo: 1e-06)" in notes


def test_runs_without_a_common_validation_step_are_named(tmp_path: Path) -> None:
    folders = [method_run(tmp_path / "a", "cepo", 0, (0.3,)), write_run(tmp_path / "b", [(1, {"reward/mean": 0.5})])]
    with pytest.raises(DataError, match=r"cepo \(a, b\) share no step"):
        compare_runs(folders)


def test_cepo_compare_writes_markdown_and_a_plot_and_returns_0(tmp_path: Path) -> None:
    folders = [str(method_run(tmp_path / f"r{k}", "cepo", k, (0.3, 0.4 + 0.1 * k))) for k in range(2)]
    out, plot = tmp_path / "docs" / "table.md", tmp_path / "plots" / "curves.png"
    output = io.StringIO()
    code = run_compare_command(
        [*folders, "--out", str(out), "--plot", str(plot)], console=Console(file=output, width=80)
    )
    assert code == 0
    assert "| cepo | 2 |" in out.read_text("utf-8")
    pixels = report_pixels(plot)
    assert pixels.std() > 0.02
    assert "curves.png" in output.getvalue()
