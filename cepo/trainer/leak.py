"""The leak probe: does the student, without any hint, begin to behave as if it had one?"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import torch

from cepo.data.batch import ScoringRow
from cepo.data.contexts import ContextBuilder
from cepo.data.dataset import Problem
from cepo.metrics import Metrics, mean_of
from cepo.models.inputs import EncodedPrompt
from cepo.rollout.base import Generation
from cepo.trainer.backend import Backend
from cepo.types import Reference

MENTIONS = re.compile(
    r"\b(?:sample|given|provided|reference|known|stated|suggested)\s+(?:final\s+|correct\s+)?(?:answer|solution)\b"
    r"|\b(?:answer|solution)\s+(?:is\s+)?(?:given|provided|stated)\b|\bthe\s+hint\b",
    re.IGNORECASE,
)
"""Words by which a response refers to an answer that its prompt does not hold."""


class ValidationSample(NamedTuple):
    """One response to a held-out problem, with the prompt it answers."""

    problem: Problem
    prompt: EncodedPrompt
    generation: Generation


def leak_metrics(
    samples: Sequence[ValidationSample],
    responses: Sequence[str],
    correct: torch.Tensor,
    contexts: ContextBuilder,
    backend: Backend,
) -> Metrics:
    """Measures on responses that were sampled from plain prompts of held-out problems.

    `leak/mention_fraction`: responses that refer to a given answer, which nobody gave them.
    `leak/hint_gap_right`, `leak/hint_gap_wrong`: mean over tokens of log P(y_t | x, right answer) - log P(y_t | x) in nats,
    apart for right and wrong responses. A student that has absorbed the hint's effect shows a gap that shrinks towards 0
    on wrong responses too: it no longer needs the hint to speak that way. `leak/log_likelihood_gap`: the same summed
    over each response, mean over responses.
    """
    plain, hinted = [], []
    for number, (problem, prompt, generation) in enumerate(samples):
        text = contexts.reference_text(Reference(text=problem.ground_truth))
        plain.append(ScoringRow(context=prompt, response_ids=generation.response_ids, prompt=number))
        context = contexts.teacher(problem, prompt, text)  # beyond the prompt's limit too: nothing is trained on it
        hinted.append(ScoringRow(context=context, response_ids=generation.response_ids, prompt=number))
    gaps = [with_hint - without for with_hint, without in zip(backend.score(hinted), backend.score(plain), strict=True)]
    right = [gap for gap, is_right in zip(gaps, correct.tolist(), strict=True) if is_right]
    wrong = [gap for gap, is_right in zip(gaps, correct.tolist(), strict=True) if not is_right]
    mentioned = torch.tensor([float(MENTIONS.search(response) is not None) for response in responses])
    return {
        "leak/mention_fraction": mean_of(mentioned),
        "leak/hint_gap_right": mean_of(torch.cat([torch.zeros(0), *right])),
        "leak/hint_gap_wrong": mean_of(torch.cat([torch.zeros(0), *wrong])),
        "leak/log_likelihood_gap": mean_of(torch.stack([gap.sum() for gap in gaps])),
    }
