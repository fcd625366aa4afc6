"""The report of one run: its table, its command, and its page that follows the run; numbers worked out by hand."""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console
from run_folders import report_pixels, validated, wait_for, write_run

from cepo.commands.cli import main
from cepo.errors import DataError
from cepo.report.charts import planned_charts
from cepo.report.page import write_report
from cepo.report.recorded_run import RunData, load_run
from cepo.report.score_tables import Cell
from cepo.report.summary import accuracy_change, run_summary
from cepo.run_folder.layout import STAGES
from cepo.run_folder.writing import encode_line

REPOSITORY = Path(__file__).resolve().parents[2]


def shown(table: object, width: int = 110) -> str:
    output = io.StringIO()
    Console(file=output, width=width).print(table)
    return output.getvalue()


def with_evidence(mixing: float, positive: float, negative: float, weight: float) -> dict[str, float]:
    names = ("lambda", "positive_fraction", "negative_fraction", "weight_mean")
    return {f"evidence/{name}": value for name, value in zip(names, (mixing, positive, negative, weight), strict=True)}


SUMMARY_ROWS = [
    (0, {"val/accuracy": 0.36, "val/num_samples": 100}),
    (1, with_evidence(0.5, 0.2, 0.1, 1.0) | {"timing_s/generate": 1.0, "tokens/generate": 300, "timing_s/step": 4.0}),
    (2, {"timing_s/generate": 9.0, "timing_s/step": 5.0}),
    (3, with_evidence(0.25, 0.4, 0.2, 1.25) | {"timing_s/generate": 2.0, "tokens/generate": 900, "timing_s/step": 6.0}),
    (3, {"val/accuracy": 0.5, "val/num_samples": 100}),
]


def test_the_summary_says_36_to_50_percent_and_14_points(tmp_path: Path) -> None:
    text = shown(run_summary(write_run(tmp_path, SUMMARY_ROWS)))
    assert re.search(r"accuracy at temperature 1[ │]+50.0 ± 5.0 %", text)
    for part in (
        *("from 36.0 ± 4.8 % at step 0", "+14.0 ± 6.9 points"),  # sqrt(.048^2 + .05^2)
        *("30.0 %", "15.0 %", "1.1250", "0.500 to 0.250"),
        "2.00 s, 400 tokens/s",  # median of 1, 9, 2; 1200 tokens in the 3 s of the steps that counted them
        "5.00 s",
    ):
        assert part in text
    assert "paired" not in text
    text = shown(run_summary(write_run(tmp_path / "other", [(1, {"reward/mean": 0.5, "work/teacher_rows": 0})])))
    assert "not measured" in text
    assert "none: this run consulted no teacher" in text
    text = shown(run_summary(write_run(tmp_path / "plug-in", [(1, {"reward/mean": 0.5, "work/teacher_rows": 8})])))
    assert "none: its method records no evidence/* metric" in " ".join(text.split())


def graded_samples(right: str) -> list[dict[str, object]]:
    """A sample of each problem, right where the text has 1; greedy responses are right where it has 0."""
    samples: list[dict[str, object]] = []
    for number, digit in enumerate(right):
        verdicts = {"accuracy": float(digit), "greedy_accuracy": 1 - float(digit)}
        samples.append({"prompt_id": str(number), "response": "", **verdicts})
    return samples


def run_of_two_validations(folder: Path, before: str, after: str, *, num_samples: int) -> RunData:
    rows: list[tuple[int, dict[str, float]]] = []
    for step, right in enumerate((before, after)):
        share = right.count("1") / len(right)
        values = {
            "val/accuracy": share,
            "val/greedy_accuracy": 1 - share,
            "val/num_samples": num_samples,
            "val/num_greedy_samples": num_samples,
        }
        rows.append((step, values))
    write_run(folder, rows, generations={0: graded_samples(before), 1: graded_samples(after)})
    return load_run(folder)


def test_the_paired_error_of_4_problems_with_1_changed_is_25(tmp_path: Path) -> None:
    """The differences 0, 1, 0, 0 have the deviation 0.5, over sqrt(4)."""
    run = run_of_two_validations(tmp_path, "1000", "1100", num_samples=4)
    quarter = pytest.approx(0.25)
    assert accuracy_change(run) == (Cell(mean=0.25, error=quarter), True)
    assert accuracy_change(run, "val/greedy_accuracy") == (Cell(mean=-0.25, error=quarter), True)


def test_missing_samples_give_the_error_of_independent_ones(tmp_path: Path) -> None:
    """Of four samples with a share of 1/2 three are recorded; Wilson's error is sqrt(1/16 + 1/64) / (1 + 1/4) twice: 0.316."""
    run = run_of_two_validations(tmp_path, "10", "10", num_samples=4)
    assert accuracy_change(run) == (Cell(mean=0.0, error=pytest.approx(0.1**0.5)), False)


def test_a_single_problem_has_no_deviation(tmp_path: Path) -> None:
    """Wilson's error of one sample is sqrt(1/4) / 2 at both ends."""
    run = run_of_two_validations(tmp_path, "0", "1", num_samples=1)
    assert accuracy_change(run) == (Cell(mean=1.0, error=pytest.approx(0.25 * 2**0.5)), False)


@pytest.mark.heavy
def test_cepo_report_prints_the_table_and_the_pages_path(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "run", SUMMARY_ROWS)
    page = tmp_path / "deep" / "p.html"
    png = page.with_suffix(".png")
    pdf = page.with_suffix(".pdf")
    assert main(["report", str(run), "--out", str(page), "--png", str(png), "--pdf", str(pdf)]) == 0
    printed = capsys.readouterr().out
    assert printed.endswith(f"page: {page}\n")
    assert "+14.0 ± 6.9 points" in page.read_text("utf-8")
    assert report_pixels(png).std() > 0.02
    assert pdf.read_bytes().startswith(b"%PDF")


@pytest.mark.parametrize("command", ["report", "compare"])
def test_a_missing_folder_or_file_ends_with_2_and_its_name(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    for name, message in (("nowhere", "does not exist"), ("empty", "metrics.jsonl")):
        assert main([command, str(tmp_path / name)]) == 2
        error = capsys.readouterr().err
        assert name in error
        assert message in error


def test_values_and_defaults_are_written_as_yaml(tmp_path: Path) -> None:
    config = "algorithm:\n  adv_estimator: cepo\ntrainer:\n  logger: [file, wandb]\n  val_greedy: true\n  own: x\n"
    text = write_report(write_run(tmp_path / "run", [(1, {"reward/mean": 0.5})], config=config)).read_text("utf-8")
    assert "&lt;object" not in text
    for row in (("trainer.logger", "[file, wandb]", "[console, file]"), ("trainer.own", "x", "required")):
        headings = ("setting", "value", "default")
        cells = [f'<td data-label="{name}"><div>{cell}</div></td>' for name, cell in zip(headings, row, strict=True)]
        assert "".join(cells) in text


def test_a_config_that_is_no_mapping_names_the_file(tmp_path: Path) -> None:
    for text in ("a: [", "- 1\n- 2\n"):
        run = write_run(tmp_path / text[0], [(1, {"reward/mean": 0.5})], config=text)
        with pytest.raises(DataError, match=r"config\.yaml"):
            load_run(run)


def test_the_report_loads_no_torch_when_imported() -> None:
    program = "import sys, cepo.report, cepo.commands.report; print([n for n in ('torch', 'ray', 'vllm') if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.heavy
def test_the_page_follows_the_run_until_ctrl_c(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", validated(0.25, 0.5))
    watch = subprocess.Popen(
        [sys.executable, "-m", "cepo", "report", str(run), "--watch"],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "COLUMNS": "200", "PYTHONUNBUFFERED": "1"},
        # A shell that starts a command in the background has it ignore Ctrl-C, which its children inherit.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        wait_for(run / "report.html", 'data-value="0.5"')
        with (run / "metrics.jsonl").open("ab") as file:
            file.write(encode_line({"step": 2, "reward/mean": 0.8125}) + b'{"step": 3, "rewa')
        wait_for(run / "report.html", 'data-value="0.8125"')
        assert watch.stdout is not None
        # The page is there before its line is printed, which Ctrl-C must not precede.
        assert any(line == f"page after step 2: {run / 'report.html'}\n" for line in watch.stdout)
        watch.send_signal(signal.SIGINT)
        watch.communicate(timeout=30)
    finally:
        watch.kill()
        watch.wait()
    assert watch.returncode == 0


LEAK = {
    "leak/hint_gap_right": "nats per token",
    "leak/hint_gap_wrong": "nats per token",
    "leak/log_likelihood_gap": "nats per response",
    "leak/mention_fraction": "fraction",
}


def test_each_figure_of_the_leak_probe_has_its_own_unit() -> None:
    """As docs/methods.md defines them: gaps per token, a gap per response, and a share of responses."""
    units: dict[str, str] = {}
    for chart, names in planned_charts(sorted(LEAK)):
        units |= dict.fromkeys(names, chart.unit)
    assert units == LEAK


def test_every_stage_has_its_seconds_and_tokens_in_a_chart() -> None:
    """The data file of the charts lists the stages anew: a stage that is missing there would be drawn nowhere."""
    known = [f"{measure}/{stage}" for measure in ("timing_s", "tokens") for stage in STAGES]
    drawn = {name for _, names in planned_charts(known) for name in names}
    assert drawn == set(known)
