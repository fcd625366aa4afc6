"""Implements policy and critic on one device. The policy is scored, updated, used as teacher, and sent to the engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from cepo.algorithms.settings import TeacherConfig
from cepo.config.worker_schema import ActorConfig, CriticConfig
from cepo.data.batch import OWN_VIEW, CriticBatch, OptimizerBatch, ScoringOptions, ScoringRow
from cepo.losses.objective import ObjectiveTerms, objective, step_metrics
from cepo.losses.policy import ObjectiveSettings, agreement_metrics
from cepo.losses.value import value_loss, value_metrics
from cepo.metrics import Metrics, fraction, max_value, merge_metrics, sum_value
from cepo.models.processing import Processing
from cepo.rollout.generator import AdapterWeights, FullWeights, Weights
from cepo.types import DivergenceConfig
from cepo.workers.distributed import (
    GatheredWeights,
    MergedWeights,
    build_scoring_model,
    build_value_model,
    on_first_rank,
    reshard,
    trained_weights,
    whole_tensor,
)
from cepo.workers.passes import RankPass
from cepo.workers.scoring_model import ScoringModel, TeacherStates, ValueModel
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


class KeptStates:
    """Hidden states by view and row, on the CPU: tokens x hidden size, which is smaller than tokens x vocabulary.

    The update distils from the teacher of the scoring pass, even if the step's updates change its weights; a trained
    head is therefore kept with the states. Each rank distils the rows whose states it keeps, because within a step all
    rows of a prompt go to one rank.
    """

    def __init__(self) -> None:
        self._views: dict[str, tuple[Mapping[int, Tensor], Tensor | None]] = {}

    def keep(self, view: str, states: Mapping[int, Tensor], module: ScoringModel) -> None:
        """Keeps one (response length, H) tensor per row and, if the head of `module` is trained, a copy of the head."""
        weight: Any = module.base.lm_head.weight
        head = whole_tensor(weight).detach().clone() if weight.requires_grad else None
        self._views[view] = states, head

    def forget(self) -> None:
        self._views = {}

    def states_for(
        self, view: str, rows: Sequence[ScoringRow], divergence: DivergenceConfig, *, needed: Sequence[ScoringRow] = ()
    ) -> TeacherStates | None:
        """Concatenates the rows' states, with zeros for rows without any (of weight 0); None if the view has none."""
        states, head = self._views.get(view, ({}, None))
        missing = [row.row for row in needed if row.row not in states]
        assert not missing, f"no hidden states of the view '{view}' are kept here for the rows {missing}"
        if not states:
            return None
        any_state = next(iter(states.values()))
        parts = [
            any_state.new_zeros(len(row.response_ids), any_state.shape[1])
            if row.row is None or row.row not in states
            else states[row.row]
            for row in rows
        ]
        return TeacherStates(hidden=torch.cat(parts), head=head, divergence=divergence)


class TeacherWeights:
    """Copies of the trainable weights that can replace the actor's weights during a pass.

    The source `actor` needs no copy. `reference` keeps the initial weights or, under LoRA, disables the adapter.
    `snapshot` is refreshed after every update whose 1-based step is divisible by `sync_every`. `ema` computes
    `c <- decay c + (1 - decay) theta` after every update, in float32 whatever the model's type; under LoRA it averages
    the factors, not their product. Each rank keeps `copies` of its own shards; restoring a checkpoint writes to them.
    """

    def __init__(self, module: nn.Module, config: TeacherConfig) -> None:
        self._module, self._config = module, config
        self._adapter_off = config.source == "reference" and hasattr(module.model, "disable_adapter")
        self.copies: dict[str, DTensor] = {}
        if config.source != "actor" and not self._adapter_off:
            kind = torch.float32 if config.source == "ema" else None
            self.copies = {name: weight.to(kind or weight.dtype, copy=True) for name, weight in self._trained()}

    @torch.no_grad()
    def after_update(self, step: int) -> None:
        """Refreshes the copies after the update of the 0-based `step`."""
        if self._config.source == "snapshot" and (step + 1) % self._config.sync_every == 0:
            for name, weight in self._trained():
                self.copies[name].copy_(weight)
        elif self._config.source == "ema":
            for name, weight in self._trained():
                self.copies[name].to_local().lerp_(weight.to_local().float(), 1.0 - self._config.ema_decay)

    @torch.no_grad()
    def catch_up(self) -> None:
        """Makes copies that follow the actor equal to it, as at the start of a run."""
        if self._config.source in ("snapshot", "ema"):
            for name, weight in self._trained():
                self.copies[name].copy_(weight)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Runs the body with the teacher's weights, then restores the actor's weights bit for bit."""
        if self._adapter_off:
            reshard(self._module)
            with self._module.model.disable_adapter():  # pyright: ignore[reportCallIssue, reportAttributeAccessIssue]
                try:
                    yield
                finally:  # PEFT switches gradients off and on again, which must affect the shards, not gathered copies
                    reshard(self._module)
        elif not self.copies:
            yield
        else:
            live = {name: weight.clone() for name, weight in self._trained()}
            try:
                self._load(self.copies)
                yield
            finally:
                self._load(live)

    def _load(self, weights: dict[str, DTensor]) -> None:
        for name, weight in self._trained():
            weight.copy_(weights[name])

    def _trained(self) -> list[tuple[str, Any]]:
        """Returns the trained weights' shards by name, without gradient."""
        reshard(self._module)  # drops gathered copies, whose changes would be lost
        named = self._module.named_parameters()
        return [(name, parameter.detach()) for name, parameter in named if parameter.requires_grad]


class Critic(Trained[CriticConfig, ValueModel, CriticBatch]):
    """A separate value model, with all weights trained. It reads the actor's tokens, with the actor's `processing`.

    Raises:
        ConfigError: the model cannot be loaded, or its tokens differ from the actor's.
    """

    name = "critic"

    def __init__(
        self,
        config: CriticConfig,
        processing: Processing,
        *,
        total_steps: int,
        seed: int,
        longest_row: int | None = None,
    ) -> None:
        module = build_value_model(config, processing, seed=seed)
        super().__init__(config, processing, module, total_steps=total_steps, longest_row=longest_row)

    @torch.no_grad()
    def values(self, rows: Sequence[ScoringRow]) -> list[Tensor]:
        """Returns each row's values before its response tokens, (response length,) float32 on the CPU."""
        self.to_device()
        self.module.eval()
        found = self._evaluate(rows, lambda part: self.module(self.collate(part)), "values")
        reshard(self.module)
        return found

    def update(self, batches: Sequence[CriticBatch], *, step: int) -> Metrics:
        metrics = super().update(batches, step=step)
        self.module.encoder.forget()
        return metrics

    def _accumulate_gradient(self, batch: CriticBatch, weights: Tensor, part: RankPass) -> Metrics:
        flat = self.module(self.collate(part))
        if not part.indices:
            flat.sum().mul(0.0).backward()
            return {}
        mask, old_values, returns, weight = (
            tensor[part.indices].to(self.device)
            for tensor in (batch.response_mask, batch.old_values, batch.returns, weights)
        )
        values = torch.zeros_like(old_values).masked_scatter(mask, flat)
        clip = self._config.cliprange_value
        loss = (value_loss(values, old_values, returns, clip) * weight).sum()
        loss.backward()
        metrics = value_metrics(values.detach(), old_values, returns, mask, clip)
        # The weights of a batch's micro-batches sum to 1, so merging gives the mean loss of the optimizer steps.
        metrics["critic/vf_loss"] = fraction(float(loss.detach()), len(part.indices) / batch.denominators.num_sequences)
        return metrics
