r"""Predictions written by hand with the verdicts of both scores: ours, and that of lmms-eval's rules.

Each row is a response, its gold answer, our verdict and theirs. The rules of both are in `cepo.rewards.benchmark` and
`lab.harness`; 0.25 stands for an option of four that lmms-eval draws at random.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from evaluation_folders import evaluation, graded

from cepo.errors import DataError
from cepo.evaluation.benchmark_names import TITLES
from cepo.evaluation.comparison import score_table
from cepo.report.score_tables import Cell
from cepo.rewards.benchmark import compute_score, kind_of
from lab.harness import TASKS, exported_log, harness_score
from lab.harness import main as harness

PAPER = str(Path(__file__).parents[1] / "paper.json")
COLOURS = ("red", "blue", "green", "orange")
LENGTHS = ("5 cm", "6 cm", "7 cm", "8 cm", "No correct answer")
COUNTS = ("1", "2", "3", "4", "5")

DYNAMATH = [
    ("<answer>2.0944</answer>", "2.0944", 1, 1),
    (r"so \boxed{2.094}", "2.0944", 1, 0),  # within our 0.001
    (r"\boxed{2.09}", "2.0944", 0, 0),
    (r"\boxed{\frac{2\pi}{3}}", "2.0944", 1, 0),
    ("The result is 2.0944", "2.0944", 0, 1),  # a number that ends a line
    ("The answer is 2.0944.", "2.0944", 1, 1),
    ("<answer>1</answer> no, <answer>2.0944</answer>", "2.0944", 1, 0),  # the first tag
    (r"\boxed{2.0944} <answer>3</answer>", "2.0944", 1, 0),  # the tag before the box
    ("I do not know.", "2.0944", 0, 0),
    (r"\boxed{3.0}", "3", 1, 1),
    (r"\boxed{3.5}", "3", 0, 0),
    ("3", "3", 1, 1),
    (r"\boxed{(3,1)}", "(3.000, 1.000)", 1, 0),
    (r"\boxed{(3.000, 1.000)}", "(3.000, 1.000)", 1, 1),
    ("<answer>Apr</answer>", "Aug", 0, 1),  # both are read as the letter A
    ("<answer>Aug</answer>", "Aug", 1, 1),
    ("<answer>May</answer>", "Aug", 0, 0),
    (r"\boxed{y = 4}", "y = 4", 1, 1),
    (r"\boxed{B}", "B", 1, 1),
    ("<answer>The answer is B. blue</answer>", "B", 1, 1),
    (r"\boxed{b}", "B", 1, 0),
    ("Answer: B", "B", 1, 0),  # neither tag, nor box, nor number
]
LOGICVISTA = [
    (r"\boxed{B}", "B", 1, 1),
    ("<answer>(B)</answer>", "B", 1, 1),
    ("<answer>B</answer>", "B", 1, 1),
    ("The answer is B.", "B", 1, 0),
    ("B", "B", 1, 0),
    ("<answer>Both are correct. D</answer>", "B", 0, 1),  # its first character
    ("<answer>Both are correct. D</answer>", "D", 0, 0),
    (r"\boxed{\text{B}}", "B", 1, 1),
    ("<answer>A</answer> rather <answer>B</answer>", "B", 1, 0),
    (r"\boxed{A} or \boxed{B}", "B", 1, 1),
    (r"\boxed{A, C}", "A, C", 1, 1),
    (r"\boxed{A}", "A, C", 0, 1),  # one of two letters
    (r"\boxed{D}", "A, C", 0, 0),
    ("nothing", "", 0, 1),  # no answer equals the empty gold answer
    (r"\boxed{3}", "3", 1, 1),
    ("so it is 3", "3", 0, 1),
    (r"\boxed{D. a square}", "D", 1, 1),
    (r"\boxed{none of these}", "D", 0, 0),
    ("<answer>D</answer>.", "D", 1, 1),
    ("<answer>Each of them</answer>", "E", 0, 1),
    ("It follows that (D)", "D", 1, 0),
]
WEMATH = [
    (r"\boxed{B}", "B", 1, 1),
    (r"\boxed{6 cm}", "B", 1, 0),  # the option's text
    (r"\boxed{B. 6 cm}", "B", 1, 1),
    ("<answer>B</answer>", "B", 1, 1),
    (r"\boxed{A}", "B", 0, 0),
    ("The answer is (B)", "B", 1, 0),
    ("<answer>C</answer><answer>B</answer>", "B", 1, 0),
    ("<answer>A or B</answer>", "A", 0, 1),
    ("<answer>A or B</answer>", "B", 0, 0),
    (r"\boxed{No correct answer}", "E", 1, 0),
    (r"\boxed{E}", "E", 1, 1),
    (r"\boxed{5 cm}", "A", 1, 0),
    (r"\boxed{10 cm}", "A", 0, 0),
    ("B\n", "B", 1, 0),
    (r"\boxed{\textbf{B}}", "B", 1, 1),
    (r"\boxed{(B)}", "B", 1, 1),
    (r"\boxed{}", "B", 0, 0),
    ("", "B", 0, 0),
    ("<answer>Because the side is 6 cm, B</answer>", "B", 0, 1),  # the B of Because
    ("<answer>Because the side is 7 cm, C</answer>", "C", 0, 0),
    ("The correct option is B: 6 cm.", "B", 1, 0),
]
MATHVISION = [
    (r"\boxed{C}", "C", 1, 1),
    (r"\boxed{3}", "C", 1, 1),
    ("The answer is C.", "C", 1, 1),
    ("The answer is 3.", "C", 1, 1),
    (r"\boxed{B}", "C", 0, 0),
    ("(C)\nbecause each has a right angle", "C", 1, 1),
    (r"\boxed{3.001}", "C", 0, 1),  # equal to 2 decimals
    (r"\boxed{1} then \boxed{C}", "C", 1, 1),
    (r"\boxed{C} then <answer>A</answer>", "C", 1, 1),
    ("<answer>C</answer>", "C", 1, 0),  # it knows no tags
    (r"\boxed{7.5}", "7.5", 1, 1),
    (r"\boxed{\frac{15}{2}}", "7.5", 1, 1),
    (r"\boxed{7.504}", "7.5", 1, 1),
    (r"\boxed{7.51}", "7.5", 0, 0),
    ("So the result is 7.5", "7.5", 0, 1),
    ("x = 7.5", "7.5", 1, 1),
    (r"\boxed{7.5 \text{ cm}}", "7.5", 1, 0),  # cm are two unknowns to it
    (r"\boxed{(3,-4)}", "(3,-4)", 1, 1),
    (r"\boxed{(3, -4)}", "(3,-4)", 1, 1),
    (r"\boxed{(3.0,-4.0)}", "(3,-4)", 1, 0),
    ("", "7.5", 0, 0),
]
MMMU = [
    ("B", "B", 1, 1),
    ("(B)", "B", 1, 1),
    (r"\boxed{B}", "B", 1, 0.25),  # it knows no boxes
    ("The answer is B.", "B", 1, 1),
    ("A sky at noon is blue, so (B)", "B", 1, 1),
    ("A good guess is hard to make here", "B", 0, 0),
    ("A good guess is hard to make here", "A", 0, 1),  # the article
    ("I am sure that it must be blue", "B", 0, 1),
    ("blue", "B", 1, 0.25),  # texts count in more than 5 words alone
    ("red or blue, I cannot tell which one", "B", 0, 1),  # the last of both
    ("", "B", 0, 0.25),
    ("Answer: C", "B", 0, 0),
    ("B. blue", "B", 1, 1),
    ("<answer>B</answer>", "B", 1, 0.25),
    (r"\boxed{A} no, \boxed{B}", "B", 1, 0.25),
    ("Not A but B", "B", 0, 1),
    ("B?!", "B", 0, 1),
    ("D", "B", 0, 0),
    (r"\boxed{42}", "42", 1, 0),  # short answers never count there
    ("42", "42", 1, 0),
    (r"\boxed{Blue}", "blue", 1, 0),
    (r"\boxed{red}", "blue", 0, 0),
]
CASES = {
    "dynamath": (DYNAMATH, (), 1e-3),
    "logicvista": (LOGICVISTA, (), None),
    "wemath": (WEMATH, LENGTHS, None),
    "mathvision": (MATHVISION, COUNTS, 5e-3),
    "mmmu": (MMMU, COLOURS, None),
}


@pytest.mark.parametrize("benchmark", CASES)
def test_each_prediction_gets_the_verdicts_of_both_scores(benchmark: str) -> None:
    rows, choices, tolerance = CASES[benchmark]
    assert len(rows) >= 20
    inputs = []
    for response, gold, _, _ in rows:
        kind = kind_of(gold)
        row = {"benchmark": benchmark, "response": response, "ground_truth": gold, "answer_kind": kind}
        inputs.append(row | {"choices": choices if kind == "choice" else (), "tolerance": tolerance})
    scores = compute_score(inputs)
    theirs = [
        harness_score(benchmark, one["response"], one["ground_truth"], one["answer_kind"], one["choices"])
        for one in inputs
    ]
    found = [(*row[:2], int(score["accuracy"]), share) for row, score, share in zip(rows, scores, theirs, strict=True)]
    assert found == rows


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


def test_each_benchmark_has_a_task_of_its_own() -> None:
    assert sorted(TASKS) == sorted(TITLES)
    assert len(set(TASKS.values())) == len(TASKS)


class FromLog:
    """Reads a log as lmms-eval's model `from_log` does: the first response of each `doc_id` of a task."""

    def __init__(self, file: Path) -> None:
        log: dict[str, Any] = json.loads(file.read_text("utf-8"))
        assert log["args"]["limit"] is None
        self.task = log["model_configs"]["task"]
        self.responses = {record["doc_id"]: record["resps"][0] for record in log["logs"]}

    def generate(self, doc_id: int) -> str:
        return self.responses[doc_id][0]


def test_an_export_has_a_response_to_every_row(tmp_path: Path) -> None:
    """Of 3 rows, the second was left out; the third has 2 responses, of which the first is scored."""
    rows = [graded(0, True), graded(2, True), graded(2, False, response="other")]
    log = exported_log(TASKS["wemath"], rows, num_rows=3, model="org/model")
    file = tmp_path / "log.json"
    file.write_text(json.dumps(log))
    read = FromLog(file)
    assert read.task == "wemath_testmini_reasoning"
    assert [read.generate(number) for number in range(3)] == [r"\boxed{1}", "", r"\boxed{1}"]
    assert log["logs"][2]["resps"] == [[r"\boxed{1}", "other"]]
    assert log["logs"][2]["filtered_resps"] == [r"\boxed{1}"]
    assert log["logs"][2]["target"] == "1"


def test_an_evaluations_logs_have_the_rows_that_were_left_out(tmp_path: Path) -> None:
    """Of 4 rows, 2 were graded, one was too long and one needed a judge."""
    folder = evaluation(tmp_path / "first", "10")
    results = json.loads((folder / "evaluation.json").read_text())
    counts = {"num_problems": 2, "num_left_out": 1, "num_without_judge": 1}
    results["benchmarks"]["dynamath"] |= {"benchmark": "dynamath", **counts}
    (folder / "evaluation.json").write_text(json.dumps(results))
    assert harness([str(folder), "--logs"]) == 0
    read = FromLog(folder / "lmms-eval" / "dynamath" / "dynamath_reasoning.json")
    assert [read.generate(number) for number in range(4)] == [r"\boxed{1}", r"\boxed{0}", "", ""]
