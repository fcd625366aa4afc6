"""Runs of several settings and seeds beside each other, with numbers worked out by hand."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from run_folders import report_pixels, validated, write_run

from cepo.commands.cli import main
from cepo.errors import DataError
from cepo.report.compare import compare_runs
from cepo.report.page import save_curves
from cepo.report.score_tables import Cell, write_table

RATE = "worker:\n  actor:\n    optim:\n      lr: {}\n"


def method_run(
    folder: Path, estimator: str, seed: int, accuracies: Sequence[float], extra: str = "", seconds: float = 2.0
) -> Path:
    """A run with a validation every 10 steps from step 0 on, and a step of `seconds` before each but the first."""
    config = f"algorithm:\n  adv_estimator: {estimator}\ntrainer:\n  seed: {seed}\n  experiment_name: {folder.name}\n"
    rows: list[tuple[int, dict[str, float]]] = []
    for step, values in validated(*accuracies, every=10):
        timing = {"timing_s/step": seconds} if step > 0 else {}
        rows.append((step, values | timing))
    return write_run(folder, rows, config=config + extra)


def runs_with_seeds(folder: Path, estimator: str, *last_accuracies: float) -> list[Path]:
    """One run for each accuracy after training, with the seeds 0, 1, ...; before it the accuracy is 30 %."""
    runs: list[Path] = []
    for seed, accuracy in enumerate(last_accuracies):
        runs.append(method_run(folder / f"{estimator}-{seed}", estimator, seed, (0.3, accuracy)))
    return runs


def figure(mean: float, error: float | None = None) -> Cell:
    """Equal to a cell of about these numbers."""
    return Cell(mean=pytest.approx(mean), error=None if error is None else pytest.approx(error))  # type: ignore[arg-type]


def cells(folders: Sequence[Path], name: str) -> list[Cell | str]:
    """The cells of a column, without their intervals."""
    column = [row.cells.get(name, "") for row in compare_runs(folders).table().rows]
    return [replace(cell, low=None, high=None) if isinstance(cell, Cell) else cell for cell in column]


def test_three_seeds_of_40_50_60_percent_have_error_6_points(tmp_path: Path) -> None:
    """The error is 10 / sqrt(3); the single run's is Wilson's, sqrt(0.4 * 0.6 / 100 + 1 / 200^2) / 1.01."""
    folders = [
        method_run(tmp_path / "c0", "cepo", 0, (0.3, 0.7, 0.4)),
        method_run(tmp_path / "c1", "cepo", 1, (0.3, 0.7, 0.5)),
        method_run(tmp_path / "c2", "cepo", 2, (0.3, 0.7, 0.6)),
        method_run(tmp_path / "g", "grpo", 9, (0.3, 0.35, 0.4), seconds=3.0),
    ]
    table = compare_runs(folders).table()
    cepo, grpo = table.rows
    assert cepo.name == "cepo"
    assert grpo.name == "grpo"
    assert cepo.cells["runs"] == "3"
    assert cepo.cells["steps"] == "20"
    assert cepo.cells["after"] == figure(50.0, 10 / math.sqrt(3))
    assert grpo.cells["after"] == figure(40.0, 100 * math.sqrt(0.4 * 0.6 / 100 + 1 / 200**2) / 1.01)
    assert cepo.cells["before"] == figure(30.0, 0.0)
    assert cepo.cells.keys().isdisjoint({"difference", "overhead %"})
    assert cepo.cells["greedy after"] == ""
    assert grpo.cells["overhead %"] == figure(50.0)
    assert grpo.cells["hours"] == figure(6 / 3600)
    assert any("grpo has no seed in common with cepo" in note for note in table.notes)
    assert table.title.endswith("± standard error over runs, or of a single run over problems")
    assert any(note.startswith("grpo has one run: its error is over problems") for note in table.notes)
    markdown = table.markdown()
    assert "| cepo | 3 | 20 | 30.00 ± 0.00 | **50.00** ± 5.77 | – | – | 2.00 ± 0.00 | – | 0.00 ± 0.00 |" in markdown
    assert "| grpo | 1 | 20 | 30.00 ± 4.56 | 40.00 ± 4.88 | – | -10.00 ± 7.56 | 3.00 | +50.0 | 0.00 |" in markdown


def test_differences_are_paired_by_seed(tmp_path: Path) -> None:
    """Seeds 0, 1, 2 rise from 40, 50, 60 to 42, 53, 64: by 3 points with error 1 / sqrt(3), though seeds vary by 10."""
    grpo = runs_with_seeds(tmp_path, "grpo", 0.4, 0.5, 0.6)
    seed_0, seed_1, seed_2 = runs_with_seeds(tmp_path, "cepo", 0.42, 0.53, 0.64)
    folders = [*grpo, seed_2, seed_0, seed_1]
    (_, difference) = cells(folders, "difference")
    assert difference == figure(3.0, 1 / math.sqrt(3))
    assert compare_runs(folders).table().title.endswith("± standard error over runs")


def test_a_single_pair_has_the_error_of_independent_samples(tmp_path: Path) -> None:
    """Of 100 samples 40 and 50 are right: Wilson's errors are 4.876 and 4.975 points, and hypot(4.876, 4.975) is 6.966."""
    folders = [*runs_with_seeds(tmp_path, "grpo", 0.4), *runs_with_seeds(tmp_path, "cepo", 0.5)]
    (_, difference) = cells(folders, "difference")
    assert difference == figure(10.0, 100 * math.sqrt((0.24 + 0.25) / 100 + 2 / 200**2) / 1.01)


def test_the_verdict_of_paired_seeds_has_students_interval(tmp_path: Path) -> None:
    """Differences of 2, 3 and 4 points: mean 3, error 1 / sqrt(3) = 0.577, and t with 2 degrees of freedom is 4.303.

    4.303 * 0.577 = 2.48, so that the interval is 0.5 to 5.5. Of differences -1, 3 and 7 it is 3 ± 4.303 * 4 / sqrt(3).
    """
    grpo = runs_with_seeds(tmp_path, "grpo", 0.4, 0.4, 0.4)
    cepo = runs_with_seeds(tmp_path, "cepo", 0.42, 0.43, 0.44)
    rlsd = runs_with_seeds(tmp_path, "rlsd", 0.39, 0.43, 0.47)
    ahead = "is ahead of grpo by 3.0 points (95 % interval +0.5 to +5.5): 43.0 % against 40.0 % after training."
    assert compare_runs([*grpo, *cepo]).headline == f"cepo {ahead}"
    assert compare_runs([*cepo, *grpo]).headline == (
        "grpo is behind cepo by 3.0 points (95 % interval -5.5 to -0.5): 40.0 % against 43.0 % after training."
    )
    assert compare_runs([*grpo, *rlsd]).headline == (
        "rlsd and grpo cannot be told apart: +3.0 points (95 % interval -6.9 to +12.9), "
        "43.0 % against 40.0 % after training."
    )
    assert compare_runs([*grpo, *cepo, *rlsd]).headline == (
        "Of 3 settings, cepo ends highest, at 43.0 %. From grpo: cepo +3.0 points (95 % interval +0.5 to +5.5); "
        "rlsd +3.0 points (95 % interval -6.9 to +12.9)."
    )
    assert compare_runs(cepo).headline == "cepo reaches 43.0 ± 0.6 % held-out accuracy in 3 runs."


def test_a_verdict_over_single_runs_says_what_it_leaves_out(tmp_path: Path) -> None:
    """Wilson's errors of 4.876 and 4.975 points: 1.96 hypot(4.876, 4.975) = 13.7. Without counts no error is known."""
    folders = [*runs_with_seeds(tmp_path, "grpo", 0.4), *runs_with_seeds(tmp_path, "cepo", 0.5)]
    comparison = compare_runs(folders)
    assert comparison.headline.startswith(
        "cepo and grpo cannot be told apart: +10.0 points (95 % interval -3.7 to +23.7)"
    )
    assert comparison.cautions[-1].startswith("Each setting has one run: intervals cover the sampling of responses")
    assert comparison.table().title.endswith("± standard error over problems")
    uncounted: list[Path] = []
    for name, accuracy in (("grpo", 0.4), ("cepo", 0.5)):
        config = f"algorithm:\n  adv_estimator: {name}\n"
        uncounted.append(write_run(tmp_path / f"u-{name}", [(1, {"val/accuracy": accuracy})], config=config))
    assert compare_runs(uncounted).headline == (
        "cepo ends 10.0 points above grpo, with an unknown error: 50.0 % against 40.0 % after training."
    )
    nothing = write_run(tmp_path / "n", [(1, {"reward/mean": 0.5})], config="algorithm:\n  adv_estimator: rlsd\n")
    assert compare_runs([folders[0], nothing]).headline == (
        "grpo and rlsd cannot be compared: they share no held-out accuracy after training."
    )
    broken = write_run(tmp_path / "x", validated(0.3, float("nan")), config="algorithm:\n  adv_estimator: cepo\n")
    assert "grpo and cepo cannot be compared" in compare_runs([folders[0], broken]).headline
    assert compare_runs([nothing]).headline == "rlsd has no held-out accuracy after training."


def test_the_terminal_says_the_verdict_first_and_cautions_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    first = method_run(tmp_path / "a", "grpo", 0, (0.3, 0.4))
    second = method_run(tmp_path / "b", "cepo", 0, (0.3, 0.4, 0.5))
    assert main(["compare", str(first), str(second)]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("cepo and grpo cannot be told apart: +0.0 points")
    assert printed.count("different steps (10, 20)") == 1
    assert "Differences are from grpo, the first setting" in printed


def test_runs_of_other_lengths_meet_at_their_last_common_step(tmp_path: Path) -> None:
    """At steps 10 and 20 the second run is 20 and 30 points ahead; at the first run's end, step 30, it has not been."""
    first = method_run(tmp_path / "g", "grpo", 0, (0.3, 0.4, 0.5, 0.9))
    second = method_run(tmp_path / "c", "cepo", 0, (0.3, 0.6, 0.8))
    (_, difference) = cells([first, second], "difference")
    assert isinstance(difference, Cell)
    assert difference.mean == pytest.approx(30.0)


def test_learning_rates_of_one_method_are_settings_of_their_own(tmp_path: Path) -> None:
    folders = [
        method_run(tmp_path / f"r{rate}-{seed}", "cepo", seed, (0.3, 0.4), RATE.format(rate))
        for rate in ("1e-6", "5e-6")
        for seed in (0, 1)
    ]
    folders.append(method_run(tmp_path / "grpo", "grpo", 0, (0.3, 0.4), RATE.format("1e-6")))
    comparison = compare_runs(folders)
    assert [(setting.label, len(setting.runs)) for setting in comparison.settings] == [
        ("cepo, lr=1e-06", 2),
        ("cepo, lr=5e-06", 2),
        ("grpo", 1),
    ]
    assert comparison.differing["worker.actor.optim.lr"] == ["1e-06", "5e-06", "1e-06"]
    assert "More than the method differs: worker.actor.optim.lr." in comparison.cautions


def test_only_what_can_change_training_tells_runs_apart(tmp_path: Path) -> None:
    """Records, a relative path beside the same in full and a default that is written out make no setting."""
    written = "  rollouts_to_log: 0\n  save_freq: 5\n  find_last_checkpoint: false\n  total_epochs: 15\n"
    paths = (
        "worker:\n  reward:\n    reward_function: {0}/reward.py:score\n  actor:\n    model:\n"
        "      model_path: {0}/{1}\n"
    )
    folders = [
        method_run(tmp_path / "a", "cepo", 0, (0.3, 0.4), paths.format("mine", "models/small")),
        method_run(tmp_path / "b", "cepo", 1, (0.3, 0.4), written + paths.format("/home/mine", "models/small")),
    ]
    comparison = compare_runs(folders)
    assert comparison.differing == {}
    assert [setting.label for setting in comparison.settings] == ["cepo"]
    with_another_model = method_run(tmp_path / "c", "cepo", 2, (0.3, 0.4), paths.format("/home/mine", "models/large"))
    assert list(compare_runs([*folders, with_another_model]).differing) == ["worker.actor.model.model_path"]


def test_one_data_set_in_two_folders_is_one_setting(tmp_path: Path) -> None:
    """A file of other content, or one that is gone, is another data set whatever its name."""
    folders: list[Path] = []
    for number, rows in enumerate(("a\n", "a\n", "b\n")):
        data = tmp_path / f"data{number}" / "train.jsonl"
        data.parent.mkdir()
        data.write_text(rows, encoding="utf-8")
        extra = f"data:\n  train_files: {data}\n"
        folders.append(method_run(tmp_path / f"r{number}", "cepo", number, (0.3, 0.4), extra))
    assert [len(setting.runs) for setting in compare_runs(folders).settings] == [2, 1]
    (tmp_path / "data1" / "train.jsonl").unlink()
    assert [len(setting.runs) for setting in compare_runs(folders).settings] == [1, 1, 1]


def test_no_file_is_opened_because_a_strangers_run_names_it(tmp_path: Path) -> None:
    """Both files have one content. A record that has been changed is none of the user's own runs."""
    folders: list[Path] = []
    for number in range(2):
        data = tmp_path / f"data{number}.jsonl"
        data.write_text("a\n", encoding="utf-8")
        extra = f"data:\n  train_files: {data}\n"
        folders.append(method_run(tmp_path / f"r{number}", "cepo", number, (0.3, 0.4), extra))
    assert [len(setting.runs) for setting in compare_runs(folders).settings] == [2]
    with (folders[1] / "config.yaml").open("a", encoding="utf-8") as record:
        record.write("# changed\n")
    assert list(compare_runs(folders).differing) == ["data.train_files"]


def test_a_name_with_dollars_is_drawn_as_it_is(tmp_path: Path) -> None:
    """As mathematics it would be an error."""
    runs = [
        write_run(tmp_path / name, [(step, {r"reward/$\frac$": 0.5}) for step in (1, 2)], config=config)
        for name, config in (("a", "algorithm: {adv_estimator: cepo}"), ("b", "algorithm: {adv_estimator: grpo}"))
    ]
    save_curves(runs[0], tmp_path / "curves.svg")
    assert r"$\frac$" in (tmp_path / "curves.svg").read_text("utf-8")
    assert main(["compare", *map(str, runs), "--out", str(tmp_path / "both.svg")]) == 0


def test_runs_that_differ_much_are_numbered_and_fit_80_columns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of two cepo runs; the settings of grpo's own section do not count as differences from cepo."""
    of_data_and_rate = "data:\n  max_response_length: {}\nworker:\n  actor:\n    optim:\n      lr: {}\n"
    of_grpo = "algorithm:\n  adv_estimator: grpo\n  grpo:\n    ddof: 1\n"
    folders = [
        method_run(tmp_path / "a", "cepo", 0, (0.3, 0.4), of_data_and_rate.format(64, 0.1)),
        method_run(tmp_path / "b", "cepo", 1, (0.3, 0.4), of_data_and_rate.format(32, 0.2)),
        write_run(tmp_path / "c", validated(0.0), config=of_grpo + of_data_and_rate.format(32, 0.2)),
    ]
    comparison = compare_runs(folders)
    assert [setting.label for setting in comparison.settings] == ["cepo (1)", "cepo (2)", "grpo"]
    keys = ["algorithm.adv_estimator", "data.max_response_length", "worker.actor.optim.lr"]
    assert list(comparison.differing) == keys
    assert main(["compare", *map(str, folders)]) == 0
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 80
    assert "…" not in printed
    assert re.search(r"greedy after +– +– +–", printed)
    assert re.search(r"before +30.00 ± 4.56 +30.00 ± 4.56 +0.00 ± 0.50", printed)  # Wilson's is never 0
    assert re.search(r"worker.actor.optim.lr +0.1 +0.2 +0.2", printed)


def test_runs_of_one_seed_are_named_as_dependent(tmp_path: Path) -> None:
    """A first validation after training is not one before it."""
    folders = [method_run(tmp_path / name, "cepo", 0, (0.3, 0.4)) for name in ("a", "b")]
    assert "Some runs of cepo have the same seeds: they are not independent." in compare_runs(folders).cautions
    run = write_run(tmp_path / "c", [(5, {"val/accuracy": 0.5})], config="algorithm:\n  adv_estimator: cepo\n")
    assert cells([run], "before") == [""]


def test_a_shorter_run_is_named_and_not_cut_to_step_0(tmp_path: Path) -> None:
    """Ends at steps 20 and 10: each counts at its own end, and the curve has the steps of both."""
    longer = method_run(tmp_path / "a", "cepo", 0, (0.3, 0.4, 0.9))
    shorter = method_run(tmp_path / "b", "cepo", 1, (0.3, 0.5))
    comparison = compare_runs([longer, shorter])
    (row,) = comparison.table().rows
    assert row.cells["after"] == figure(70.0, 20.0)
    assert row.cells["steps"] == "10 to 20"
    assert any("different steps (10, 20)" in note for note in comparison.cautions)
    (curve,) = comparison.charts()[0].series
    assert curve.steps == [0, 10]
    assert curve.values == [pytest.approx(0.3), pytest.approx(0.45)]
    assert curve.low == [0.3, 0.4]
    assert curve.high == [0.3, 0.5]


def test_runs_that_share_step_0_alone_are_drawn_one_by_one(tmp_path: Path) -> None:
    """Validations at steps 0, 10 and at 0, 4, 8: no mean of both, and no difference from step 0."""
    config = "algorithm:\n  adv_estimator: {}\ntrainer:\n  seed: 0\n"
    first = method_run(tmp_path / "a", "cepo", 0, (0.3, 0.4))
    second = write_run(tmp_path / "b", validated(0.3, 0.5, 0.6, every=4), config=config.format("cepo"))
    third = write_run(tmp_path / "c", validated(0.3, 0.5, 0.6, every=4), config=config.format("grpo"))
    assert [series.label for series in compare_runs([first, second]).charts()[0].series] == ["cepo: a", "cepo: b"]
    assert cells([first, third], "difference") == ["", ""]


def test_a_run_without_validation_has_its_curves_and_is_named(tmp_path: Path) -> None:
    config = "algorithm:\n  adv_estimator: cepo\n"
    run = write_run(tmp_path / "a", [(1, {"reward/mean": 0.5}), (2, {"reward/mean": 3.0})], config=config)
    only_before = write_run(tmp_path / "b", validated(0.3), config="algorithm:\n  adv_estimator: grpo\n")
    comparison = compare_runs([run, only_before])
    assert "cepo: a made no validation after training." in comparison.cautions
    assert "grpo: b made no validation after training." in comparison.cautions
    assert [chart.title for chart in comparison.charts()] == ["Held-out accuracy", "Reward"]
    assert comparison.table().rows[1].cells["after"] == ""


@pytest.mark.parametrize(
    ("rows", "config", "named"),
    [([], "algorithm:\n  adv_estimator: cepo\n", "no rows yet"), ([(1, {})], "a: 1\n", "adv_estimator")],
)
def test_a_run_that_cannot_be_compared_is_named(tmp_path: Path, rows: list, config: str, named: str) -> None:
    with pytest.raises(DataError, match=named):
        compare_runs([write_run(tmp_path / "a", rows, config=config)])


def test_the_table_reads_alike_in_all_its_forms(tmp_path: Path) -> None:
    extra = "data:\n  train_files: a|b_50%*\n"
    folders = [
        method_run(tmp_path / "a", "cepo", 0, (0.3, 0.4), extra),
        method_run(tmp_path / "b", "cepo", 0, (0.3, 0.5)),
    ]
    table = compare_runs(folders).table()
    for ending in ("md", "tex", "json"):
        write_table(table, tmp_path / f"table.{ending}")
    texts = {path.suffix: path.read_text("utf-8") for path in tmp_path.glob("table.*")}
    assert r"| cepo, train\_files=a\|b\_50%\* | 1 | 10 |" in texts[".md"]
    assert r"cepo, train\_files=a|b\_50\%* & 1 & 10 & 30.00$_{\pm4.56}$ & 40.00$_{\pm4.88}$ &" in texts[".tex"]
    assert r"\textbf{50.00}$_{\pm4.98}$" in texts[".tex"]
    assert texts[".tex"].count(r"\begin{tabular}") == texts[".tex"].count(r"\end{tabular}") == 1
    exact = json.loads(texts[".json"])
    assert exact["rows"][1]["difference"]["mean"] == pytest.approx(10.0)


def test_cepo_compare_writes_table_page_and_curves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = runs_with_seeds(tmp_path, "cepo", 0.4, 0.5)
    table = tmp_path / "docs" / "table.md"
    page = tmp_path / "docs" / "page.html"
    curves = tmp_path / "docs" / "curves.png"
    monkeypatch.setenv("COLUMNS", "160")
    outs = ["--out", str(table), "--out", str(page), "--out", str(curves)]
    assert main(["compare", *map(str, folders), *outs]) == 0
    printed = capsys.readouterr().out
    assert "| cepo | 2 |" in table.read_text("utf-8")
    html = page.read_text("utf-8")
    assert "Comparison of 2 runs" in html
    assert "http://" not in html.partition("<script>")[0]
    assert report_pixels(curves).std() > 0.02
    assert "curves.png" in printed
    assert "45.00 ± 5.00" in printed


def test_a_run_is_not_compared_with_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As two repeats of one seed they would have a spread of 0, which reads as certainty."""
    folder = write_run(tmp_path / "a", validated(0.3, 0.4))
    assert main(["compare", str(folder), f"{folder}/metrics.jsonl"]) == 2
    assert "is named twice; a run compared with itself has no difference and no spread" in capsys.readouterr().err


def test_a_run_and_an_evaluation_are_told_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The evaluation is not called a run that has not begun."""
    folder = write_run(tmp_path / "a", validated(0.3, 0.4))
    (tmp_path / "e").mkdir()
    (tmp_path / "e" / "evaluation.json").write_text("{}")
    assert main(["compare", str(folder), str(tmp_path / "e")]) == 2
    assert f"{tmp_path / 'e'} is an evaluation or a table, and {folder} a run" in capsys.readouterr().err.replace(
        "\n", ""
    )
