"""Defines the contract of policy losses, with torch in annotations only."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from cepo.errors import ConfigError
from cepo.losses.settings import NoLossSettings
from cepo.metrics import Metrics, require_metrics

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor

LOG_RATIO_BOUND = 20.0
"""Bound of |log ratio| before the exponential: e^20 is far outside every clip range and far inside float32."""


def bounded_ratio(log_ratio: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Returns `exp(log_ratio)`, finite for every finite log ratio."""
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()


@dataclass(frozen=True, kw_only=True)
class PolicyTokens:
    """What a policy loss reads of the R responses of a micro-batch, all (R, T); padding may hold any finite value.

    Attributes:
        log_probs: of the sampled tokens under the trained policy, with gradient, in nats.
        old_log_probs: under the policy before the update, without gradient.
        advantages: A of each token.
        response_mask: True on response tokens, False on padding.
    """

    log_probs: Float[Tensor, "R T"]
    old_log_probs: Float[Tensor, "R T"]
    advantages: Float[Tensor, "R T"]
    response_mask: Bool[Tensor, "R T"]

    @property
    def log_ratio(self) -> Float[Tensor, "R T"]:
        """`log rho_t = log_probs - old_log_probs`."""
        return self.log_probs - self.old_log_probs

    @property
    def ratio(self) -> Float[Tensor, "R T"]:
        """`rho_t = P(y_t) / P_old(y_t)`, with |log rho_t| bounded by 20."""
        return bounded_ratio(self.log_ratio)

    def detached(self) -> PolicyTokens:
        """Returns the same tokens without gradient."""
        return replace(self, log_probs=self.log_probs.detach())


class PolicyLoss(ABC):
    """Defines the loss of each token from its log-probs and its advantage.

    A loss reads one response at a time: the value at a token depends on no other row. Aggregation over tokens, the KL,
    importance weights and the divergence from a teacher are the same for every loss (`cepo.losses.objective`).

    Attributes:
        name: the value of `worker.actor.loss_type`.
        Config: the settings that the loss reads. A field with the name of a setting of `SharedLossSettings`, such as
            `clip_ratio_low`, takes the value of `worker.actor`, with the field's default as the loss's preset; all other
            fields are `worker.actor.loss.<name>.*`.
        fractions: names of the metrics that `counted` returns. A property if the settings decide.
    """

    name: ClassVar[str]
    Config: ClassVar[type[Any]] = NoLossSettings
    fractions: Sequence[str] = ()

    def __init__(self, config: Any) -> None:
        self.config = config

    @abstractmethod
    def token_losses(self, tokens: PolicyTokens) -> Float[Tensor, "R T"]:
        """Returns the loss of each token, with gradient in `tokens.log_probs`; values on padding get weight 0."""

    def counted(self, tokens: PolicyTokens) -> Mapping[str, Bool[Tensor, "R T"]]:
        """Returns for each name in `fractions` the tokens that count, without gradient; padding is left out by the caller.

        The metric is their share of all response tokens of the optimizer step, including rows without an update pass.
        """
        return {}

    def metrics(self, tokens: PolicyTokens) -> Metrics:
        """Returns further metrics of a micro-batch, each with its reduction, without gradient."""
        return {}

    def checked_token_losses(self, tokens: PolicyTokens) -> Float[Tensor, "R T"]:
        """Returns `token_losses`.

        Raises `ConfigError`: a loss of the user's has another shape, no gradient, or NaN for finite tokens.
        """
        losses: Any = self.token_losses(tokens)
        name = f"{type(self).__qualname__}.token_losses"
        expected_shape = tuple(tokens.log_probs.shape)
        remedy = "return the loss of each token, a tensor (R, T) with the shape of tokens.log_probs"
        shape = getattr(losses, "shape", None)
        if shape is None:
            raise ConfigError(f"{name} returned a {type(losses).__name__}; {remedy}")
        if tuple(shape) != expected_shape:
            raise ConfigError(f"{name} returned losses of shape {tuple(shape)} for {expected_shape}; {remedy}")
        if tokens.log_probs.requires_grad and not losses.requires_grad:
            raise ConfigError(
                f"{name} returned losses without a gradient, from which nothing is learnt; compute them from "
                "tokens.log_probs or tokens.ratio, without detach(), item() or torch.no_grad()"
            )
        is_shipped = type(self).__module__.startswith("cepo.")
        if not is_shipped:  # counting waits for the device
            _require_numbers(losses, tokens, name)
        return losses

    def checked_counts(self, tokens: PolicyTokens) -> Mapping[str, Bool[Tensor, "R T"]]:
        """Returns `counted`; raises `ConfigError` unless it has the metrics in `fractions`."""
        counted = self.counted(tokens)
        if set(counted) != set(self.fractions):
            raise ConfigError(
                f"{type(self).__qualname__}.counted returned {sorted(counted)}; return a tensor (R, T) for each of "
                f"fractions {list(self.fractions)}"
            )
        return counted

    def checked_metrics(self, tokens: PolicyTokens) -> Metrics:
        """Returns `metrics`; raises `ConfigError` if one of the user's has no reduction."""
        return require_metrics(self.metrics(tokens), f"{type(self).__qualname__}.metrics")


def _require_numbers(losses: Tensor, tokens: PolicyTokens, name: str) -> None:
    """Raises `ConfigError` if a loss is NaN for finite log-probs and advantages; infinite is what a large ratio makes it."""
    is_finite = tokens.log_probs.isfinite() & tokens.old_log_probs.isfinite() & tokens.advantages.isfinite()
    num_undefined = int((is_finite & losses.isnan()).sum())
    if num_undefined:
        raise ConfigError(
            f"{name} returned NaN for {num_undefined} tokens with finite log-probs and advantages, padding among them; look for "
            "0 / 0 or a logarithm of what is below 0"
        )
