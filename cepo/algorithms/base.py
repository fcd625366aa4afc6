"""Defines the contract of methods, with torch in annotations only."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

from cepo.algorithms import settings, statistics
from cepo.algorithms.settings import NegativeConfig, TeacherConfig
from cepo.errors import ConfigError
from cepo.metrics import require_metrics
from cepo.types import Reference, RolloutGroup, TokenBatch, TokenSignal

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int64
    from torch import Tensor

    RowsByView = Mapping[str, Bool[Tensor, " B"]]

BatchField = Literal["group_ids", "old_log_probs", "reward_baselines", "values"]
"""A field of `TokenBatch` that a run provides only for methods that declare it in `reads`."""


class Estimator(ABC):
    """Defines which privileged text each teacher of a method sees, and which learning signal each token gets.

    It holds no state between steps: everything random or scheduled is a function of its config and the step. A method
    must have a name and `signal`; a method with teachers also has `views` and `references`.

    Attributes:
        Config: the settings that the method reads. A field with the name of a section of `SharedSettings`, such as
            `teacher`, takes the values of `algorithm.teacher`, with the field's default as the method's presets; all
            other fields are `algorithm.<name>.*`.
        views: names of the teacher contexts, in a fixed order. Of the class, or of the instance if its settings decide.
        reads: what `signal` reads of the batch beside rewards, verdicts and teachers. Each has a price: `group_ids`, at
            least two responses to each prompt; `old_log_probs`, a scoring pass of rows whose update starts from the
            weights that sampled them (of those with a reference, if the method has views); `reward_baselines`, a greedy
            response to each prompt; `values`, a critic, whose targets `signal` returns. Of the class or of the instance.
        masks_images: whether references mask images, for which other trainers have no teachers.
        reads_other_prompts: whether references are other problems' prompts, for which they have none either.
        distilled_view: the view of which the update needs the whole distribution, not only log-probs of sampled tokens.
        reads_teacher_entropies: whether it also needs the entropy of these distributions. Of the class or of the instance.
    """

    name: ClassVar[str]
    Config: ClassVar[type[Any]] = settings.NoSettings
    views: tuple[str, ...] = ()
    reads: tuple[BatchField, ...] = ("old_log_probs",)
    masks_images: ClassVar[bool] = False
    reads_other_prompts: ClassVar[bool] = False
    distilled_view: ClassVar[str | None] = None
    reads_teacher_entropies: bool = False

    def __init__(self, config: Any) -> None:
        self.config = config
        sections = cast("Mapping[str, Any]", vars(config))
        self.teacher: TeacherConfig = sections.get("teacher", TeacherConfig())
        self.negative: NegativeConfig = sections.get("negative", NegativeConfig())

    @property
    def reference_sources(self) -> list[str]:
        """Where the settings take references from: the sources of the sides, such as `solution`, that the method has."""
        sections = cast("Mapping[str, Any]", vars(self.config))
        return [sections[side].source for side in ("positive", "negative") if side in sections]

    def references(self, group: RolloutGroup) -> Mapping[str, Sequence[Reference | None]]:
        """Returns for each view one reference per rollout; None if the teacher reads the student's own prompt."""
        assert not self.views, f"{type(self).__name__} declares views and must say what they read"
        return {}

    def needs_teacher(self, *, step: int) -> bool:
        """Returns whether teacher log-probs can change the signal of the 0-based rollout step `step`."""
        return bool(self.views)

    def live_rows(
        self, rewards: Float[Tensor, " B"], group_ids: Int64[Tensor, " B"], has_reference: RowsByView
    ) -> Bool[Tensor, " B"]:
        """Returns which rows can have a non-zero signal. All others need no student, teacher or update pass.

        `has_reference` says by view which rows have a reference: while that is unknown, all of them, and in a step
        without teachers none.
        """
        return statistics.all_rows(rewards)

    def settled(self, shown: RowsByView) -> RowsByView:
        """Returns by view which references are kept, given which can be shown: not empty, and within the context."""
        return shown

    @abstractmethod
    def signal(self, batch: TokenBatch, *, step: int) -> TokenSignal:
        """Computes the learning signal of every response token at the 0-based rollout step `step`."""

    def checked_signal(self, batch: TokenBatch, *, step: int) -> TokenSignal:
        """Returns `signal`; raises `ConfigError` if a method of the user's returns no `TokenSignal`, or another shape."""
        signal = cast("object", self.signal(batch, step=step))
        name = f"{type(self).__qualname__}.signal"
        remedy = "return cepo.types.TokenSignal(advantages=...) with a tensor (B, T), the shape of batch.response_mask"
        if not isinstance(signal, TokenSignal):
            raise ConfigError(f"{name} returned a {type(signal).__name__}; {remedy}")
        shape = tuple(signal.advantages.shape)
        expected_shape = tuple(batch.response_mask.shape)
        if shape != expected_shape:
            raise ConfigError(f"{name} returned advantages of shape {shape} for {expected_shape}; {remedy}")
        num_not_finite = int((~signal.advantages.isfinite()).sum())
        # Broken weights break log-probs first: that is a fault of the step, which `trainer.on_fault` decides on.
        if num_not_finite and _has_finite_inputs(batch):
            raise ConfigError(
                f"{name} returned {num_not_finite} advantages that are not finite; give tokens that learn nothing 0, and "
                "look for a division by 0 or a logarithm of 0"
            )
        require_metrics(signal.metrics, name)
        return signal

    def checked_references(self, group: RolloutGroup) -> Mapping[str, Sequence[Reference | None]]:
        """Returns `references`; raises `ConfigError` unless it has a `Reference` or None for each view and rollout."""
        references = cast("object", self.references(group))
        name = f"{type(self).__qualname__}.references"
        num_rollouts = len(group.rollouts)
        remedy = (
            f"return a dict with a list for each of the views {list(self.views)}, of one cepo.types.Reference or None per "
            "rollout of the group"
        )
        if not isinstance(references, Mapping):
            raise ConfigError(f"{name} returned a {type(references).__name__}; {remedy}")
        by_view = cast("Mapping[str, Sequence[Reference | None]]", references)
        for view in self.views:
            if view not in by_view:
                raise ConfigError(f"{name} returned the views {sorted(by_view)}, without '{view}'; {remedy}")
            if len(by_view[view]) != num_rollouts:
                raise ConfigError(
                    f"{name} returned {len(by_view[view])} references for {num_rollouts} rollouts; {remedy}"
                )
            for reference in cast("Sequence[object]", by_view[view]):
                if reference is not None and not isinstance(reference, Reference):
                    raise ConfigError(f"{name} returned a {type(reference).__name__} for '{view}'; {remedy}")
        return by_view


def _has_finite_inputs(batch: TokenBatch) -> bool:
    """Returns whether rewards and log-probs, which a method computes with, are all finite."""
    inputs = [batch.token_level_rewards, batch.old_log_probs, *batch.teacher_log_probs.values()]
    return all(bool(tensor.isfinite().all()) for tensor in inputs)


class GroupRelativeEstimator(Estimator):
    """Base of methods whose signal is a multiple of a rollout's advantage over its group."""

    reads: tuple[BatchField, ...] = ("group_ids", "old_log_probs")

    def live_rows(
        self, rewards: Float[Tensor, " B"], group_ids: Int64[Tensor, " B"], has_reference: RowsByView
    ) -> Bool[Tensor, " B"]:
        """Returns True for rollouts of groups whose rewards differ; all others have A = 0."""
        return statistics.live_rows(rewards, group_ids)
