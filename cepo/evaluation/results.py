"""Writes and reads the folder of an evaluation: its figures and its graded responses."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

from cepo.errors import DataError
from cepo.evaluation.statistics import Row, macro_average
from cepo.files.safe_files import read_json, read_objects
from cepo.files.trees import Fields, Tree
from cepo.run_folder.writing import write_atomically

RESULTS_FILE = "evaluation.json"
GENERATIONS_FILE = "generations.jsonl"
PAGE_FILE = "evaluation.html"


def write_results(folder: Path, description: Fields, benchmarks: Fields) -> Tree:
    """Writes evaluation.json: the description, each benchmark's statistics, and the average over several benchmarks."""
    results = {**description, "benchmarks": dict(benchmarks)}
    if len(benchmarks) > 1:
        results["average"] = macro_average([figures["accuracy"] for figures in benchmarks.values()])
    write_atomically(folder / RESULTS_FILE, json.dumps(results, indent=2, ensure_ascii=False) + "\n")
    return results


def read_results(folder: Path) -> Tree:
    """Returns the content of evaluation.json; raises `DataError` if the evaluation is not finished, or it is damaged."""
    path = folder / RESULTS_FILE
    if not path.is_file():
        raise DataError(
            f"{folder} holds no finished evaluation ({RESULTS_FILE}); give a folder that cepo evaluate wrote"
        )
    return read_json(path, dict, within=folder)


def free_name(name: str, is_taken: Callable[[str], bool]) -> str:
    """Returns the name, with a number from 2 on if it is taken."""
    free = name
    number = 1
    while is_taken(free):
        number += 1
        free = f"{name}-{number}"
    return free


def read_rows(folder: Path) -> dict[str, list[Row]]:
    """Returns an evaluation's graded responses by benchmark, without ungraded ones; raises `DataError` if it is not finished."""
    read_results(folder)
    rows: dict[str, list[Row]] = defaultdict(list)
    for row in read_objects(folder / GENERATIONS_FILE, within=folder):
        if "correct" in row and row["correct"] is None:  # a judge was needed and gave no verdict
            continue
        if not all(isinstance(row.get(name), str) for name in ("benchmark", "problem_id", "cluster", "ground_truth")):
            raise DataError(f"{folder / GENERATIONS_FILE}: a row has no benchmark, problem or truth; evaluate again")
        rows[row["benchmark"]].append(row | {"correct": bool(row.get("correct"))})
    return rows
