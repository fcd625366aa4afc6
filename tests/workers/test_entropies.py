"""The entropy of the distribution that a response was drawn from, at the rollout's temperature."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForImageTextToText

from cepo.algorithms.settings import TeacherConfig
from cepo.config.loader import load_config
from cepo.data.batch import ScoringRow
from cepo.models.processing import Processing
from cepo.workers.actor import Actor
from cepo.workers.worker import objective_settings


def test_entropies_at_temperature_2_are_those_of_halved_logits(
    tiny_model_folder: Path, tiny_processing: Processing
) -> None:
    path = str(tiny_model_folder)
    config = load_config(
        [
            "config=configs/microgeo/base.yaml",
            f"worker.actor.model.model_path={path}",
            "worker.actor.fsdp.mp_param_dtype=fp32",
            "worker.rollout.temperature=2",
        ]
    )
    actor = Actor(
        config.worker.actor,
        tiny_processing,
        temperature=config.worker.rollout.temperature,
        teacher=TeacherConfig(),
        objective_settings=objective_settings(config.worker.actor, config.algorithm),
        with_reference=False,
        total_steps=1,
        seed=1,
    )
    row = ScoringRow(context=tiny_processing.encode("Find x.", None), response_ids=(11, 12, 13, 14))
    (found,) = actor.score([row], result="entropy")
    ids = torch.tensor([[*row.context.token_ids, *row.response_ids]])
    with torch.no_grad():
        logits = AutoModelForImageTextToText.from_pretrained(path)(input_ids=ids).logits[0, -5:-1]
    expected, other = (
        torch.distributions.Categorical(logits=logits / temperature).entropy() for temperature in (2.0, 1.0)
    )
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)
    assert (found - other).abs().min() > 1e-2
