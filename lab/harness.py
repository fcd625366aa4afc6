r"""Grades an evaluation by lmms-eval's rules beside ours, for a second score that is comparable with published ones.

    python3 -m lab.harness EVALUATION ... [--out by_harness.json] [--logs]
    cepo compare lab/paper.json by_harness.json --out table.tex

With `--logs`, EVALUATION/lmms-eval/BENCHMARK gets the responses as `python3 -m lmms_eval --model from_log` reads them
(lmms-eval 75571cf, lmms_eval/models/simple/from_log.py), which then scores them itself. The log has one record for each
row of the data set: `doc_id`, the row's number; `doc`; `target`; `resps`, a list of one list of responses, of which the
first is scored; and `filtered_resps`.

The rules are those of version 75571cf (2026-08-06), the same as in v0.7, without a judge model:

| benchmark | answer read | right if |
| --- | --- | --- |
| DynaMath, LogicVista, WeMath | first `<answer>`, else last `\boxed{}`, else a number that ends a line | `_reasoning` |
| MathVision | a letter at the end, what follows "the answer is", the last `\boxed{}` | `_mathvision` |
| MMMU, multiple choice | a letter; without one lmms-eval draws one, which scores 1 / options here | same letter |
| MMMU, short answers | | never: these versions compare one character at a time |

These rules read letters where a human reads none, and have no tolerance. Therefore the verdict of `benchmark` differs
in both directions. Values in LaTeX are read by math-verify here, while MathVision's rules use latex2sympy.
"""

from __future__ import annotations

import argparse
import json
import logging
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

from math_verify import parse, verify
from rich.console import Console

from cepo.answers import decimal_value
from cepo.errors import DataError
from cepo.evaluation.benchmark_names import TITLES
from cepo.evaluation.comparison import averaged
from cepo.evaluation.results import read_results, read_rows
from cepo.evaluation.statistics import Row, clustered_mean
from cepo.files.trees import Tree
from cepo.report.score_tables import Cell, Column, ScoreTable, TableRow, write_table

_log = logging.getLogger(__name__)
_LETTERS = "ABCDEFGH"
_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_ENDING_NUMBER = re.compile(r"\b(\d+(?:\.\d+)?)\b\s*\.?\s*$")
_PHRASE = re.compile(r"(?:the |my )?(?:correct |best )?(?:answer|option is|choice is)|i choose|i select|i pick")
_PUNCTUATION = ",.!?;:'\""
_STATED = ("the final answer is", "the answer is", "the correct answer is", "the answer should be")
_SHARE_CONTAINED = 0.9
_GRADED = ("dynamath", "logicvista", "mathvision", "mmmu", "wemath")


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table of both scores, and writes that of lmms-eval's rules in a form that `cepo compare` reads."""
    parser = argparse.ArgumentParser(prog="python3 -m lab.harness", description="Grades by lmms-eval's rules.")
    parser.add_argument("evaluations", nargs="+", type=Path, help="folders that cepo evaluate wrote")
    parser.add_argument("--out", type=Path, help="file of the table by lmms-eval's rules: .json, .md, .csv or .tex")
    parser.add_argument("--logs", action="store_true", help="instead write logs that lmms-eval scores")
    options = parser.parse_args(arguments)
    if options.logs:
        for folder in options.evaluations:
            write_logs(folder)
        return 0
    table = harness_table(options.evaluations)
    Console().print(table.terminal())
    if options.out is not None:
        write_table(table, options.out)
    return 0


def harness_table(folders: Sequence[Path]) -> ScoreTable:
    """Returns the accuracy of evaluations by lmms-eval's rules, in percent; raises `DataError` without a benchmark."""
    rows = [_row(folder) for folder in folders]
    names = dict.fromkeys(name for row in rows for name in row.cells)
    title = "Accuracy in % by lmms-eval's rules, ± standard error; the average is the unweighted mean"
    return ScoreTable(title=title, columns=[Column(name=name, is_ranked=True) for name in names], rows=rows, notes=[])


def _row(folder: Path) -> TableRow:
    model = str(read_results(folder)["model"])
    row = TableRow(group=model, name=folder.resolve().name, cells=dict(_cells(folder)))
    if not row.cells:
        raise DataError(f"{folder} has no benchmark that lmms-eval's rules grade: {', '.join(_GRADED)}")
    return averaged(row)


def _cells(folder: Path) -> Iterator[tuple[str, Cell]]:
    for benchmark, responses in read_rows(folder).items():
        if benchmark not in _GRADED:
            continue
        if any("choices" not in each for each in responses):
            raise DataError(f"{folder} is older than the column of options in its responses; evaluate the model again")
        shares = [
            harness_score(benchmark, each["response"], each["ground_truth"], each["kind"], each["choices"])
            for each in responses
        ]
        estimate = clustered_mean(shares, [each["cluster"] for each in responses])
        error = None if estimate["error"] is None else 100 * estimate["error"]
        yield TITLES[benchmark], Cell(mean=100 * estimate["mean"], error=error)


def harness_score(benchmark: str, response: str, gold: str, kind: str, choices: Sequence[str]) -> float:
    """Returns 1 for right, 0 for wrong, and the probability of right if lmms-eval draws an option at random.

    Args:
        benchmark: dynamath, logicvista, wemath, mathvision or mmmu.
        kind: choice, numeric or text, as in `cepo.rewards.benchmark`.
        choices: the options' texts, empty without options.
    """
    if benchmark == "mmmu":
        if kind != "choice":
            return 0.0
        letter = _mmmu_letter(response, choices)
        return 1 / len(choices) if letter is None else float(letter == gold)
    if benchmark == "mathvision":
        return float(_mathvision(response, gold, choices if kind == "choice" else ()))
    return float(_reasoning(response, gold))


def _reasoning(response: str, gold: str) -> bool:
    """Compares letters if the gold answer has one, else texts, of which one may contain the other; then values."""
    answer, wanted = _without_period(_reasoning_answer(response).strip()), _without_period(gold)
    letter = _choice_letter(wanted)
    if letter:
        if _choice_letter(answer) == letter:
            return True
    else:
        short, long = sorted((answer, wanted), key=len)
        if answer == wanted or (short in long and len(short) >= _SHARE_CONTAINED * len(long)):
            return True
    return _verified(wanted, answer)


def _reasoning_answer(response: str) -> str:
    tagged = _TAGGED.search(response)
    if tagged:
        return tagged[1]
    boxed = _last_box(response)
    if boxed:
        return boxed
    found = (_ENDING_NUMBER.search(line) for line in reversed(response.strip().split("\n")) if line.strip())
    return next((number[1] for number in found if number), "")


def _last_box(text: str) -> str:
    for start in reversed([match.end() for match in re.finditer(r"\\boxed\{", text)]):
        depth = 1
        for place in range(start, len(text)):
            depth += {"{": 1, "}": -1}.get(text[place], 0)
            if depth == 0:
                return text[start:place]
    return ""


def _without_period(text: str) -> str:
    return text.removesuffix(".").strip()


def _choice_letter(text: str) -> str:
    """Returns the letter A to H that a text seems to choose: its first or last character, or by ever weaker signs."""
    text = text.strip()
    for character in _PUNCTUATION:
        text = text.strip(character)
    text = text.strip()
    if not text:
        return ""
    for end in (text[0], text[-1]):
        if end in _LETTERS:
            return end
    padded = f" {text} "
    signs = [{letter: f"{number}. {letter}" for number, letter in enumerate(_LETTERS, start=1)}]
    signs += [{letter: form.format(letter) for letter in _LETTERS} for form in ("({})", "{}.", "{}:", "{})", "{} ")]
    phrase = _PHRASE.search(padded.lower())
    after = re.search(f"[{_LETTERS}]", padded[phrase.start() :]) if phrase else None
    for rank, forms in enumerate(signs):
        if rank == 1 and after:
            return after[0]
        found = {padded.rfind(form): letter for letter, form in forms.items() if form in padded}
        if found:
            return found[min(found)]
    tied = {padded.rfind(letter + mark): letter for letter in _LETTERS for mark in "-_=" if letter + mark in padded}
    anywhere = tied or {padded.rfind(letter): letter for letter in _LETTERS if letter in padded}
    return anywhere[min(anywhere)] if anywhere else ""


def _verified(gold: str, answer: str) -> bool:
    """Compares two texts by math-verify; texts that it cannot read are wrong, as in lmms-eval."""
    try:
        return bool(verify(parse(gold), parse(answer)))  # math-verify's time limits need the main thread
    except Exception as error:
        _log.debug("math-verify cannot compare %r with %r: %s", answer, gold, error)
        return False


def _mmmu_letter(response: str, choices: Sequence[str]) -> str | None:
    """Returns the option chosen by letter or, in a response of more than 5 words, by the option's text; else None."""
    for character in _PUNCTUATION[:-1]:
        response = response.strip(character)
    text = f" {response} "
    letters = "ABCDEFGHIJ"[: len(choices)]
    for form in ("({})", "{} ", "{}."):
        found = [letter for letter in letters if form.format(letter) in text]
        if found:
            place = "({})" if form == "({})" else " {} "
            return max(found, key=lambda letter: text.rfind(place.format(letter)))
    lowered = text.lower()
    if len(text.split()) > 5:
        named = [(lowered.rfind(choice.lower()), letter) for letter, choice in zip(letters, choices, strict=True)]
        best = max((one for one in named if one[0] >= 0), key=lambda one: one[0], default=None)
        return best and best[1]
    return None


def _mathvision(response: str, gold: str, choices: Sequence[str]) -> bool:
    """Compares with the gold answer and the gold option's text, in lower case or as values to 2 decimals."""
    answer = _mathvision_answer(response.strip())
    option = choices["ABCDEFGHIJ".index(gold)] if choices and gold in "ABCDEFGHIJ" else ""
    return any(_same_to_2_decimals(answer, wanted.lower().strip()) for wanted in (gold, option))


def _mathvision_answer(text: str) -> str:
    for letter in "ABCDE":
        ends = (f" {letter}.", f" ({letter}).")
        starts = (f"{letter}\n", f"({letter})\n", f"({letter}) {letter}\n")
        if text.endswith(ends) or text.startswith(starts):
            text = letter
    last = text.split("is ")[-1].rstrip(".")
    if re.fullmatch(r"\s*[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?\s*", last):
        text = last
    if "oxed{" not in text:
        for stated in _STATED:
            for spelled in (stated, stated.replace("the", "The", 1)):
                _, found, after = text.rpartition(spelled)
                text = after.strip().split("\n")[0].split(". ")[0] if found else text
    else:
        text = _last_box(text) or text.rpartition("oxed{")[2].partition("}")[0]
    text = re.split(r"=|\\approx", text.lower())[-1]
    text = re.sub(r"\\(?:text|mbox|left|right|,|!)|\^\{?\\circ\}?|\\?[$%]|units|km|m\^3|\s", "", text)
    letter = re.fullmatch(r"[({]*([a-e])[)}]*\.?", text)
    return letter[1] if letter else text.rstrip(".").lstrip(":")


def _same_to_2_decimals(answer: str, wanted: str) -> bool:
    if not answer or not wanted:
        return False
    if answer == wanted:
        return True
    if re.search(r"\{[a-z]+\}", answer):  # latex2sympy reads the letters of a unit as unknowns
        return False
    values = decimal_value(answer), decimal_value(wanted)
    return values[0] is not None and values[1] is not None and round(values[0], 2) == round(values[1], 2)


TASKS = {
    "dynamath": "dynamath_reasoning",
    "logicvista": "logicvista_reasoning",
    "mathvision": "mathvision_reason_testmini_reasoning",
    "mathvista": "mathvista_testmini_cot_reasoning",
    "mmmu": "mmmu_val_reasoning",
    "wemath": "wemath_testmini_reasoning",
}
"""lmms-eval's task of each benchmark."""


def write_logs(folder: Path) -> None:
    """Writes an evaluation's responses to its benchmarks as logs for lmms-eval; raises `DataError` if it is damaged."""
    results = read_results(folder)
    for name, rows in read_rows(folder).items():
        figures = results["benchmarks"][name]
        if figures["benchmark"] is None:
            continue
        task = TASKS[figures["benchmark"]]
        num_rows = figures["num_problems"] + figures["num_left_out"] + figures["num_without_judge"]
        log = exported_log(task, rows, num_rows=num_rows, model=results["model"])
        out = folder / "lmms-eval" / name
        out.mkdir(parents=True)
        (out / f"{task}.json").write_text(json.dumps(log, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def exported_log(task: str, rows: Sequence[Row], *, num_rows: int, model: str) -> Tree:
    """Returns the log of responses to a benchmark whose source has `num_rows` rows.

    lmms-eval asks for a response to every row of its data set, so a row that was left out has an empty one.
    """
    by_problem: dict[int, list[Row]] = defaultdict(list)
    for row in rows:
        by_problem[int(row["problem_id"])].append(row)
    return {
        "args": {"model": model, "model_args": "", "limit": None},
        "model_configs": {"task": task},
        "logs": [_record(number, by_problem[number]) for number in range(num_rows)],
    }


def _record(number: int, rows: Sequence[Row]) -> Tree:
    responses = [row["response"] for row in rows] or [""]
    return {
        "doc_id": number,
        "doc": {"problem": rows[0]["problem"]} if rows else {},
        "target": rows[0]["ground_truth"] if rows else "",
        "resps": [responses],
        "filtered_resps": [responses[0]],
    }


if __name__ == "__main__":
    sys.exit(main())
