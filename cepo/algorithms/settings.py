"""Declares the settings `algorithm.*` that methods share, in sections of which each method reads some.

A method's `Config` has a field of the same name and type for each section that it reads; the field's default is the
method's preset. `DivergenceConfig` is in `cepo.types`, because the losses use it too.
"""

from __future__ import annotations

from typing import Literal, Self

from pydantic import model_validator

from cepo.sections.fields import BelowOne, Count, Natural, NotNegative, Share, section
from cepo.types import DivergenceConfig

DEFAULT_ESTIMATOR = "grpo"
"""EasyR1's default of `algorithm.adv_estimator`."""

ReferenceSource = Literal["ground_truth", "peer_answer", "peer_full", "peer_prefix", "peer_suffix"]


@section
class NoSettings:
    """The settings of a method that has none."""


@section
class GroupAdvantageConfig:
    """What group-relative methods read of `algorithm.advantage`."""

    ddof: Literal[0, 1] = 1
    """The variance of a group of n rewards is divided by n - ddof."""
    scale: Literal["std", "none", "mean"] = "std"
    """std: divide the advantage by the group's deviation; mean: by the group's mean reward (MaxRL); none: do not (Dr.
    GRPO)."""


@section
class HindsightAdvantageConfig(GroupAdvantageConfig):
    """Adds the meaning of rewards for the hindsight baseline."""

    reward_low: float = 0.0
    """Hindsight baseline: reward of a wrong response."""
    reward_high: float = 1.0
    """Hindsight baseline: reward of a right response; between them the share counts."""
    lam: Share = 1.0
    """Hindsight baseline: GAE's lambda over the baseline's values. 1: the reward minus the value, unbiased; 0: what each
    token changes in the value, for teachers that know much."""
    state_weight: Literal["none", "uncertainty"] = "none"
    """Hindsight baseline: weight of each token by what its prefix leaves open. uncertainty: V (1 - V) over that of the
    pass rate, which is small where the teacher holds the outcome for settled (OPPO)."""

    @model_validator(mode="after")
    def _rewards_differ(self) -> Self:
        if self.reward_high <= self.reward_low:
            raise ValueError(
                f"reward_high {self.reward_high} is not above reward_low {self.reward_low}; a right response must earn more"
            )
        return self


@section
class AdvantageConfig(HindsightAdvantageConfig):
    """`algorithm.advantage.*`: what the reward is compared with, and the scale of the difference."""

    baseline: Literal["group", "hindsight"] = "group"
    """What the reward is compared with. group: the group's mean; hindsight: the pass rate of the other rollouts, updated
    at each token by the evidence of the right answer."""


@section
class PositiveConfig:
    """`algorithm.positive.*`: the correct answer that the teacher sees."""

    source: Literal[ReferenceSource, "solution", "solution_or_answer"] = "ground_truth"
    """What the teacher reads. ground_truth: the dataset's answer; peer_*: a right response of the group, or a part of it;
    solution: the dataset's worked solution, which every row must have; solution_or_answer: the answer if a row has no
    solution."""
    num_tokens: Count = 512
    """Length of a peer's prefix or suffix, and limit of a solution, in tokens."""
    success_threshold: float | None = None
    """Total reward from which a peer counts as right; null: the verifier decides."""
    exclude_self: bool = False
    """Never show a rollout its own response; without another it has no reference."""


@section
class NegativeConfig:
    """`algorithm.negative.*`: the wrong answer, and what happens without one."""

    source: ReferenceSource = "peer_answer"
    """What the teacher reads. peer_*: a wrong rollout of the group, or a part of it; ground_truth: the dataset's
    answer."""
    num_tokens: Count = 512
    """Length of the wrong rollout's prefix or suffix, in tokens."""
    select: Literal["lowest_reward", "random", "most_frequent"] = "lowest_reward"
    """Which wrong rollout is shown: the one with the lowest reward, a random one, or one with the most frequent
    answer."""
    strict_lowest: bool = False
    """Follow the paper literally: show the lowest reward among all wrong rollouts, or fall back."""
    fallback: Literal["student", "neutral"] = "student"
    """What happens if no rollout provides a wrong answer. student: P_wrong is P_student; neutral: no evidence."""

    @property
    def counts_by_value(self) -> bool:
        """Whether the choice needs to know which wrong answers have the same value."""
        return self.select == "most_frequent"


@section
class TeacherConfig:
    """`algorithm.teacher.*`: the teacher's weights, and how it is shown the reference."""

    source: Literal["actor", "reference", "snapshot", "ema"] = "actor"
    """Weights of the teacher. actor: the live weights; reference: the initial weights (adapter off under LoRA); snapshot:
    a copy; ema: a moving average in float32."""
    model_path: str | None = None
    """Checkpoint of a frozen teacher with the policy's tokenizer, such as a larger model of its series: hub name or
    folder. Its weights take the place of `source`, which must be actor. null: `source` decides."""
    sync_every: Count = 1
    """A snapshot is refreshed after every update whose 1-based step this divides."""
    ema_decay: BelowOne = 0.999
    """Decay of the moving average per step."""
    placement: Literal["user_suffix", "assistant_prefix", "free"] = "user_suffix"
    """Where the reference is placed: after the question, right before the response, or where the template puts it in the
    user's turn (free)."""
    template: str | None = None
    """Jinja file with the variables `prompt` and `reference`; null: built-in wording."""
    with_images: bool = True
    """Show the prompt's images to the teacher."""
    max_reference_tokens: Count = 64
    """Longest answer that is shown, in tokens; other references have num_tokens."""

    @model_validator(mode="after")
    def _has_one_source(self) -> Self:
        if self.model_path is not None and self.source != "actor":
            raise ValueError(
                f"model_path {self.model_path} and source {self.source} both name weights of the teacher; set source to actor"
            )
        return self

    @property
    def is_actor(self) -> bool:
        """Whether the teacher has the actor's live weights."""
        return self.source == "actor" and self.model_path is None


@section
class MixingConfig:
    """What a method reads of `algorithm.weight` whose weight has its own bounds."""

    lambda_init: Share = 0.5
    """Highest value of the mixing weight lambda."""
    lambda_schedule: Literal["linear", "constant"] = "linear"
    """Schedule of lambda: linear decay to 0, or constant."""
    lambda_decay_steps: Count = 25
    """Number of steps, after the warm-up, in which a linear lambda decays to 0."""
    lambda_warmup_steps: Natural = 0
    """Number of first steps in which lambda rises linearly to lambda_init."""


@section
class WeightConfig(MixingConfig):
    """`algorithm.weight.*`: the evidence weight, its strength at each step, and its bounds."""

    clip_radius: BelowOne = 0.5
    """The evidence weight stays between 1 - clip_radius and 1 + clip_radius."""


@section
class DistillationConfig:
    """`algorithm.distillation.*`: the loss of the methods that distil the teacher."""

    weight: NotNegative = 1.0
    """Weight of the divergence in the loss."""
    policy_weight: NotNegative = 0.0
    """Weight of the group advantage in an additional policy loss; 0: no such loss."""
    divergence: DivergenceConfig = DivergenceConfig()

    @model_validator(mode="after")
    def _learns_something(self) -> Self:
        if self.weight + self.policy_weight == 0:
            raise ValueError("weight and policy_weight are both 0, so that nothing is learned; one must be above 0")
        return self


@section
class SharedSettings:
    """The settings of `algorithm` that several methods read."""

    gamma: Share = 1.0
    """Discount of later rewards per token."""
    lam: Share = 1.0
    """Lambda of GAE: lower, less variance; higher, less bias from the critic."""
    advantage: AdvantageConfig = AdvantageConfig()
    weight: WeightConfig = WeightConfig()
    positive: PositiveConfig = PositiveConfig()
    negative: NegativeConfig = NegativeConfig()
    teacher: TeacherConfig = TeacherConfig()
    distillation: DistillationConfig = DistillationConfig()


@section
class GroupConfig:
    """What a group-relative method reads."""

    advantage: GroupAdvantageConfig = GroupAdvantageConfig()


@section
class WeightedConfig(GroupConfig):
    """What a method reads that weights the group's advantage token by token."""

    weight: WeightConfig = WeightConfig()


@section
class EvidenceConfig(WeightedConfig):
    """What a method reads that weights the advantage over either baseline by evidence from answers."""

    advantage: AdvantageConfig = AdvantageConfig()
    positive: PositiveConfig = PositiveConfig()
    teacher: TeacherConfig = TeacherConfig()


@section
class ContrastiveConfig(EvidenceConfig):
    """What a method reads that contrasts the correct answer with wrong ones."""

    negative: NegativeConfig = NegativeConfig()

    @model_validator(mode="after")
    def _the_baseline_keeps_its_side(self) -> Self:
        if self.advantage.baseline == "hindsight" and self.negative.fallback == "neutral":
            raise ValueError(
                "negative.fallback neutral leaves rollouts without a right side, which advantage.baseline hindsight "
                "needs; accepted with that baseline: student"
            )
        return self
