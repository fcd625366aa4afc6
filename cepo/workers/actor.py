"""Implements the policy on one device: it is scored, updated, used as teacher, and sent to the engine."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, Unpack

import torch
from torch import Tensor

from cepo.algorithms.settings import TeacherConfig
from cepo.config.worker_schema import ActorConfig
from cepo.data.batch import OWN_VIEW, OptimizerBatch, ScoringOptions, ScoringRow
from cepo.losses.importance import agreement_metrics
from cepo.losses.objective import ObjectiveSettings, ObjectiveTerms, objective, step_metrics
from cepo.metrics import Metrics, fraction, max_value, merge_metrics, sum_value
from cepo.models.processing import Processing
from cepo.rollout.generator import AdapterWeights, FullWeights, Weights
from cepo.types import DivergenceConfig
from cepo.workers.building import build_scoring_model
from cepo.workers.distributed import GatheredWeights, MergedWeights, on_first_rank, reshard, trained_weights
from cepo.workers.kept_states import KeptStates
from cepo.workers.passes import RankPass
from cepo.workers.scoring_model import ScoringModel, TeacherStates
from cepo.workers.teacher_weights import TeacherWeights
from cepo.workers.trained import Trained

FULL_KL = DivergenceConfig(kind="reverse_kl")
"""The settings of KL(P_student || P_reference) over the whole vocabulary."""


class Actor(Trained[ActorConfig, ScoringModel, OptimizerBatch]):
    """The trained policy, with LoRA or full fine-tuning.

    Args:
        temperature: the rollout temperature, by which logits are divided before every log-prob.
        with_reference: whether the initial weights are needed for a KL penalty.
    """

    name = "actor"

    def __init__(
        self,
        config: ActorConfig,
        processing: Processing,
        *,
        temperature: float,
        teacher: TeacherConfig,
        objective_settings: ObjectiveSettings,
        with_reference: bool,
        total_steps: int,
        seed: int,
        longest_row: int | None = None,
    ) -> None:
        module = build_scoring_model(config, temperature=temperature, seed=seed)
        super().__init__(config, processing, module, total_steps=total_steps, longest_row=longest_row)
        self.teacher_weights = TeacherWeights(module, teacher)
        initial = TeacherConfig(source="reference")
        self.reference_weights = TeacherWeights(module, initial) if with_reference else None
        self.kept = KeptStates()
        self._objective = objective_settings
        self._reported = (0, 0)

    @torch.no_grad()
    def score(self, rows: Sequence[ScoringRow], **options: Unpack[ScoringOptions]) -> list[Tensor]:
        """Returns each row's log-probs, or another `result`, (response length,) float32 on the CPU."""
        self.to_device()
        self.module.eval()
        keep, result = options.get("keep_states"), options.get("result", "log_probs")
        weights = self.teacher_weights if options.get("as_teacher") else None
        if options.get("as_reference"):
            weights = self.reference_weights
            assert weights is not None, "no KL penalty was announced"
        states: dict[int, Tensor] = {}

        def compute(part: RankPass) -> Tensor:
            beside = None
            if result == "reference_kl":
                needed = [rows[index] for index in part.indices]
                beside = self.kept.states_for(OWN_VIEW, part.rows, FULL_KL, needed=needed)
            log_probs, (other, *_) = self.module(
                self.collate(part),
                () if beside is None else (beside,),
                entropy=result == "entropy",
                temperature=options.get("temperature"),
            )
            if keep is not None:
                of_rows = zip(part.rows, other.cpu().split([len(row.response_ids) for row in part.rows]), strict=True)
                states.update({row.row: state for row, state in of_rows if row.view == keep and row.row is not None})
            return log_probs if result == "log_probs" else other

        with nullcontext() if weights is None else weights.active():
            results = self._evaluate(rows, compute, "scoring")
            if keep is not None:
                self.kept.keep(keep, states, self.module)
            reshard(self.module)
        return results

    def update(self, batches: Sequence[OptimizerBatch], *, step: int) -> Metrics:
        """See `Trained.update`; adds the work since the last update (`_max`: over ranks), and the share saved."""
        return merge_metrics([super().update(batches, step=step), self.work_metrics()])

    def work_metrics(self) -> Metrics:
        """Returns the tokens computed since the last call, with padding, the share saved, and the images encoded."""
        computed, asked = self.tokens_computed - self._reported[0], self.tokens_asked - self._reported[1]
        self._reported = (self.tokens_computed, self.tokens_asked)
        encoded = self.module.encoder.drain_count()
        return {
            "work/pictures_encoded": sum_value(encoded),
            "work/pictures_encoded_max": max_value(encoded),
            "work/tokens_computed": sum_value(computed),
            "work/tokens_computed_max": max_value(computed),
            "work/tokens_saved": fraction(asked - computed, asked),
        }

    def forget_work(self) -> None:
        """Discards the counts of tokens and images since the last update, so that no step counts a validation's."""
        self.work_metrics()
        self.module.encoder.forget()

    def finish_step(self, step: int) -> None:
        """Frees the step's caches and refreshes the teacher's weights after the update of the 0-based step."""
        self.kept.forget()
        self.module.encoder.forget()
        self.teacher_weights.after_update(step)

    def rollout_weights(self, *, merged: bool = False) -> Weights:
        """Returns the current weights under the rollout engine's names: under LoRA only the adapter, else all weights.

        Every rank gets the whole adapter. Full weights are gathered one at a time as they are read, which all ranks
        must do together before their next call; so are weights with the adapter merged into them (`lora.served_rank`).
        """
        lora = self._config.model.lora
        if lora.rank == 0:
            return FullWeights(tensors=GatheredWeights(self.module))
        if lora.served_rank(merged=merged) > 0:
            return self.adapter_weights()
        return FullWeights(tensors=MergedWeights(self.module, scale=lora.alpha / lora.rank))

    @property
    def has_adapter(self) -> bool:
        return self._config.model.lora.rank > 0

    def adapter_weights(self) -> AdapterWeights:
        """Returns the whole adapter in PEFT's format on every rank; collective."""
        from peft import get_peft_model_state_dict

        peft_model: Any = self.module.model
        tensors: Any = trained_weights(self.module)
        return AdapterWeights(
            tensors=get_peft_model_state_dict(peft_model, state_dict=tensors),
            adapter_config=peft_model.peft_config["default"].to_dict(),
        )

    def _accumulate(self, batch: OptimizerBatch) -> list[Metrics]:
        common = step_metrics(self._objective, batch.denominators, distils=batch.distillation is not None)
        return [*super()._accumulate(batch), on_first_rank(common)]

    def _accumulate_gradient(self, batch: OptimizerBatch, weights: Tensor, part: RankPass) -> Metrics:
        own = batch.at(part.indices)
        teachers = self._teachers(own, part.rows)
        flat, beside = self.module(self.collate(part), tuple(teachers.values()))
        if not part.indices:
            flat.sum().mul(0.0).backward()
            return {}

        def here(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.to(self.device)

        given, mask = own.old_log_probs.to(self.device), own.response_mask.to(self.device)
        blank = torch.zeros_like(given)
        log_probs = blank.masked_scatter(mask, flat)
        distillation, sampled = own.distillation, here(own.sampled_log_probs)
        terms = ObjectiveTerms(
            old_log_probs=log_probs.detach() if batch.on_policy else given,
            sampled_log_probs=given if sampled is None else sampled,
            advantages=own.advantages.to(self.device),
            response_mask=mask,
            weight=weights[part.indices].to(self.device),
            reference_log_probs=here(own.reference_log_probs),
            divergence_weight=here(None if distillation is None else distillation.token_weight),
        )
        divergences = {name: blank.masked_scatter(mask, values) for name, values in zip(teachers, beside, strict=False)}
        loss, metrics = objective(
            log_probs,
            terms,
            self._objective,
            teacher_divergence=divergences.get("teacher"),
            divergence_settings=None if distillation is None else distillation.divergence,
            reference_divergence=divergences.get("reference"),
        )
        loss.backward()
        if batch.on_policy:
            metrics |= agreement_metrics(given, log_probs.detach(), mask, self.module.temperature)
        return metrics

    def _teachers(self, own: OptimizerBatch, rows: Sequence[ScoringRow]) -> dict[str, TeacherStates]:
        """Returns the kept states of `rows`, which are the rows of `own` and possibly a filler."""
        found = {"reference": self.kept.states_for(OWN_VIEW, rows, FULL_KL)}
        if own.distillation is not None:
            view, weights = own.distillation.view, own.distillation.token_weight
            needed = [row for row, weight in zip(own.rows, weights, strict=True) if weight.any()]
            found = {"teacher": self.kept.states_for(view, rows, own.distillation.divergence, needed=needed)} | found
        return {name: states for name, states in found.items() if states is not None}
