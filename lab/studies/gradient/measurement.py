"""Measures signal, noise and direction of the methods' gradients over batches of rollouts at fixed weights."""

from __future__ import annotations

import dataclasses
import json
import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cepo.algorithms import Estimator
from cepo.credit.agreement import MethodSignal, signals_of
from cepo.credit.resources import Session
from cepo.credit.truth import claim_folder, read_whole
from cepo.errors import DataError
from cepo.files.safe_files import read_json
from cepo.run_folder.writing import write_atomically
from cepo.terminal.progress import Progress
from cepo.trainer.batches import actor_batches
from lab.studies.gradient.signal_to_noise import GradientStore, gradient_figures
from testing.rows import gradients_of

logger = logging.getLogger(__name__)

RESULTS_FILE = "gradient.json"


class GradientMeasurement:
    """A measurement in `folder`, resumed from the batches that the folder holds.

    Batch b has the prompts and sampling seeds of training step b. The gradients are those of the configuration's policy
    loss with respect to all trained weights, as an update computes them before clipping.

    Args:
        num_batches: K.
        dimensions: size of a gradient's projection; 0: none.

    Raises:
        ConfigError: the folder holds a measurement with other settings, or the gradients would fill the disk.
    """

    def __init__(
        self,
        folder: Path,
        session: Session,
        methods: Mapping[str, Estimator],
        *,
        num_batches: int,
        dimensions: int,
        checkpoint: str | None,
    ) -> None:
        own = {"measures": "gradient", "checkpoint": checkpoint, "methods": list(methods)}
        config = session.config
        actor = {"loss_type": config.worker.actor.loss_type, "loss_avg_mode": config.worker.actor.loss_avg_mode}
        claim_folder(folder, {**own, **actor, "batches": num_batches, "projections": dimensions}, config)
        self._folder, self._session, self._methods, self._number = folder, session, methods, num_batches
        self._checkpoint = checkpoint
        self._dimensions, self._seed = dimensions, config.worker.rollout.seed
        self._store = GradientStore(folder / "gradients", dimensions=dimensions, seed=self._seed)
        weights = sum(each.numel() for each in session.backend.actor.module.parameters() if each.requires_grad)
        self._num_weights = weights
        self._store.require_room(weights, num_estimators=len(methods), num_batches=num_batches)

    def lines(self) -> list[str]:
        """Describes the work, with an estimate of its time from one batch, which is kept."""
        missing = self._missing()
        count = f"{self._number} batches of {len(self._methods)} gradients in {self._num_weights:,} weights"
        if not missing:
            return [count]
        start = time.perf_counter()
        self._measure(missing[0])
        left = (len(missing) - 1) * (time.perf_counter() - start) / 60
        return [count, f"{len(missing) - 1} batches are left, about {left:.1f} minutes"]

    def run(self) -> dict[str, Any]:
        """Computes the missing batches, writes and returns the results, and deletes the gradients."""
        if not (self._folder / RESULTS_FILE).exists():
            missing = self._missing()
            with Progress("batches of gradients", len(missing)) as progress:
                for batch in missing:
                    self._measure(batch)
                    progress.update()
            write_atomically(self._folder / RESULTS_FILE, json.dumps(self._results(), indent=1) + "\n")
            self._store.remove()
        with read_whole(self._folder / RESULTS_FILE):
            return read_json(self._folder / RESULTS_FILE, dict, within=self._folder)

    def _missing(self) -> list[int]:
        return [batch for batch in range(self._number) if batch not in self._store]

    def _measure(self, batch: int) -> None:
        with_baselines = any("reward_baselines" in method.reads for method in self._methods.values())
        rollouts = self._session.sample(batch, with_baselines=with_baselines)
        signals = signals_of(rollouts, self._methods, self._session)
        self._store.write(batch, torch.stack([self._gradient(each) for each in signals]))
        self._session.backend.finish_step(batch)

    def _gradient(self, each: MethodSignal) -> Tensor:
        rollouts = each.batch.rollouts
        (rows,) = actor_batches(
            each.batch,
            each.signal,
            num_prompts=len(rollouts.problems),
            max_response_length=self._session.config.data.max_response_length,
        )
        return self._store.reduced(gradients_of(self._session.backend.actor, rows))

    def _results(self) -> dict[str, Any]:
        products = self._store.products(self._number)
        if any(not each.own.any() for each in products):
            raise DataError(
                "a method's gradient is 0 in all batches: all groups have equal rewards, or its advantages are 0"
            )
        figures = gradient_figures(products, seed=self._seed)
        data, rollout = self._session.config.data, self._session.config.worker.rollout
        return {
            "description": self._session.description(self._checkpoint),
            "counts": {
                "batches": self._number,
                "prompts": data.rollout_batch_size,
                "responses": rollout.n,
                "weights": self._num_weights,
                "projections": self._dimensions,
                "largest_length_error": self._store.largest_length_error(products, self._number),
            },
            "gradient": [
                {"name": name, **dataclasses.asdict(each)} for name, each in zip(self._methods, figures, strict=True)
            ],
        }
