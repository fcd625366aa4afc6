"""Implements the policy on one device: it is scored, updated, used as teacher, and sent to the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor

from cepo.algorithms.settings import TeacherConfig
from cepo.config.worker_schema import ActorConfig
from cepo.data.batch import Kept, OptimizerBatch, ScoringRow
from cepo.losses.importance import agreement_metrics
from cepo.losses.objective import ObjectiveSettings, ObjectiveTerms, objective, step_metrics
from cepo.metrics import Metrics, fraction, max_value, merge_metrics, sum_value
from cepo.models.processing import Processing
from cepo.models.without_waiting import to_device
from cepo.rollout.generator import AdapterWeights, FullWeights, Weights
from cepo.types import Distillation
from cepo.workers.batching import RankPass
from cepo.workers.building import build_scoring_model
from cepo.workers.distributed import GatheredWeights, MergedWeights, on_first_rank, trained_weights
from cepo.workers.hidden_state_cache import HiddenStateCache
from cepo.workers.pass_sizes import PassSizes
from cepo.workers.scored_model import ScoredModel
from cepo.workers.scoring_model import ScoringModel, TeacherStates, TokenScores
from cepo.workers.teacher_model import TeacherModel
from cepo.workers.teacher_weights import TeacherWeights
from cepo.workers.training import TrainableModel


class Actor(TrainableModel[ActorConfig, ScoringModel, OptimizerBatch]):
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
        chosen: PassSizes | None = None,
    ) -> None:
        module = build_scoring_model(config, temperature=temperature, seed=seed)
        super().__init__(config, processing, module, total_steps=total_steps, longest_row=longest_row, chosen=chosen)
        self.has_own_teacher = not teacher.is_actor
        self.teacher_weights = TeacherWeights(module, teacher)
        self.teacher_model: TeacherModel | None = None
        if teacher.model_path is not None:
            self.teacher_model = TeacherModel(
                teacher.model_path, config, processing, temperature=temperature, longest_row=longest_row
            )
        self.initial_weights = TeacherWeights(module, TeacherConfig(source="reference")) if with_reference else None
        self.kept = HiddenStateCache()
        self._objective = objective_settings
        self._reported_computed = 0
        self._reported_asked = 0

    @torch.no_grad()
    def score(
        self, rows: Sequence[ScoringRow], *, keep: Kept | None = None, temperature: float | None = None
    ) -> list[Tensor]:
        """Returns each row's log-probs under the actor's weights, (response length,) float32 on the CPU.

        What `keep` names stays for an update that distils. `temperature` replaces the rollout temperature.
        """
        self.begin_scoring()
        return self._log_probs(self, rows, keep, temperature=temperature)

    @torch.no_grad()
    def score_teacher(self, rows: Sequence[ScoringRow], *, keep: Kept | None = None) -> list[Tensor]:
        """Returns each row's log-probs under the teacher's weights, and keeps as `score` does."""
        assert not rows or self.has_own_teacher, "no teacher with weights other than the actor's was announced"
        scorer = self if self.teacher_model is None else self.teacher_model
        scorer.pass_sizes = self.pass_sizes
        scorer.begin_scoring()
        with self.teacher_weights.active():
            return self._log_probs(scorer, rows, keep)

    @torch.no_grad()
    def score_initial(self, rows: Sequence[ScoringRow]) -> list[Tensor]:
        """Returns each row's log-probs under the initial weights (LoRA: without the adapter)."""
        assert self.initial_weights is not None, "no KL penalty was announced"
        self.begin_scoring()
        with self.initial_weights.active():
            return self._log_probs(self, rows, None)

    @torch.no_grad()
    def entropies(self, rows: Sequence[ScoringRow]) -> list[Tensor]:
        """Returns the entropy of the actor's distribution before each token, in nats, (response length,) float32."""

        def compute(part: RankPass) -> Tensor:
            scores = self._forward(self, part, entropy=True)
            return scores.log_probs if scores.entropies is None else scores.entropies  # the former of a filler's pass

        self.begin_scoring()
        return self.results(rows, compute)

    def _log_probs(
        self,
        scorer: ScoredModel[ActorConfig, ScoringModel],
        rows: Sequence[ScoringRow],
        keep: Kept | None,
        *,
        temperature: float | None = None,
    ) -> list[Tensor]:
        if keep is None:
            return scorer.results(rows, lambda part: self._forward(scorer, part, temperature=temperature).log_probs)
        states: dict[int, Tensor] = {}
        entropies: dict[int, Tensor] = {}

        def add(values: Tensor | None, rows: Sequence[ScoringRow], kept: dict[int, Tensor]) -> None:
            if values is None:
                return
            lengths = [len(row.response_ids) for row in rows]
            for row, of_row in zip(rows, values.cpu().split(lengths), strict=True):
                if row.view == keep.view and row.row is not None:
                    kept[row.row] = of_row

        def compute(part: RankPass) -> Tensor:
            scores = self._forward(scorer, part, entropy=keep.with_entropies, temperature=temperature)
            add(scores.hidden, part.rows, states)
            add(scores.entropies, part.rows, entropies)
            return scores.log_probs

        log_probs = scorer.results(rows, compute)
        self.kept.keep(states, scorer.module, is_student=scorer is self, entropies=entropies)
        return log_probs

    def _forward(
        self,
        scorer: ScoredModel[ActorConfig, ScoringModel],
        part: RankPass,
        *,
        entropy: bool = False,
        temperature: float | None = None,
    ) -> TokenScores:
        return scorer.module(scorer.collate(part), entropy=entropy, temperature=temperature)

    def update(self, batches: Sequence[OptimizerBatch], *, step: int) -> Metrics:
        """See `TrainableModel.update`; adds the work since the last update (`_max`: over ranks), and the share saved."""
        return merge_metrics([super().update(batches, step=step), self.work_metrics()])

    def work_metrics(self) -> Metrics:
        """Returns the tokens computed since the last call, with padding, the share saved, and the images encoded."""
        all_computed = sum(model.tokens_computed for model in self._scorers)
        all_asked = sum(model.tokens_asked for model in self._scorers)
        computed = all_computed - self._reported_computed
        without_sharing = all_asked - self._reported_asked
        self._reported_computed = all_computed
        self._reported_asked = all_asked
        encoded = sum(model.module.encoder.drain_count() for model in self._scorers)
        return {
            "work/pictures_encoded": sum_value(encoded),
            "work/pictures_encoded_max": max_value(encoded),
            "work/tokens_computed": sum_value(computed),
            "work/tokens_computed_max": max_value(computed),
            "work/tokens_saved": fraction(without_sharing - computed, without_sharing),
        }

    def forget_work(self) -> None:
        """Discards the counts of tokens and images since the last update, so that no step counts a validation's."""
        self.work_metrics()
        self._forget_images()

    def finish_step(self, step: int) -> None:
        """Frees the step's caches and refreshes the teacher's weights after the update of the 0-based step."""
        self.kept.forget()
        self._forget_images()
        self.teacher_weights.after_update(step)

    def rest(self) -> None:
        """See `ScoredModel.rest`; a teacher with weights of its own rests too."""
        super().rest()
        if self.teacher_model is not None:
            self.teacher_model.rest()

    @property
    def _scorers(self) -> Sequence[ScoredModel[ActorConfig, ScoringModel]]:
        return [self] if self.teacher_model is None else [self, self.teacher_model]

    def _forget_images(self) -> None:
        for model in self._scorers:
            model.module.encoder.forget()

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

    @property
    def adapted_layers(self) -> tuple[str, ...]:
        """The last parts of the names of all layers with an adapter, such as `q_proj`, sorted."""
        peft_model: Any = self.module.model
        names: set[str] = set()
        for path in peft_model.targeted_module_names:
            names.add(path.rpartition(".")[2])
        return tuple(sorted(names))

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
        distillation = batch.distillation
        settings_metrics = step_metrics(self._objective, batch.denominators, distils=distillation is not None)
        if distillation is not None and distillation.divergence.entropy_beta > 0:
            weighted = replace(distillation, token_weight=self._weighted_by_entropy(batch, distillation))
            batch = replace(batch, distillation=weighted)
        return [*super()._accumulate(batch), on_first_rank(settings_metrics)]

    def _weighted_by_entropy(self, batch: OptimizerBatch, distillation: Distillation) -> Float[Tensor, "R T"]:
        """Multiplies each token's weight by `exp(-beta H)` over the mean of it, which is over all ranks' distilled tokens."""
        entropies_of_rows = self.kept.entropies
        factors = torch.zeros(distillation.token_weight.shape, dtype=torch.float64)
        for number, row in enumerate(batch.rows):
            if row.row is not None and row.row in entropies_of_rows:
                entropies = entropies_of_rows[row.row].double()
                factors[number, : len(entropies)] = (-distillation.divergence.entropy_beta * entropies).exp()
        factors = factors.where(distillation.token_weight > 0, 0.0)
        num_tokens = (distillation.token_weight > 0).sum().double()
        total = torch.stack([factors.sum(), num_tokens]).to(self.device)  # float64
        dist.all_reduce(total)
        sum_of_factors, num_of_all = total.tolist()
        if sum_of_factors == 0:  # nothing is distilled, or no teacher is sure of anything
            return distillation.token_weight
        return distillation.token_weight * (factors * num_of_all / sum_of_factors).to(distillation.token_weight.dtype)

    def _accumulate_gradient(self, batch: OptimizerBatch, weights: Tensor, part: RankPass) -> Metrics:
        part_batch = batch.at(part.indices)
        teacher = self._teacher(part_batch, part.rows)
        has_entropy = self._objective.entropy_coefficient != 0
        scores: TokenScores = self.module(self.collate(part), teacher, entropy=has_entropy)
        if not part.indices:
            scores.log_probs.sum().mul(0.0).backward()  # a filler's pass: the other ranks wait for its gradients
            return {}
        mask = to_device(part_batch.response_mask, self.device)  # (B, T)
        sampled_log_probs = to_device(part_batch.sampled_log_probs, self.device)
        zeros = torch.zeros_like(sampled_log_probs)
        # Indices from the host's mask, because a device would have to count those of its own.
        places = to_device(part_batch.response_mask.flatten().nonzero().squeeze(1), self.device)  # (N,)

        def by_row(flat: Float[Tensor, " N"]) -> Float[Tensor, "B T"]:
            return zeros.flatten().index_copy(0, places, flat[: len(places)]).view_as(zeros)

        log_probs = by_row(scores.log_probs)
        distillation = part_batch.distillation

        loss, metrics = objective(
            log_probs,
            self._terms(part_batch, mask, sampled_log_probs, log_probs, token_weight=weights[part.indices]),
            self._objective,
            teacher_divergence=None if scores.divergence is None else by_row(scores.divergence),
            divergence_settings=None if distillation is None else distillation.divergence,
            entropies=None if scores.entropies is None else by_row(scores.entropies),
        )
        loss.backward()
        if batch.old_log_probs is None:
            metrics |= agreement_metrics(sampled_log_probs, log_probs.detach(), mask, self.module.temperature)
        return metrics

    def _terms(
        self,
        batch: OptimizerBatch,
        mask: Tensor,
        sampled_log_probs: Tensor,
        log_probs: Tensor,
        *,
        token_weight: Tensor,
    ) -> ObjectiveTerms:
        """Returns what the objective needs beside the `log_probs`, on their device, where `mask` and
        `sampled_log_probs` are already.

        For a batch without old log-probs, the policy before the update is the current one.
        """

        def on_device(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else to_device(tensor, self.device)

        old_log_probs = on_device(batch.old_log_probs)
        if old_log_probs is None:
            old_log_probs = log_probs.detach()
        divergence_weight: Tensor | None = None
        if batch.distillation is not None:
            divergence_weight = to_device(batch.distillation.token_weight, self.device)
        return ObjectiveTerms(
            old_log_probs=old_log_probs,
            sampled_log_probs=sampled_log_probs,
            advantages=to_device(batch.advantages, self.device),
            response_mask=mask,
            weight=to_device(token_weight, self.device),
            reference_log_probs=on_device(batch.reference_log_probs),
            divergence_weight=divergence_weight,
        )

    def _teacher(self, batch: OptimizerBatch, rows: Sequence[ScoringRow]) -> TeacherStates | None:
        """Returns the kept states of `rows`, which are the rows of `batch` and possibly a filler; None if none are kept."""
        distillation = batch.distillation
        if distillation is None:
            return None
        distilled_rows: list[ScoringRow] = []
        for row, token_weight in zip(batch.rows, distillation.token_weight, strict=True):
            if token_weight.any():
                distilled_rows.append(row)
        return self.kept.states_for(rows, distillation.divergence, required=distilled_rows)
