"""The policy on this device: scores, updates, teaches, and hands its weights to the rollout engine."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from cepo.algorithms.settings import TeacherConfig
from cepo.config.schema import ActorConfig
from cepo.data.batch import OptimizerBatch, ScoringRow
from cepo.losses.divergence import distillation_losses, distillation_metrics
from cepo.losses.policy import ClipRange, clipped_surrogate, surrogate_metrics, token_weights
from cepo.metrics import Metrics, max_value, mean_value, merge_metrics, sum_value
from cepo.models.processing import Processing
from cepo.rollout.base import AdapterWeights, FullWeights, Weights
from cepo.workers.distillation import KeptStates
from cepo.workers.distributed import data_parallel_mesh, reshard, this_device
from cepo.workers.loading import build_scoring_model
from cepo.workers.schedule import learning_rate_factor
from cepo.workers.scoring_model import CollatedRows, collate
from cepo.workers.teacher_weights import TeacherWeights


class Actor:
    """The trained policy under FSDP2 (also with one process), with LoRA or full fine-tuning.

    Args:
        config: `worker.actor`.
        temperature: the rollout temperature, which divides the logits of every log-prob.
        teacher: whose weights teacher passes run with.
        total_steps: horizon of the learning-rate schedule.
        seed: of the adapter's initial weights.
    """

    def __init__(
        self,
        config: ActorConfig,
        processing: Processing,
        *,
        temperature: float,
        teacher: TeacherConfig,
        total_steps: int,
        seed: int,
    ) -> None:
        self._config, self._processing, self._total_steps = config, processing, total_steps
        self.device = this_device()
        self.module = build_scoring_model(
            config, mesh=data_parallel_mesh(), device=self.device, temperature=temperature, seed=seed
        )
        self._trainable = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(
            self._trainable,
            lr=config.optim.lr,
            betas=(config.optim.betas[0], config.optim.betas[1]),
            weight_decay=config.optim.weight_decay,
        )
        self.teacher_weights = TeacherWeights(self.module, teacher)
        self._distillation = KeptStates()
        self._clip = ClipRange(config.clip_ratio_low, config.clip_ratio_high, config.clip_ratio_dual)

    @torch.no_grad()
    def score(self, rows: Sequence[ScoringRow], *, as_teacher: bool = False, keep_states: bool = False) -> list[Tensor]:
        """log P of each row's response tokens, (response length,) float32 on the CPU, in the order of `rows`.

        `as_teacher` runs with the teacher's weights; contexts decide everything else. `keep_states` keeps the rows' hidden
        states until the step is finished, for an update that distils from them.
        """
        self.module.eval()
        results: dict[int, Tensor] = {}
        states: dict[int, Tensor] = {}
        with self.teacher_weights.active() if as_teacher else nullcontext():
            for indices in self._micro_batches(rows, self._config.micro_batch_size_per_device_for_experience):
                micro_batch = [rows[index] for index in indices]
                log_probs, hidden = self.module(self._collate(micro_batch))
                lengths = [len(row.response_ids) for row in micro_batch]
                results |= dict(zip(indices, log_probs.float().cpu().split(lengths), strict=True))
                if keep_states:
                    states |= dict(zip(indices, hidden.cpu().split(lengths), strict=True))
            if keep_states:
                self._distillation.keep([states[index] for index in range(len(rows))], self.module)
        reshard(self.module)
        return [results[index] for index in range(len(rows))]

    def update(self, batches: Sequence[OptimizerBatch], *, step: int) -> Metrics:
        """One optimizer step for each batch, at the learning rate of the 0-based training step."""
        learning_rate = self._config.optim.lr * learning_rate_factor(step, self._config.optim, self._total_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        parts = [self._optimizer_step(batch) for batch in batches]
        return merge_metrics([*parts, {"actor/lr": mean_value(learning_rate)}])

    def finish_step(self, step: int) -> None:
        """Refreshes teacher weights after the update of the 0-based step, and forgets the states kept for it."""
        self._distillation.forget()
        self.teacher_weights.after_update(step)

    def rollout_weights(self) -> Weights:
        """The current weights under the names the rollout engine knows: the adapter alone under LoRA, else all."""
        with_adapter = self._config.model.lora.rank > 0
        options = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=with_adapter)
        state = get_model_state_dict(self.module, options=options)
        tensors: Any = {name.removeprefix("model."): tensor for name, tensor in state.items()}
        if not with_adapter:
            return FullWeights(tensors=tensors)
        from peft import get_peft_model_state_dict

        peft_model: Any = self.module.model
        return AdapterWeights(
            tensors=get_peft_model_state_dict(peft_model, state_dict=tensors),
            adapter_config=peft_model.peft_config["default"].to_dict(),
        )

    def _optimizer_step(self, batch: OptimizerBatch) -> Metrics:
        self.module.train()
        self._zero_gradients()
        weights = token_weights(batch.response_mask, self._config.loss_avg_mode, batch.denominators)
        size = self._config.micro_batch_size_per_device_for_update
        parts: list[Metrics] = []
        for indices in self._micro_batches(batch.rows, size):
            parts.append(self._accumulate_gradient(batch, weights, indices))
        norm = torch.nn.utils.clip_grad_norm_(self._trainable, self._config.max_grad_norm)
        grad_norm = float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)  # pyright: ignore
        finite = grad_norm == grad_norm and abs(grad_norm) != float("inf")
        if finite:
            self.optimizer.step()
            parts.append({"actor/grad_norm": mean_value(grad_norm), "actor/grad_norm_max": max_value(grad_norm)})
        parts.append({"actor/skipped_updates": sum_value(0.0 if finite else 1.0)})
        return merge_metrics(parts)

    def _accumulate_gradient(self, batch: OptimizerBatch, weights: Tensor, indices: list[int]) -> Metrics:
        mask, old_log_probs, advantages, weight = (
            tensor[indices].to(self.device)
            for tensor in (batch.response_mask, batch.old_log_probs, batch.advantages, weights)
        )
        rows = [batch.rows[index] for index in indices]
        teacher = self._distillation.states_of(batch, indices)
        flat, beside = self.module(self._collate(rows), teacher)
        log_probs = torch.zeros_like(old_log_probs).masked_scatter(mask, flat)
        loss = (clipped_surrogate(log_probs, old_log_probs, advantages, self._clip) * weight).sum()
        metrics = surrogate_metrics(log_probs.detach(), old_log_probs, advantages, mask, self._clip)
        metrics["actor/pg_loss"] = sum_value(float(loss.detach()))
        if batch.distillation is not None and teacher is not None:
            divergence = torch.zeros_like(old_log_probs).masked_scatter(mask, beside)
            token_weight = batch.distillation.token_weight[indices].to(self.device)
            terms = (divergence, log_probs, old_log_probs, token_weight, batch.distillation.divergence)
            distillation_loss = (distillation_losses(*terms) * weight).sum()
            metrics |= distillation_metrics(*terms)
            metrics["actor/distillation_loss"] = sum_value(float(distillation_loss.detach()))
            loss = loss + distillation_loss
        loss.backward()
        return metrics

    def _zero_gradients(self) -> None:
        """Every weight gets a gradient, so that Adam's state is that of all weights from the first step on.

        Adam moves weights on zero gradients too: a batch without a live row, or without a picture for the vision tower,
        still counts as a step, and it counts the same right after a resume, when no gradient has been made yet.
        """
        for parameter in self._trainable:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            else:
                parameter.grad.zero_()

    def _micro_batches(self, rows: Sequence[ScoringRow], size: int) -> list[list[int]]:
        """Row indices, longest rows together, so that little is padded."""
        order = sorted(range(len(rows)), key=lambda index: (-rows[index].num_tokens, index))
        return [order[start : start + size] for start in range(0, len(order), size)]

    def _collate(self, rows: Sequence[ScoringRow]) -> CollatedRows:
        return collate(
            rows,
            pad_token_id=self._processing.pad_token_id,
            image_token_id=self._processing.image_token_id,
            merge_size=self._processing.merge_size,
            device=self.device,
        )
