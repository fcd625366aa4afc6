"""Defines the contract of methods, with torch in annotations only."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, cast

from cepo.algorithms import credit, settings
from cepo.algorithms.settings import NegativeConfig, TeacherConfig
from cepo.types import Reference, RolloutGroup, TokenBatch, TokenSignal

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int64
    from torch import Tensor


class Estimator(ABC):
    """Defines which privileged text each teacher of a method sees, and which learning signal each token gets.

    It holds no state between steps: everything random or scheduled is a function of its config and the step.

    Attributes:
        Config: the settings that the method reads. A field with the name of a section of `SharedSettings`, such as
            `teacher`, takes the values of `algorithm.teacher`, with the field's default as the method's presets; all
            other fields are `algorithm.<name>.*`.
        views: names of the teacher contexts, in a fixed order.
        distilled_view: the view of which the update needs the whole distribution, not only log-probs of sampled tokens.
        needs_group: the method compares the responses to a prompt, so at least two are needed.
        needs_baseline: the method reads the reward of a greedy response to each prompt.
        needs_values: the method reads a critic's values and returns its targets.
        needs_solutions: every problem must have a worked solution; follows from the sources in the config.
        reads_answers: teachers may read answers extracted from responses; likewise.
        reads_old_log_probs: the signal of a row (of a row with a reference, for a method with views) depends on
            `old_log_probs`. Otherwise rows whose update starts from the weights that sampled them need no scoring.
    """

    name: ClassVar[str]
    Config: ClassVar[type[Any]] = settings.NoSettings
    views: tuple[str, ...] = ()  # of the class, or of the instance if its settings decide
    distilled_view: ClassVar[str | None] = None
    needs_group: bool = False  # likewise
    needs_baseline: ClassVar[bool] = False
    needs_values: ClassVar[bool] = False
    reads_old_log_probs: bool = True  # likewise

    def __init__(self, config: Any) -> None:
        self.config = config
        given = cast("Mapping[str, Any]", vars(config))
        self.teacher: TeacherConfig = given.get("teacher", TeacherConfig())
        self.negative: NegativeConfig = given.get("negative", NegativeConfig())
        sources = [given[side].source for side in ("positive", "negative") if side in given]
        self.needs_solutions = "solution" in sources
        self.reads_answers = "peer_answer" in sources

    def references(self, group: RolloutGroup) -> Mapping[str, Sequence[Reference | None]]:
        """Returns for each view one reference per rollout; None if the teacher reads the student's own prompt."""
        assert not self.views, f"{type(self).__name__} declares views and must say what they read"
        return {}

    def needs_teacher(self, *, step: int) -> bool:
        """Returns whether teacher log-probs can change the signal of the 0-based rollout step `step`."""
        return bool(self.views)

    def live_rows(self, rewards: Float[Tensor, " B"], group_ids: Int64[Tensor, " B"]) -> Bool[Tensor, " B"]:
        """Returns which rows can have a non-zero signal. All others need no student, teacher or update pass."""
        return credit.all_rows(rewards)

    def settled(self, shown: Mapping[str, Sequence[bool]]) -> Mapping[str, Sequence[bool]]:
        """Returns by view which references are kept, given which can be shown: not empty, and within the context."""
        return shown

    def learning_rows(
        self, live: Bool[Tensor, " B"], has_reference: Mapping[str, Bool[Tensor, " B"]]
    ) -> Bool[Tensor, " B"]:
        """Returns which live rows can still have a non-zero signal, given which of them have a reference."""
        return live

    @abstractmethod
    def signal(self, batch: TokenBatch, *, step: int) -> TokenSignal:
        """Computes the learning signal of every response token at the 0-based rollout step `step`."""


class GroupRelativeEstimator(Estimator):
    """Base of methods whose signal is a multiple of a rollout's advantage over its group."""

    needs_group = True

    def live_rows(self, rewards: Float[Tensor, " B"], group_ids: Int64[Tensor, " B"]) -> Bool[Tensor, " B"]:
        """Returns True for rollouts of groups whose rewards differ; all others have A = 0."""
        return credit.live_rows(rewards, group_ids)
