"""Implements the contrast gate, in which tokens learn whose contrast stands out from its noise, and others little."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cepo.algorithms import credit, register_estimator
from cepo.algorithms.cepo import Cepo
from cepo.algorithms.evidence import counted_evidence, counted_tokens, unweighted_signal
from cepo.algorithms.settings import ContrastiveConfig, MixingConfig, NegativeConfig
from cepo.metrics import mean_of, mean_value
from cepo.sections.declaring import NotNegative, Share, section
from cepo.types import TokenBatch, TokenSignal

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor

LEAST_NOISE = 0.05
"""Noise in nats that is assumed if no token shows any, or less."""


@register_estimator("contrast_gate")
class ContrastGate(Cepo):
    """Keeps GRPO's advantage A at the tokens whose contrast is above its noise and has A's sign, and little elsewhere.

        delta_t  = log P_correct(y_t) - log P_wrong(y_t)
        noise    = max(0.05, median |delta_t| / 0.6745)                    over the tokens that show noise alone
        opens_t  = |delta_t| > threshold noise  and  sign(delta_t) = sign(A)
        gate_t   = 1 where opens_t, floor elsewhere
        A_hat_t  = A ((1 - lambda(k)) + lambda(k) gate_t)

    Tokens that show noise alone are those of the step with `sign(delta_t) = -sign(A)` and
    `(P_correct(y_t) + P_wrong(y_t)) / 2 < 0.9`. Noise of a neutral token has either sign equally often, so its half that
    contradicts the outcome measures it without the tokens that decided the outcome, and tokens without an alternative
    would hide it. Degenerate cases: floor = 1 or lambda = 0 is GRPO (no teacher is used), and so is a rollout without a
    reference, or, by `negative.fallback`'s default here, without a wrong one. Threshold 0 opens for every contrast of
    A's sign. A response without contrast learns `floor A`. Where every contrast exceeds cepo's clip range, threshold 0
    and `floor = (1 - r) / (1 + r)` are cepo with lambda = 1, divided by 1 + r. Where the highest share p of each
    response's tokens opens, floor 0 is VPPO's selection. Source: this project (docs/methods.md#contrast_gate); the
    contrast is CEPO's, the selection VPPO's (arXiv 2510.09285).
    """

    @section
    class Config(ContrastiveConfig):
        threshold: NotNegative = 2.0
        """Contrast from which the gate opens, in standard deviations of the contrast's noise."""
        floor: Share = 0.1
        """Share of the advantage that all other tokens keep."""
        weight: MixingConfig = MixingConfig(  # pyright: ignore[reportIncompatibleVariableOverride]
            lambda_init=1.0, lambda_schedule="constant"
        )
        negative: NegativeConfig = NegativeConfig(fallback="neutral")

    config: Config  # pyright: ignore[reportIncompatibleVariableOverride]

    def is_weighted(self, step: int) -> bool:
        return self.mixing(step) > 0 and self.config.floor < 1

    def signal(self, batch: TokenBatch, *, step: int) -> TokenSignal:
        """Computes A_hat_t; A where no teacher is needed."""
        mixing = self.mixing(step)  # lambda(k)
        advantages, values = self.advantages(batch)  # A
        if not self.needs_teacher(step=step):
            return unweighted_signal(batch, advantages, mixing=mixing)
        log_correct, log_wrong = self.contrasted(batch)
        delta = counted_evidence(log_correct - log_wrong, batch, self.config.weight)
        sign = credit.advantage_sign(advantages)
        has_evidence = counted_tokens(batch, self.config.weight) & batch.has_reference["correct"].unsqueeze(1)
        agreement = sign * delta  # above 0 where the contrast has A's sign
        had_alternative = (log_correct.exp() + log_wrong.exp()) / 2 < credit.SURE_PROBABILITY
        noise = self._noise(agreement, had_alternative)
        opens = agreement > self.config.threshold * noise  # (B, T)
        keeps_all = opens | ~has_evidence
        gate = agreement.new_ones(agreement.shape).double().where(keeps_all, self.config.floor)

        gated = credit.mixed_advantages(advantages, gate, mixing=mixing)
        mask = batch.response_mask
        counted = has_evidence & (sign != 0)
        metrics = credit.group_metrics(batch)
        metrics |= credit.delta_metrics(delta, advantages, mask, batch.correct, mixing=mixing)
        metrics["evidence/noise"] = mean_value(noise)
        metrics["evidence/open_fraction"] = mean_of(opens.float(), counted)
        metrics["evidence/weight_mean"] = mean_of(gate, mask & (sign != 0))
        diagnostics = {"delta": delta, "weight": gate.to(delta.dtype).where(mask, 0.0)}
        if values is not None:
            metrics |= credit.value_metrics(values, batch)
            diagnostics["value"] = values
        in_batch_dtype = gated.to(advantages.dtype).where(mask, 0.0)
        return TokenSignal(advantages=in_batch_dtype, metrics=metrics, diagnostics=diagnostics)

    def _noise(self, agreement: Float[Tensor, "B T"], had_alternative: Bool[Tensor, "B T"]) -> float:
        """Returns the robust standard deviation of the contrast, from the tokens at which it contradicts the outcome.

        Of two middle values the median is the lower one.
        """
        contradicting = -agreement[had_alternative & (agreement < 0)]  # |delta_t|
        if contradicting.numel() == 0:
            return LEAST_NOISE
        deviation = float(contradicting.median()) / credit.NORMAL_MEDIAN
        return max(LEAST_NOISE, deviation)
