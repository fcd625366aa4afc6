"""A reward function of tests, which depends on the response alone."""

from __future__ import annotations

from typing import Any


def parity(samples: list[dict[str, Any]]) -> list[dict[str, float]]:
    """Right where the character codes add up to an even number: half of whatever an untrained model writes."""
    verdicts = [float(sum(map(ord, sample["response"])) % 2 == 0) for sample in samples]
    return [{"overall": verdict, "accuracy": verdict} for verdict in verdicts]
