"""Graded responses and folders of evaluations, as `cepo evaluate` writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cepo.evaluation.results import GENERATIONS_FILE, write_results
from cepo.run_folder.writing import encode_line


def graded(problem: int, correct: bool, *, cluster: str | None = None, **changed: Any) -> dict[str, Any]:
    row = {
        "benchmark": "dynamath", "problem_id": str(problem), "cluster": cluster or str(problem), "kind": "numeric",
        "choices": [], "sample": 0, "ground_truth": "1", "response": rf"\boxed{{{int(correct)}}}", "answer": "5",
        "correct": correct, "problem": "How many?", "length": 10, "finished": True, "scores": {},
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
