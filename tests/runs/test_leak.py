"""The leak probe against plain transformers, with its sign."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from training_runs import picture, random_response, reference_log_probs, reference_model

from cepo.algorithms.settings import TeacherConfig
from cepo.data.batch import ScoringRow
from cepo.data.contexts import ContextBuilder
from cepo.data.dataset import Problem
from cepo.metrics import results
from cepo.models.processing import Processing
from cepo.rollout.generator import Generation
from cepo.trainer.asking import Rollouts
from cepo.trainer.validation import leak_metrics
from cepo.workers.actor import Actor

pytestmark = pytest.mark.heavy


def test_leak_gaps_are_log_probs_with_less_without_the_answer(
    build_actor: Callable[..., Actor], tiny_model_folder: Path, tiny_processing: Processing
) -> None:
    problem = Problem(
        prompt_id="0", text="<image>Find x.", images=(picture(1),), ground_truth="4", solution=None, columns={}
    )
    contexts = ContextBuilder(tiny_processing, TeacherConfig(), max_context_length=512)
    plain = contexts.student(problem)
    hinted = contexts.teacher(problem, plain, "4")
    responses = [random_response(length, length) for length in (5, 3, 9)]
    model = reference_model(tiny_model_folder)
    image_token = tiny_processing.image_token_id
    assert image_token is not None
    with_answer, without = (
        [reference_log_probs(model, ScoringRow(context=context, response_ids=ids), image_token) for ids in responses]
        for context in (hinted, plain)
    )
    gaps = [one - other for one, other in zip(with_answer, without, strict=True)]
    rollouts = Rollouts(
        step=0,
        problems=[problem],
        prompts=[plain],
        generations=[
            Generation(response_ids=ids, log_probs=(0.0,) * len(ids), finished=True) for ids in (*responses, (1, 2))
        ],
        responses=["it is 4", "as the given answer says", "the hint is 4", "not among the rows that are probed"],
        scores=[{"overall": 0.0}] * 4,
        correct=torch.tensor([True, False, False, True]),
    )
    found = results(leak_metrics(rollouts, 3, contexts, cast("Any", build_actor())))
    assert found == pytest.approx(
        {
            "leak/mention_fraction": 2 / 3,
            "leak/hint_gap_right": float(gaps[0].mean()),
            "leak/hint_gap_wrong": float(torch.cat(gaps[1:]).mean()),
            "leak/log_likelihood_gap": sum(float(gap.sum()) for gap in gaps) / 3,
        },
        abs=1e-5,
    )
    assert min(abs(value) for value in found.values()) > 1e-3
