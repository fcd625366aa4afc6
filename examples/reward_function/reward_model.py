"""Rewards responses by a reward model: a transformer with a classification head of one number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

REWARD_TYPE = "batch"


@cache
def _loaded(model: str) -> tuple[Any, Any]:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    head = AutoModelForSequenceClassification.from_pretrained(model, num_labels=1).eval()
    return AutoTokenizer.from_pretrained(model), head


def compute_score(
    samples: Sequence[Mapping[str, Any]], *, model: str, max_length: int = 2048
) -> list[dict[str, float]]:
    """Returns `overall = sigmoid(r(prompt, response))` for each sample, where r is the head's number.

    `model` is a folder or a hub name. Each worker process (`worker.reward.num_cpus`) holds the model once, on the CPU. A
    first call loads it, so give `worker.reward.timeout_seconds` room for that.
    """
    import torch

    tokenizer, head = _loaded(model)
    scores: list[dict[str, float]] = []
    for sample in samples:  # one by one: a score must not depend on the batch's padding
        encoded = tokenizer(
            sample["prompt"], sample["response"], return_tensors="pt", truncation=True, max_length=max_length
        )
        with torch.inference_mode():
            scores.append({"overall": float(head(**encoded).logits[0, 0].sigmoid())})
    return scores
