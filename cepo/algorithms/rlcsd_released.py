"""Implements RLCSD as its authors released it, which adds bounded evidence to the advantages of selected tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from cepo.algorithms import GroupRelativeEstimator, register_estimator, statistics
from cepo.algorithms.evidence import log_mean_probability
from cepo.algorithms.references import in_some_view, in_views, positive_references, wrong_references, wrong_views
from cepo.algorithms.settings import GroupConfig, NegativeConfig, PositiveConfig, TeacherConfig
from cepo.metrics import mean_of
from cepo.sections.fields import Count, NotNegative, Positive, section
from cepo.types import Reference, RolloutGroup, TokenBatch, TokenSignal

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int64
    from torch import Tensor

    from cepo.algorithms.base import RowsByView


@register_estimator("rlcsd_released")
class RlcsdReleased(GroupRelativeEstimator):
    """Adds the evidence of a right response against wrong ones to GRPO's advantage A, without changing its sign.

        e_t     = log P_correct(y_t) - log (1/K) sum_k P_wrong_k(y_t)
        r_t     = clip(s tanh(e_t / tau), -b, b),   selected where |r_t| > threshold
        B_t     = A + r_t at selected tokens, moved to 0 where its sign is not that of A;   A elsewhere
        loss    = mean over other tokens of loss(A) + eta mean over selected tokens of loss(B_t)

    A policy loss is proportional to its advantage, so the two means are factors: with N tokens in the batch, of which S
    are selected and M have references but are not, `A_hat_t = A N / M` and `B_t eta N / S`. They are exact with
    `loss_avg_mode: token` and one optimizer batch per step. Right and wrong responses come from other rollouts of the
    group. Degenerate cases: rollouts without both have no signal, as in the release; s = 0 is GRPO on the others, with
    `A N / M`. Source: RLCSD (arXiv 2606.11709), its released policy loss and its configuration for Qwen3-4B.
    """

    @section
    class Config(GroupConfig):
        strength: NotNegative = 0.5
        """Largest size s of the added evidence, before its bound; the release's beta times lambda."""
        temperature: Positive = 0.02
        """Evidence in nats at which its tanh saturates, tau."""
        threshold: NotNegative = 0.02
        """Tokens whose evidence is added are those where it is larger than this."""
        bound: Positive = 2.0
        """Bound b of the added evidence."""
        selected_weight: NotNegative = 1.0
        """Weight eta of the selected tokens' mean loss."""
        num_wrong: Count = 4
        """Most wrong references per rollout, K. Each one costs a teacher pass."""
        positive: PositiveConfig = PositiveConfig(source="peer_full", exclude_self=True)
        negative: NegativeConfig = NegativeConfig(source="peer_full", select="random")
        teacher: TeacherConfig = TeacherConfig(source="snapshot", sync_every=10)

    config: Config

    @property
    def views(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return ("correct", *wrong_views(self.config.num_wrong))

    reads = ("group_ids",)

    def references(self, group: RolloutGroup) -> Mapping[str, Sequence[Reference | None]]:
        wrong = wrong_references(group, self.config.negative, self.config.num_wrong)
        return {"correct": positive_references(group, self.config.positive), **in_views(wrong, self.views[1:])}

    def settled(self, shown: RowsByView) -> RowsByView:
        """Keeps only references of rollouts that have both sides."""
        has_both = self._has_both_sides(shown)
        return {view: rows & has_both for view, rows in shown.items()}

    def live_rows(
        self, rewards: Float[Tensor, " B"], group_ids: Int64[Tensor, " B"], has_reference: RowsByView
    ) -> Bool[Tensor, " B"]:
        """Returns True for rollouts with both sides in groups whose rewards differ."""
        return statistics.live_rows(rewards, group_ids) & self._has_both_sides(has_reference)

    def signal(self, batch: TokenBatch, *, step: int) -> TokenSignal:
        config = self.config
        mask = batch.response_mask
        learns = self.live_rows(batch.rewards, batch.group_ids, batch.has_reference)  # (B,)
        counted = mask & learns.unsqueeze(1)
        log_correct = batch.teacher_log_probs["correct"]
        log_wrong = log_mean_probability(batch, self.views[1:])
        evidence = (log_correct - log_wrong).detach().where(counted, 0.0)  # e_t
        residual = config.strength * (evidence / config.temperature).tanh()
        residual = residual.clamp(-config.bound, config.bound)  # r_t
        is_selected = counted & (residual.abs() > config.threshold)
        is_other = counted & ~is_selected

        advantages = statistics.group_advantages(batch.rewards, batch.group_ids, config.advantage).unsqueeze(1)  # A
        sign = advantages.sign()
        modulated = sign * (sign * (advantages + residual)).clamp(min=0.0)  # B_t
        num_tokens = mask.sum().double()  # N
        selected_factor = config.selected_weight * num_tokens / is_selected.sum().clamp(min=1)
        other_factor = num_tokens / is_other.sum().clamp(min=1)
        shaped = (modulated * selected_factor).where(is_selected, advantages * other_factor)

        metrics = statistics.group_metrics(batch)
        metrics["evidence/selected_fraction"] = mean_of(is_selected.float(), counted)
        metrics["evidence/residual_mean"] = mean_of(residual, is_selected)
        return TokenSignal(
            advantages=shaped.to(batch.rewards.dtype).where(counted, 0.0),
            metrics=metrics,
            diagnostics={"delta": evidence, "residual": residual.where(is_selected, 0.0)},
        )

    def _has_both_sides(self, has_reference: RowsByView) -> Bool[Tensor, " B"]:
        """Returns which rollouts have a right reference and a wrong one."""
        return has_reference["correct"] & in_some_view(has_reference, self.views[1:])
