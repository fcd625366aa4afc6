"""Registers a control: cepo whose right teacher reads another problem's answer (`permuted_references`)."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path

from cepo.algorithms import register_estimator
from cepo.algorithms.cepo import Cepo
from cepo.types import Reference, RolloutGroup, TextReference

TRAINING_PROBLEMS = Path(__file__).parents[3] / "examples" / "real_model" / "train.jsonl"


@functools.cache
def _answers() -> Sequence[str]:
    lines = TRAINING_PROBLEMS.read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["answer"] for line in lines]


@register_estimator("permuted_references")
class PermutedReferences(Cepo):
    """cepo with the answer of a random problem of the training set as right reference, never one equal to the truth.

    What remains of cepo's effect is not knowledge of the answer: it is that a context with an answer differs from one
    without, and that the wrong reference is still the group's own.
    """

    def references(self, group: RolloutGroup) -> Mapping[str, Sequence[Reference | None]]:
        draw = random.Random(f"{group.seed}/{group.step}/{group.prompt_id}")
        others = [answer for answer in _answers() if answer != group.ground_truth]
        answer_of_another = TextReference(text=draw.choice(others))
        references = dict(super().references(group))
        references["correct"] = [answer_of_another] * len(group.rollouts)
        return references
