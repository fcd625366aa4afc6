"""Settings that methods share. `DivergenceConfig` stands in `cepo.types`, where the losses find it too."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from cepo.sections import section
from cepo.types import DivergenceConfig

DEFAULT_ESTIMATOR = "grpo"
"""EasyR1's default of `algorithm.adv_estimator`."""

ReferenceSource = Literal["ground_truth", "peer_answer", "peer_full", "peer_prefix", "peer_suffix"]


@section
class NoSettings:
    """The section of a method that has nothing to set."""


@section
class GroupAdvantageConfig:
    """How a rollout's reward is set against those of its group."""

    ddof: Literal[0, 1] = Field(default=1, description="The group's variance is divided by n - this.")
    scale: Literal["std", "none"] = Field(
        default="std", description="Divide the advantage by the group's deviation; none: do not (Dr. GRPO)."
    )


@section
class PositiveConfig:
    """Where the right answer comes from."""

    source: Literal[ReferenceSource, "solution", "solution_or_answer"] = Field(
        default="ground_truth",
        description="What the teacher reads: the answer, a right response of the group or a part of it, or the "
        "dataset's worked solution, which every row must then have; solution_or_answer: the answer where a row has "
        "none.",
    )
    num_tokens: int = Field(
        default=512, ge=1, description="Tokens of a peer's prefix or suffix; at most as many of a solution."
    )
    success_threshold: float | None = Field(
        default=None, description="A peer is right whose total reward reaches this; null: the verifier's verdict."
    )
    exclude_self: bool = Field(
        default=False,
        description="A rollout never reads its own response; without another right one it has no reference.",
    )

    @property
    def from_peer(self) -> bool:
        """Whether another response of the group is shown."""
        return self.source.startswith("peer_")


@section
class NegativeConfig:
    """Where the wrong answer comes from, which wrong rollout gives it, and what happens where none does."""

    source: ReferenceSource = Field(default="peer_answer", description="What the teacher reads of the wrong rollout.")
    num_tokens: int = Field(default=512, ge=1, description="Tokens of a peer's prefix or suffix.")
    select: Literal["lowest_reward", "random", "most_frequent"] = Field(
        default="lowest_reward", description="Which of the wrong rollouts is shown."
    )
    strict_lowest: bool = Field(
        default=False,
        description="The lowest reward among all wrong rollouts, as the paper's letter has it, even if its answer "
        "cannot be extracted (then the fallback applies).",
    )
    fallback: Literal["student", "neutral"] = Field(
        default="student", description="Where no rollout gives one: P_wrong is P_student; neutral: no evidence."
    )


@section
class TeacherConfig:
    """Whose weights teach, and how the reference is put before the teacher."""

    source: Literal["actor", "reference", "snapshot", "ema"] = Field(
        default="actor",
        description="Live weights; initial weights (adapter off under LoRA); a copy refreshed every sync_every "
        "updates; a moving average in float32.",
    )
    sync_every: int = Field(
        default=1,
        ge=1,
        description="A snapshot is refreshed after every update whose 1-based step is divisible by this.",
    )
    ema_decay: float = Field(default=0.999, ge=0, lt=1, description="Decay of the moving average per step.")
    placement: Literal["user_suffix", "assistant_prefix", "free"] = Field(
        default="user_suffix",
        description="Where the reference stands; free: where the template puts it in the user's turn.",
    )
    template: str | None = Field(
        default=None,
        description="Jinja file with `prompt` and `reference`; null: the built-in wording of the placement.",
    )
    with_images: bool = Field(default=True, description="The teacher sees the prompt's images.")
    max_reference_tokens: int = Field(
        default=64,
        ge=1,
        description="Longest answer that is shown; longer kinds of reference have their own num_tokens.",
    )


@section
class HindsightConfig(GroupAdvantageConfig):
    """Settings of a baseline that follows the evidence: what rewards mean, the reference, the teacher."""

    reward_low: float = Field(default=0.0, description="Reward of a wrong response, for a baseline from evidence.")
    reward_high: float = Field(
        default=1.0, description="Reward of a right response, for a baseline from evidence; between them lie shares."
    )
    positive: PositiveConfig = PositiveConfig()
    teacher: TeacherConfig = TeacherConfig()

    @model_validator(mode="after")
    def _rewards_differ(self) -> Self:
        if self.reward_high <= self.reward_low:
            raise ValueError(
                f"reward_high {self.reward_high} is not above reward_low {self.reward_low}; a right response earns more"
            )
        return self


@section
class WeightConfig(GroupAdvantageConfig):
    """Settings of the evidence weight: how much it counts at each step, and its bounds."""

    lambda_init: float = Field(default=0.5, ge=0, le=1, description="Mixing weight at its highest.")
    lambda_schedule: Literal["linear", "constant"] = Field(default="linear", description="Course of the mixing weight.")
    lambda_decay_steps: int = Field(default=25, ge=1, description="Steps after which a linear one is 0.")
    lambda_warmup_steps: int = Field(
        default=0,
        ge=0,
        description="Steps of a linear rise from lambda_init / lambda_warmup_steps before the decay begins.",
    )
    clip_radius: float = Field(
        default=0.5, ge=0, lt=1, description="The evidence weight stays within 1 - this and 1 + this."
    )
    mixed_groups_only: bool = Field(
        default=False,
        description="Evidence counts only in groups with right and wrong rollouts by the verifier's verdict.",
    )

    def lambda_at(self, step: int) -> float:
        """lambda at the 0-based rollout step: a pure function, so that a resumed run continues exactly.

        linear: `lambda_init * max(0, 1 - k / lambda_decay_steps)` with k counted from the end of the warm-up.
        """
        if step < self.lambda_warmup_steps:
            return self.lambda_init * (step + 1) / self.lambda_warmup_steps
        if self.lambda_schedule == "constant":
            return self.lambda_init
        return self.lambda_init * max(0.0, 1.0 - (step - self.lambda_warmup_steps) / self.lambda_decay_steps)


@section
class EvidenceConfig(WeightConfig, HindsightConfig):
    """Settings of the methods that weigh evidence from answers, with either baseline."""

    baseline: Literal["group", "hindsight"] = Field(
        default="group",
        description="What the reward is compared with: the group's mean; hindsight: the pass rate of the others, "
        "moved token by token by the evidence of the right answer.",
    )


@section
class ContrastiveConfig(EvidenceConfig):
    """Settings of the methods that set the right answer against wrong ones."""

    negative: NegativeConfig = NegativeConfig()

    @model_validator(mode="after")
    def _the_baseline_keeps_its_side(self) -> Self:
        if self.baseline == "hindsight" and self.negative.fallback == "neutral":
            raise ValueError(
                "negative.fallback neutral leaves rollouts without a right side, which baseline hindsight reads; "
                "accepted beside it: student"
            )
        return self


@section
class DistillationConfig(GroupAdvantageConfig):
    """Settings of the distillation methods. `ddof` and `scale` are of the group advantage beside the divergence."""

    weight: float = Field(default=1.0, ge=0, description="Scale of the divergence.")
    policy_weight: float = Field(
        default=0.0,
        ge=0,
        description="Scale of the group advantage in the policy loss beside it; 0: the reward trains nothing.",
    )
    divergence: DivergenceConfig = DivergenceConfig()
    positive: PositiveConfig = PositiveConfig()
    teacher: TeacherConfig = TeacherConfig()

    @model_validator(mode="after")
    def _learns_something(self) -> Self:
        if self.weight + self.policy_weight == 0:
            raise ValueError(
                "weight and policy_weight are both 0, so that nothing is learned; one of them must be above 0"
            )
        return self
