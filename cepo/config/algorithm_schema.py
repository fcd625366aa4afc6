"""Declares the settings `algorithm.*`; those that methods read are in `cepo.algorithms.settings`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from cepo.algorithms import estimator_class
from cepo.algorithms.settings import DEFAULT_ESTIMATOR, SharedSettings
from cepo.sections import section


@section
class AlgorithmConfig(SharedSettings):
    """`algorithm.*`: the method, the settings of methods, and what counts as a correct response."""

    adv_estimator: str = Field(
        default=DEFAULT_ESTIMATOR,
        description="Name of the method (the advantage estimator). It reads some of the sections below, with its own "
        "presets, and `algorithm.<name>` if it has settings that no other method has.",
    )
    disable_kl: bool = Field(default=False, description="Train without a KL penalty, and without reference weights.")
    use_kl_loss: bool = Field(
        default=False, description="Add the KL to the loss; false: subtract it from each token's reward."
    )
    kl_penalty: Literal["kl", "abs", "mse", "low_var_kl", "full"] = Field(
        default="kl", description="Estimator of the KL at a sampled token; full: the KL over the whole vocabulary."
    )
    kl_coef: float = Field(
        default=1e-3, ge=0, description="Weight of the KL penalty; with kl_type=adaptive the initial weight."
    )
    kl_type: Literal["fixed", "adaptive"] = Field(
        default="fixed",
        description="fixed: the weight of the KL is constant; adaptive: it follows kl_target, which needs "
        "use_kl_loss=false.",
    )
    kl_horizon: float = Field(
        default=10000.0,
        gt=0,
        description="Adaptive KL: horizon in sequences; the larger it is, the more slowly the weight changes.",
    )
    kl_target: float = Field(default=0.1, gt=0, description="Adaptive KL: target of the KL in nats per token.")
    online_filtering: bool = Field(
        default=False,
        description="Keep only groups whose mean filter_key is between filter_low and filter_high, and sample other "
        "problems in place of the rest.",
    )
    filter_key: str = Field(default="overall", description="Reward field that online filtering averages over a group.")
    filter_low: float = Field(default=0.01, description="Online filtering keeps groups with a mean above this.")
    filter_high: float = Field(default=0.99, description="Online filtering keeps groups with a mean below this.")
    overlong_filter: bool = Field(
        default=False,
        description="Do not train on responses that the length limit cut; their rewards still count in their groups.",
    )
    top_entropy: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="Train only on this share of the tokens, those with the highest entropy, counted over the "
        "rollouts that learn. 1.0: all tokens; below 1.0 a step takes one more pass.",
    )
    correct_key: str = Field(
        default="accuracy",
        description="Reward field that decides whether a response is correct; if the scores do not have it, `overall` "
        "decides.",
    )
    correct_threshold: float = Field(default=0.5, description="A response is correct if that field is at least this.")

    @property
    def needs_critic(self) -> bool:
        """Whether the method uses a critic."""
        return estimator_class(self.adv_estimator).needs_values
