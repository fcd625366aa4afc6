"""Actors of tests on a checkpoint folder, and copies of what they train, and how far these are apart."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cepo.algorithms.settings import TeacherConfig
from cepo.config import load_config
from cepo.models.processing import Processing
from cepo.workers.actor import Actor
from cepo.workers.distributed import whole_tensor
from cepo.workers.worker import KlInLoss, objective_settings


def build_actor(
    folder: Path,
    *overrides: str,
    teacher: TeacherConfig | None = None,
    temperature: float = 1.0,
    **settings: Any,
) -> Actor:
    """In float32 unless the settings say otherwise; keywords are settings of `worker.actor`, dots as `__`."""
    tree = {"model.model_path": folder, "fsdp.mp_param_dtype": "fp32"}
    tree |= {name.replace("__", "."): value for name, value in settings.items()}
    arguments = [f"worker.actor.{name}={value}" for name, value in tree.items()]
    config = load_config(["config=configs/microgeo/base.yaml", *overrides, *arguments])
    return Actor(
        config.worker.actor,
        Processing(str(folder)),
        temperature=temperature,
        teacher=teacher or TeacherConfig(),
        objective_settings=objective_settings(config.worker.actor, KlInLoss.of(config.algorithm)),
        with_reference=not config.algorithm.disable_kl,
        total_steps=10,
        seed=1,
    )


def parameters_of(worker: Any) -> dict[str, Tensor]:
    """Copies of an actor's or a critic's trained weights by name."""
    return {
        name: whole_tensor(parameter.detach()).clone()
        for name, parameter in worker.module.named_parameters()
        if parameter.requires_grad
    }


def differing(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> list[str]:
    """Names whose values are not equal bit for bit."""
    assert left.keys() == right.keys()
    return [name for name in left if not torch.equal(whole_tensor(left[name]), whole_tensor(right[name]))]


def distance(trained: Mapping[str, Tensor], expected: Mapping[str, Tensor], start: Mapping[str, Tensor]) -> float:
    """How far apart two trained sets of weights are, by how far the expected one went from the start."""
    travelled = _norm_of_difference(expected, start)
    assert travelled > 0.01, "nothing was trained"
    return _norm_of_difference(expected, trained) / travelled


def _norm_of_difference(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> float:
    assert left.keys() == right.keys()
    squares = 0.0
    for name, weight in left.items():
        squares += float((weight - right[name]).double().square().sum())
    return squares**0.5
