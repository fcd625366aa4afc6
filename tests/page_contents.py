"""What pages show in tests: runs, evaluations and measurements of credit made by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import json_files
import numpy
from run_folders import group, rollout, write_run

from cepo.credit.agreement import QUARTERS
from cepo.evaluation.results import write_results
from cepo.evaluation.statistics import benchmark_figures
from cepo.run_folder.layout import STAGES
from cepo.run_folder.trace import GroupRecord, RolloutRecord

METRICS = [
    "reward/mean",
    "reward/std",
    "reward/correct",
    "response_length/mean",
    "response_length/min",
    "response_length/max",
    "evidence/positive_fraction",
    "evidence/negative_fraction",
    "evidence/lambda",
    "actor/grad_norm",
    "actor/pg_loss",
    "groups/mixed",
    "groups/all_right",
    "groups/all_wrong",
    "rollout/entropy",
    "timing_s/step",
    *(f"timing_s/{stage}" for stage in STAGES),
]


def metric_rows(count: int) -> list[tuple[int, Mapping[str, float]]]:
    """Steps from 1 on with random values of all metrics."""
    values = numpy.random.default_rng(count).uniform(-0.5, 1.5, (count, len(METRICS)))
    rows: list[tuple[int, Mapping[str, float]]] = []
    for step, numbers in enumerate(values.tolist(), start=1):
        rows.append((step, dict(zip(METRICS, numbers, strict=True))))
    return rows


def varied_rollout(count: int, seed: int, *, right: bool) -> RolloutRecord:
    """A rollout of as many tokens whose log-probs are all different."""
    drawn = numpy.random.default_rng(seed).normal(-1.0, 0.7, (3, count)).astype("float32")
    log_probs = dict(zip(("student", "correct", "wrong"), drawn.tolist(), strict=True))
    delta: list[float] = []
    for correct, wrong in zip(log_probs["correct"], log_probs["wrong"], strict=True):
        delta.append(correct - wrong)
    tokens = [f" w{place % 997}" for place in range(count)]
    return replace(
        rollout(right=right, tokens=tokens, delta=None),
        log_probs=log_probs,
        references={"correct": "24", "wrong": "7"},
        weight=[1.0 + 0.25 * (place % 2) for place in range(count)],
        delta=delta,
    )


def mixed_group(step: int, tokens: int = 12, size: int = 2, **changes: Any) -> GroupRecord:
    """Rollouts that are right and wrong in turn."""
    rollouts = [varied_rollout(tokens, 10 * step + number, right=number % 2 == 0) for number in range(size)]
    return group(step, rollouts, **changes)


def run_with_metrics(folder: Path, steps: int, groups: Sequence[GroupRecord]) -> Path:
    return write_run(folder, metric_rows(steps), groups=groups)


def evaluation(folder: Path, right: Sequence[bool], image: str | None = None) -> Path:
    """The folder of an evaluation with one response per problem."""
    rows: list[dict[str, Any]] = []
    for number, is_right in enumerate(right):
        row = {
            "benchmark": "held_out",
            "problem_id": str(number),
            "cluster": str(number),
            "problem": f"<image>problem {number}",
            "image": image,
            "kind": "numeric",
            "choices": [],
            "ground_truth": "7",
            "sample": 0,
            "response": f"response {number}",
            "answer": "7",
            "length": 3,
            "correct": is_right,
            "finished": True,
            "scores": {},
        }
        rows.append(row)
    json_files.write_lines(folder / "generations.jsonl", rows)
    description = {
        "checkpoint": None,
        "model": "tiny/model",
        "generator": "vllm",
        "sampling": {"num_samples": 1, "temperature": 1.0},
    }
    write_results(folder, description, {"held_out": benchmark_figures(rows, has_variants=False)})
    return folder


def figure(value: float | None) -> dict[str, float | None]:
    """A figure of a measurement with an error of 0.1."""
    if value is None:
        return {"value": None, "error": 0.1, "low": None, "high": None}
    return {"value": value, "error": 0.1, "low": value - 0.2, "high": value + 0.2}


def credit_results(**pearson: float | None) -> dict[str, Any]:
    """A measurement of 12 problems, in which all figures of a method have one value."""
    rows: list[dict[str, Any]] = []
    for name, value in pearson.items():
        kind = "control" if name == "oracle" else "method"
        figures = dict.fromkeys(["pearson", "pearson_corrected", "auroc", "share_on_decisive"], figure(value))
        rows.append({"name": name, "kind": kind, **figures})
    known = dict.fromkeys(["nats", *QUARTERS, "limit", "wrong"], figure(0.5))
    return {
        "description": {"checkpoint": None, "model": "tiny/model", "generator": "vllm"},
        "counts": {
            "problems": 12,
            "responses": 4,
            "tokens": 4,
            "decisive_tokens": 4,
            "prefixes": 4,
            "continuations": 4,
            "tokens_sampled": 900,
            "share_right": 0.5,
        },
        "ceiling": {"value": 0.9, "error": 0.05, "low": 0.8, "high": 1.0},
        "knowledge": [{"name": "correct", **known}],
        "credit": rows,
        "value": rows,
    }
