"""Declares the settings `algorithm.*` that all methods share."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from cepo.algorithms.settings import DEFAULT_ESTIMATOR
from cepo.sections import section


@section
class AlgorithmConfig:
    """`algorithm.*`: the method, and what counts as a correct response. Each method adds its own section."""

    adv_estimator: str = Field(
        default=DEFAULT_ESTIMATOR, description="Name of the method; `algorithm.<name>.*` holds its settings."
    )
    disable_kl: bool = Field(default=False, description="No KL penalty and no reference weights.")
    use_kl_loss: bool = Field(
        default=False, description="KL as a term of the loss; false: subtracted from each token's reward."
    )
    kl_penalty: Literal["kl", "abs", "mse", "low_var_kl", "full"] = Field(
        default="kl", description="Estimator of the KL at a sampled token; full: the KL over the whole vocabulary."
    )
    kl_coef: float = Field(default=1e-3, ge=0, description="Weight of the KL.")
    kl_type: Literal["fixed", "adaptive"] = Field(
        default="fixed", description="Whether that weight follows the KL; in the reward only."
    )
    kl_horizon: float = Field(default=10000.0, gt=0, description="How slowly it follows, in sequences.")
    kl_target: float = Field(default=0.1, gt=0, description="The KL it aims at, in nats.")
    gamma: float = Field(
        default=1.0,
        ge=0,
        le=1,
        description="Discount of later rewards, for methods that have one, unless their own section says.",
    )
    lam: float = Field(default=1.0, ge=0, le=1, description="Lambda of generalised advantages, likewise.")
    online_filtering: bool = Field(
        default=False, description="Keep groups whose mean filter_key lies between the bounds; sample again for others."
    )
    filter_key: str = Field(default="overall", description="Reward field of that filter.")
    filter_low: float = Field(default=0.01, description="Groups are kept above this mean.")
    filter_high: float = Field(default=0.99, description="Groups are kept below this mean.")
    overlong_filter: bool = Field(
        default=False, description="Responses that the length limit cut teach nothing; their rewards still count."
    )
    top_entropy: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="Share of the learning rollouts' tokens that learn: those with the highest entropy.",
    )
    correct_key: str = Field(default="accuracy", description="Reward field that tells right from wrong.")
    correct_threshold: float = Field(default=0.5, description="A response is right where that field is at least this.")
