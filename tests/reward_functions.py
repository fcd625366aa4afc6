"""Reward functions of tests."""

from __future__ import annotations

from typing import Any

from cepo.rewards.math import compute_score

Scores = list[dict[str, float]]


def parity(samples: list[dict[str, Any]]) -> Scores:
    """Right where the character codes add up to an even number: half of whatever an untrained model writes."""
    verdicts = [float(sum(map(ord, sample["response"])) % 2 == 0) for sample in samples]
    return [{"overall": verdict, "accuracy": verdict} for verdict in verdicts]


def graded(samples: list[dict[str, Any]]) -> Scores:
    """Eighths, by the character codes of whatever an untrained model writes: a group then has one best response."""
    shares = [sum(map(ord, sample["response"])) % 8 / 8 for sample in samples]
    return [{"overall": share, "accuracy": float(share >= 0.5)} for share in shares]


def never(samples: list[dict[str, Any]]) -> Scores:
    return [{"overall": 0.0, "accuracy": 0.0} for _ in samples]


def every_second(samples: list[dict[str, Any]]) -> Scores:
    """Says too whether the reward was told the answer that was found in the response."""
    return [
        {"overall": float(number % 2), "read": float("extracted_answer" in sample)}
        for number, sample in enumerate(samples)
    ]


def by_length(response: str) -> str:
    """An answer of every response."""
    return f"{len(response)} characters"


def of_completions(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    """The package's verifier as a reward function of TRL."""
    texts = [completion[0]["content"] for completion in completions]
    rows = [{"response": text, "ground_truth": truth} for text, truth in zip(texts, answer, strict=True)]
    return [score["overall"] for score in compute_score(rows)]
