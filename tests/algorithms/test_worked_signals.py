"""The table of signals that were worked out by hand."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from case_files import cases
from factories import token_batch
from torch import Tensor
from worked_examples import tensor

from cepo.algorithms import build_estimator
from cepo.metrics import results
from cepo.types import TokenBatch

EXAMPLES = cases(__file__, "worked_signals.yaml")


def views_of(example: dict[str, Any]) -> dict[str, Tensor]:
    """The teachers' log-probs, (B, T) each."""
    if "contrast" in example:
        half = tensor(example["contrast"]) / 2
        mean = tensor(example["certainty"])
        return {"correct": mean + half, "wrong": mean - half}
    return {name: tensor(rows) for name, rows in example.get("views", {}).items()}


def batch_of(example: dict[str, Any]) -> TokenBatch:
    rewards = tensor(example["rewards"])
    views = views_of(example)
    width = max([1, *example.get("lengths", []), *(view.shape[1] for view in views.values())])
    student = tensor(example.get("student", -1))
    batch = token_batch(
        rewards.tolist(),
        example.get("groups", [0] * len(rewards)),
        lengths=example.get("lengths", [width] * len(rewards)),
        old=student.expand(len(rewards), width),
        views=views,
        dtype=torch.float64,
    )
    if "values" in example:
        return dataclasses.replace(batch, values=tensor(example["values"]))
    return batch


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_signal_is_that_worked_out_by_hand(name: str) -> None:
    example = EXAMPLES[name]
    signal = build_estimator(example["method"], example.get("settings", {})).signal(batch_of(example), step=0)
    actual: dict[str, Any] = {"advantages": signal.advantages, "returns": signal.returns}
    actual |= signal.diagnostics
    actual |= results(signal.metrics)
    for quantity, numbers in example["expected"].items():
        expected = tensor(numbers)
        computed = torch.as_tensor(actual[quantity], dtype=torch.float64).reshape(expected.shape)
        torch.testing.assert_close(computed, expected, rtol=1e-9, atol=1e-12)
