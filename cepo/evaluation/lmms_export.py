"""Writes responses to a benchmark in the form in which lmms-eval logs them, so that lmms-eval can score them again.

The file has one record of a log for each row of the data set, as `python3 -m lmms_eval --model from_log` reads it
(lmms-eval 75571cf, lmms_eval/models/simple/from_log.py): `doc_id`, the row's number; `doc`; `target`; `resps`, a list
of one list of responses, of which the first is scored; and `filtered_resps`.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cepo.config import RunConfig
from cepo.evaluation.lmms import LMMS_TASKS
from cepo.evaluation.statistics import Row
from cepo.files.trees import Tree
from cepo.run_folder.writing import write_atomically

if TYPE_CHECKING:
    from cepo.evaluation.tasks import Task

FOLDER = "lmms-eval"


def export(folder: Path, task: Task, rows: Sequence[Row], config: RunConfig) -> Path:
    """Writes the responses to the known benchmark of `task` below `folder`, and returns the file.

    Several sources of one benchmark are written to a folder each, named after them.
    """
    assert task.benchmark is not None
    model = config.worker.actor.model.model_path
    log = exported_log(task.benchmark.name, rows, num_rows=task.num_rows, model=model)
    path = folder / FOLDER / task.name / f"{LMMS_TASKS[task.benchmark.name].name}.json"
    path.parent.mkdir(parents=True)
    write_atomically(path, json.dumps(log, indent=1, ensure_ascii=False) + "\n")
    return path


def exported_log(benchmark: str, rows: Sequence[Row], *, num_rows: int, model: str) -> Tree:
    """Returns the log of responses to a benchmark whose source has `num_rows` rows.

    lmms-eval asks for a response to every row of its data set, so a row that was left out has an empty one.
    """
    by_problem: dict[int, list[Row]] = defaultdict(list)
    for row in rows:
        by_problem[int(row["problem_id"])].append(row)
    return {
        "args": {"model": model, "model_args": "", "limit": None},
        "model_configs": {"task": LMMS_TASKS[benchmark].name},
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
