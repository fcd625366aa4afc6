"""The comparison of configuration files over seeds."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from run_folders import write_run

from lab.studies.seeds import LEARNING, PROGRAM, arguments, main, table_of
from lab.studies.support.compared_runs import Record, figures_of
from lab.studies.support.marked_tables import END, start_mark, with_table
from lab.studies.support.seeded_runs import DONE
from lab.support.machine import ROOT


def run(file: str, seed: int, trained: list[float], held_out: float) -> Record:
    return {"file": file, "seed": seed, "trained": trained, "held_out": {"0": 0.9, "10": held_out, "9": 0.8}}


def test_files_and_settings_stand_on_both_sides_of_the_options() -> None:
    options = arguments(["first", "second", "--seeds", "4", "5", "--out", "runs", "trainer.max_steps=2"])
    assert options.words == ["first", "second", "trainer.max_steps=2"]
    assert (options.seeds, options.out) == ([4, 5], Path("runs"))


def test_differences_are_paired_by_seed_with_their_error() -> None:
    """Rollouts: 0.5 and 0.6 against 0.4 and 0.3 gives +10 and +30 points: a mean of 20, with an error of 10.

    t is 2 with one degree of freedom, of which p is 1 - (2 / pi) atan(2) = 0.295. Held out, +0 and +10 points: t is 1 and p
    1/2. The last validation is that of step 10, not of step 9.
    """
    runs = [run("first", 1, [0.3, 0.5], 0.5), run("second", 1, [0.5], 0.5)]
    runs += [run("first", 2, [0.3], 0.5), run("second", 2, [0.6], 0.6)]
    lines = table_of(runs).splitlines()
    assert lines[0] == "| file | seeds | rollouts % | minus first | p, Holm | held out % | minus first | p, Holm |"
    assert lines[2] == "| first | 2 | 35.0 ± 5.0 |  |  | 50.0 ± 0.0 |  |  |"
    assert lines[3] == "| second | 2 | 55.0 ± 5.0 | +20.0 ± 10.0 | 0.295 | 55.0 ± 5.0 | +5.0 ± 5.0 | 0.500 |"
    assert 1 - 2 / math.pi * math.atan(2) == pytest.approx(0.2952, abs=1e-4)


def test_p_is_adjusted_over_the_files() -> None:
    """With two files of the same differences the smallest p, 0.295, counts twice."""
    runs = [run("first", 1, [0.4], 0.5), run("first", 2, [0.3], 0.5)]
    for name in ("second", "third"):
        runs += [run(name, 1, [0.5], 0.5), run(name, 2, [0.6], 0.5)]
    lines = table_of(runs).splitlines()
    assert [line.split(" | ")[4] for line in lines[3:]] == ["0.590", "0.590"]


def test_one_seed_has_no_error() -> None:
    lines = table_of([run("first", 1, [0.4], 0.5)]).splitlines()
    assert lines[2] == "| first | 1 | 40.0 |  |  | 50.0 |  |  |"


def finished_run(folder: Path, trained: list[float]) -> None:
    """The folder of a finished run, with a validation before the first step and one after the last."""
    rows = [(0, {"val/accuracy": 0.25})]
    rows += [
        (step, {"reward/correct": value, "timing_s/step": 2.0, "tokens/generate": 7.0})
        for step, value in enumerate(trained, 1)
    ]
    rows[-1][1]["val/accuracy"] = 0.75
    write_run(folder, rows)
    (folder / DONE).touch()


def test_a_record_has_each_step_and_each_validation(tmp_path: Path) -> None:
    finished_run(tmp_path / "run", [0.5, 0.625])
    assert figures_of(tmp_path / "run", trained="reward/correct") == {
        "trained": [0.5, 0.625],
        "held_out": {"0": 0.25, "2": 0.75},
        "step_seconds": [2.0, 2.0],
        "tokens": {"generate": 14, "score": 0, "teachers": 0, "update": 0},
    }


def test_results_and_page_have_the_printed_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, trained in (("grpo", [0.5]), ("cepo", [0.75])):
        for seed in (1, 2):
            finished_run(tmp_path / f"{name}-s{seed}", trained)
    page = tmp_path / "page.md"
    page.write_text(f"# Page\n\n{start_mark(PROGRAM)}\nNot run yet.\n\n{END}\nEnd.\n", encoding="utf-8")
    results = tmp_path / "results.json"
    options = ["--seeds", "1", "2", "--out", str(tmp_path), "--results", str(results), "--page", str(page)]
    assert main(["microgeo/grpo", "microgeo/cepo", *options, "trainer.max_steps=1"]) == 0
    record = json.loads(results.read_text(encoding="utf-8"))
    assert (record["files"], record["settings"]) == (["microgeo/grpo", "microgeo/cepo"], ["trainer.max_steps=1"])
    assert [(each["file"], each["seed"]) for each in record["runs"]] == [
        ("grpo", 1),
        ("cepo", 1),
        ("grpo", 2),
        ("cepo", 2),
    ]
    table = table_of(record["runs"])
    assert "| cepo | 2 | 75.0 ± 0.0 | +25.0 ± 0.0 |" in table
    assert capsys.readouterr().out == table + "\n"
    assert page.read_text(encoding="utf-8") == f"# Page\n\n{start_mark(PROGRAM)}\n{table}\n\n{END}\nEnd.\n"


def test_a_page_without_marks_is_refused() -> None:
    with pytest.raises(ValueError, match="lacks the marks"):
        with_table("# Page\n", "| table |", program=PROGRAM)


def test_the_page_of_results_has_the_records_table() -> None:
    page = (ROOT / "lab" / "notes" / "toy-results.md").read_text(encoding="utf-8")
    record = json.loads(LEARNING.read_text(encoding="utf-8"))
    assert with_table(page, table_of(record["runs"]), program=PROGRAM) == page
