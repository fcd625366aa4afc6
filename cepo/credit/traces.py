"""Writes a trace of each measured response: its tokens, V, A*, and each method's advantages and evidence.

`traces.jsonl` has one JSON object per line:

- `prompt_id`, `problem`, `ground_truth`: of the problem; `image`: file of its first image in the folder, or null.
- `row`: number of the response among the rollouts; `response`, `reward`, `correct`.
- `tokens`: T texts; `token_ids`: T numbers.
- `values`: T + 1 numbers, V before each token and after the last; null where not measured.
- `credit`: T numbers, A*; null where not measured.
- `advantages`: method -> T numbers.
- `evidence`: method -> name -> T numbers that the method recorded, such as `delta`, `weight` or `value`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy
from torch import Tensor

from cepo.credit.agreement import response_rows
from cepo.credit.signals import MethodSignal
from cepo.credit.truth import Truth
from cepo.models.processing import Processing
from cepo.tracking.lines import encode_line, finite_or_none
from cepo.tracking.run_folder import png_bytes, write_atomically
from cepo.trainer.asking import Rollouts

FILE, IMAGES = "traces.jsonl", "images"


def write_traces(
    folder: Path, rollouts: Rollouts, truth: Truth, signals: Sequence[MethodSignal], processing: Processing
) -> None:
    """Writes the traces of all measured responses, and the images of their problems."""
    (folder / IMAGES).mkdir(exist_ok=True)
    lines = [_trace(folder, rollouts, truth, signals, processing, row) for row in response_rows(truth)]
    write_atomically(folder / FILE, b"".join(map(encode_line, lines)).decode("utf-8"))


def _trace(
    folder: Path, rollouts: Rollouts, truth: Truth, signals: Sequence[MethodSignal], processing: Processing, row: int
) -> Mapping[str, Any]:
    number = row // rollouts.group_size
    problem, tokens = rollouts.problems[number], rollouts.generations[row].response_ids
    image = None
    if problem.images:
        image = f"{IMAGES}/{number}.png"
        (folder / image).write_bytes(png_bytes(problem.images[0]))

    def of_tokens(tensor: Tensor) -> list[float | None]:
        return [finite_or_none(float(value)) for value in tensor[row, : len(tokens)]]

    values: list[float | None] = [None] * (len(tokens) + 1)
    credit: list[float | None] = [None] * len(tokens)
    for place in numpy.flatnonzero(truth.row == row):
        token = int(truth.token[place])
        credit[token] = float(truth.credit[place])
        values[token] = float(truth.value[place])
        values[token + 1] = float(truth.value[place] + truth.credit[place])
    return {
        "prompt_id": problem.prompt_id,
        "problem": problem.text,
        "ground_truth": problem.ground_truth,
        "image": image,
        "row": row,
        "response": rollouts.responses[row],
        "reward": float(rollouts.rewards[row]),
        "correct": bool(rollouts.correct[row]),
        "tokens": processing.token_texts(tokens),
        "token_ids": list(tokens),
        "values": values,
        "credit": credit,
        "advantages": {each.label: of_tokens(each.signal.advantages) for each in signals},
        "evidence": {
            each.label: {name: of_tokens(tensor) for name, tensor in each.signal.diagnostics.items()}
            for each in signals
            if each.signal.diagnostics
        },
    }
