"""Implements the contrast gate, in which tokens learn whose contrast stands out from its noise, and others little."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cepo.algorithms import register_estimator, statistics
from cepo.algorithms.cepo import Cepo
from cepo.algorithms.evidence import TokenWeights
from cepo.algorithms.settings import ContrastiveConfig, MixingConfig, NegativeConfig
from cepo.metrics import mean_of, mean_value
from cepo.sections.fields import NotNegative, Share, section
from cepo.types import TokenBatch

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


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

    def weights(self, delta: Float[Tensor, "B T"], sign: Float[Tensor, "B _"], batch: TokenBatch) -> TokenWeights:
        """Returns gate_t, and 1 where a rollout has no evidence."""
        log_correct, log_wrong = self.contrasted(batch)
        agreement = sign * delta  # above 0 where the contrast has A's sign
        noise = statistics.contrast_noise(agreement, statistics.had_alternative(log_correct, log_wrong))
        opens = agreement > self.config.threshold * noise  # (B, T)
        has_evidence = batch.response_mask & batch.has_reference["correct"].unsqueeze(1)
        keeps_all = opens | ~has_evidence
        gate = agreement.new_ones(agreement.shape).double().where(keeps_all, self.config.floor)
        return TokenWeights(
            values=gate,
            metrics={
                "evidence/noise": mean_value(noise),
                "evidence/open_fraction": mean_of(opens.float(), has_evidence & (sign != 0)),
            },
        )
