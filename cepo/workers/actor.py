"""Implements the policy on one device: it scores rows, is updated, acts as teacher, and feeds the rollout engine."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, Unpack

import torch
from torch import Tensor

from cepo.algorithms.settings import TeacherConfig
from cepo.config.schema import ActorConfig
from cepo.data.batch import OWN_VIEW, OptimizerBatch, ScoringOptions, ScoringRow
from cepo.losses.objective import (
    ObjectiveSettings,
    ObjectiveTerms,
    agreement_metrics,
    objective,
    step_metrics,
    token_weights,
)
from cepo.metrics import Metrics, max_value, mean_value, merge_metrics, sum_value
from cepo.models.processing import Processing
from cepo.progress import shown
from cepo.rollout.generator import AdapterWeights, FullWeights, Weights
from cepo.types import DivergenceConfig
from cepo.workers.distributed import (
    GatheredWeights,
    MergedWeights,
    data_parallel_mesh,
    on_first_rank,
    reshard,
    this_device,
    trained_weights,
    whole_tensor,
)
from cepo.workers.loading import build_scoring_model
from cepo.workers.optimizing import build_optimizer, clipped_step, set_learning_rate, zero_gradients
from cepo.workers.passes import Passes, RankPass
from cepo.workers.scoring_model import KeptStates, TeacherStates
from cepo.workers.swapping import PhaseOffload, TeacherWeights

FULL_KL = DivergenceConfig(kind="reverse_kl")
"""The settings of KL(P_student || P_reference) over the whole vocabulary."""


class Actor:
    """The trained policy under FSDP2 (also with one process), with LoRA or full fine-tuning.

    Each rank has one. All ranks call the same methods in the same order, each with its own rows or none. Within a step,
    all rows of a prompt are on one rank. Updates and merged metrics equal those of one rank with all rows.

    Args:
        temperature: the rollout temperature, by which logits are divided before every log-prob.
        with_reference: whether the initial weights are needed for a KL penalty.
        total_steps: length of the learning-rate schedule.
        seed: for the adapter's initial weights.
        longest_row: number of tokens of the longest prompt and response together, the unit of `dynamic_batching`.
    """

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
        self._config, self._processing, self._total_steps = config, processing, total_steps
        self.device = this_device()
        self.module = build_scoring_model(
            config,
            mesh=data_parallel_mesh(config.fsdp.fsdp_size),
            device=self.device,
            temperature=temperature,
            seed=seed,
        )
        self.passes = Passes(config, processing, self.module, device=self.device, longest_row=longest_row)
        self.optimizer = build_optimizer(self.module, config.optim)
        self.offload = PhaseOffload(self.module, self.optimizer, config.offload, config.fsdp, self.device)
        self.teacher_weights = TeacherWeights(self.module, teacher)
        self.reference_weights = (
            TeacherWeights(self.module, TeacherConfig(source="reference")) if with_reference else None
        )
        self.kept = KeptStates()
        self._objective = objective_settings

    @torch.no_grad()
    def score(self, rows: Sequence[ScoringRow], **options: Unpack[ScoringOptions]) -> list[Tensor]:
        """Returns each row's log-probs, or another `result`, (response length,) float32 on the CPU."""
        self.offload.load_weights()
        self.module.eval()
        keep, result = options.get("keep_states"), options.get("result", "log_probs")
        weights = self.teacher_weights if options.get("as_teacher") else None
        if options.get("as_reference"):
            weights = self.reference_weights
            assert weights is not None, "no KL penalty was announced"
        if result == "reference_kl":
            self.kept.require(OWN_VIEW, rows)
        results: dict[int, Tensor] = {}
        states: dict[int, Tensor] = {}
        parts = self.passes.cut(rows, self._config.micro_batch_size_per_device_for_experience)
        with nullcontext() if weights is None else weights.active():
            for part in shown(parts, "scoring"):
                lengths = [len(row.response_ids) for row in part.rows]
                beside = self.kept.states_for(OWN_VIEW, part.rows, FULL_KL) if result == "reference_kl" else None
                log_probs, (other, *_) = self.module(
                    self.passes.collate(part),
                    () if beside is None else (beside,),
                    entropy=result == "entropy",
                    temperature=options.get("temperature"),
                )
                values = log_probs if result == "log_probs" else other
                # Entries beyond the indices belong to the filler.
                results |= dict(zip(part.indices, values.float().cpu().split(lengths), strict=False))
                if keep is not None:
                    of_rows = zip(part.rows, other.cpu().split(lengths), strict=True)
                    states |= {row.row: state for row, state in of_rows if row.view == keep and row.row is not None}
            if keep is not None:
                self.kept.keep(keep, states, self.module)
            reshard(self.module)
        return [results[index] for index in range(len(rows))]

    def update(self, batches: Sequence[OptimizerBatch], *, step: int) -> Metrics:
        """Takes one optimizer step per batch at the 0-based step's learning rate; denominators span all ranks."""
        learning_rate = set_learning_rate(self.optimizer, self._config.optim, step=step, total_steps=self._total_steps)
        self.offload.load_weights()
        self.offload.load_optimizer()
        parts = [self._optimizer_step(batch) for batch in batches]
        self.offload.offload_optimizer()
        encoded = self.module.encoder.drain_count()
        images = {"work/pictures_encoded": sum_value(encoded), "work/pictures_encoded_max": max_value(encoded)}
        common = on_first_rank({"actor/lr": mean_value(learning_rate)})
        return merge_metrics([*parts, self.passes.metrics(), images, common])

    def gradients(self, batch: OptimizerBatch) -> list[Tensor]:
        """Returns the unsharded gradient of the batch's loss for each trained weight, on the CPU; updates nothing."""
        self.offload.load_weights()
        self._accumulate(batch)
        trained = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        found = [whole_tensor(parameter.grad).float().cpu().clone() for parameter in trained]
        self.forget_gradients()
        return found

    def forget_work(self) -> None:
        """Discards the counts of tokens and images since the last update, so that no step counts a validation's."""
        self.passes.metrics()
        self.module.encoder.forget()
        self.module.encoder.drain_count()

    def finish_step(self, step: int) -> None:
        """Frees the step's caches and refreshes the teacher's weights after the update of the 0-based step."""
        self.kept.forget()
        self.module.encoder.forget()
        self.teacher_weights.after_update(step)

    def forget_gradients(self) -> None:
        """Frees the gradients, so that they take no memory from the rollout engine."""
        self.optimizer.zero_grad(set_to_none=True)

    def rest(self) -> None:
        """Offloads weights before sampling, if `offload` is set; the next call loads them again."""
        self.offload.offload_weights()

    def rollout_weights(self, *, merged: bool = False) -> Weights:
        """Returns the current weights under the rollout engine's names: under LoRA only the adapter, else all weights.

        Every rank gets the whole adapter. Full weights are gathered one at a time as they are read, which all ranks
        must do together before their next call. The same holds for weights with the adapter merged into them, which are
        used by request and if the engine cannot serve the adapter on its base (`served_adapter_rank`).
        """
        lora = self._config.model.lora
        if lora.rank == 0:
            return FullWeights(tensors=GatheredWeights(self.module, prefix="model.", device=self.device))
        if lora.served_rank(merged=merged) > 0:
            return self.adapter_weights()
        return FullWeights(tensors=MergedWeights(self.module, scale=lora.alpha / lora.rank, device=self.device))

    @property
    def has_adapter(self) -> bool:
        return self._config.model.lora.rank > 0

    def adapter_weights(self) -> AdapterWeights:
        """Returns the whole adapter in PEFT's format on every rank. Collective; the model must have an adapter."""
        from peft import get_peft_model_state_dict

        peft_model: Any = self.module.model
        tensors: Any = trained_weights(self.module, prefix="model.", device=self.device)
        return AdapterWeights(
            tensors=get_peft_model_state_dict(peft_model, state_dict=tensors),
            adapter_config=peft_model.peft_config["default"].to_dict(),
        )

    def _optimizer_step(self, batch: OptimizerBatch) -> Metrics:
        parts = self._accumulate(batch)
        distils = batch.distillation is not None
        parts.append(on_first_rank(step_metrics(self._objective, batch.denominators, distils=distils)))
        parts.append(clipped_step(self.optimizer, max_grad_norm=self._config.max_grad_norm, worker="actor"))
        return merge_metrics(parts)

    def _accumulate(self, batch: OptimizerBatch) -> list[Metrics]:
        """Computes the gradient of the batch's loss and leaves it in the weights' `grad`."""
        self.module.train()
        zero_gradients(self.optimizer)
        weights = token_weights(batch.response_mask, self._config.loss_avg_mode, batch.denominators)
        size = self._config.micro_batch_size_per_device_for_update
        passes = shown(self.passes.cut(batch.rows, size), "updating")
        return [self._accumulate_gradient(batch, weights, part) for part in passes]

    def _accumulate_gradient(self, batch: OptimizerBatch, weights: Tensor, part: RankPass) -> Metrics:
        own = batch.at(part.indices)
        teachers = self._teachers(own, part.rows)
        flat, beside = self.module(self.passes.collate(part), tuple(teachers.values()))
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
            self.kept.require(view, [row for row, weight in zip(own.rows, weights, strict=True) if weight.any()])
            found = {"teacher": self.kept.states_for(view, rows, own.distillation.divergence)} | found
        return {name: states for name, states in found.items() if states is not None}
