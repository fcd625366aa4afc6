"""Tells which methods can be computed from a trace: those whose teachers would have read what the recorded ones read.

A view is only a name. What its teachers read follows from settings that two methods may have in different values, such as
`mask_probability`, from the code that chooses references, from the schedule of a method, and from the rows that it scores.
Therefore both methods are asked about the recorded rollouts, with `teacher_contexts_of`, and their answers are compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cepo.algorithms import Estimator, available_estimators, build_estimator, section_of
from cepo.algorithms.teacher_contexts import TeacherContexts, possible_rows, teacher_contexts_of
from cepo.errors import ConfigError
from cepo.report.recorded_run import RunData
from cepo.run_folder.trace import GroupRecord, RolloutRecord
from cepo.types import ImageReference, Reference, Rollout, RolloutGroup

if TYPE_CHECKING:
    from torch import Tensor

_ANY_SOLUTION = "a worked solution"
"""Stands for the worked solution of every problem, which a trace does not have."""


def comparable_methods(run: RunData, groups: Sequence[GroupRecord]) -> Iterator[tuple[str, Estimator]]:
    """Yields the registered methods that can be computed from the recorded groups of a step, with the run's settings.

    Left out is a method that reads what the trace lacks: a critic, a greedy response, the whole vocabulary, a view that
    was not recorded, or one that the run's own method fills otherwise. Raises `DataError` for settings that no method has.
    """
    recorded_views = set(groups[0].rollouts[0].log_probs)
    smallest_group = min(len(group.rollouts) for group in groups)
    settings = run.setting("algorithm", {})
    try:
        methods = {name: build_estimator(name, section_of(name, settings)) for name in available_estimators()}
    except ConfigError as error:
        raise run.wrong_setting(str(error)) from error
    own_method = methods.get(run.estimator)  # None if it belongs to a plug-in that is not loaded
    recorded = _RecordedStep.of(run, groups)
    for name, method in methods.items():
        if "values" in method.reads or "reward_baselines" in method.reads or method.distilled_view is not None:
            continue
        if smallest_group == 1 and "group_ids" in method.reads:
            continue
        if not recorded_views.issuperset(method.views):
            continue
        if name == run.estimator or recorded.serves(method, own_method):
            yield name, method


@dataclass(frozen=True, kw_only=True)
class _RecordedStep:
    """The recorded rollouts of a step, as methods choose references among them; B is the number of rollouts."""

    step: int  # 0-based
    groups: Sequence[RolloutGroup]
    rollouts: Sequence[RolloutRecord]
    has_images: Sequence[bool]  # (B,) whether the rollout's prompt has images
    rewards: Tensor  # (B,)
    group_ids: Tensor  # (B,)
    temperature: float  # at which the trainer's log-probs are computed

    @classmethod
    def of(cls, run: RunData, records: Sequence[GroupRecord]) -> _RecordedStep:
        import torch

        step = records[0].step - 1
        seed = run.setting("trainer.seed", 0)
        rollouts: list[RolloutRecord] = []
        has_images: list[bool] = []
        group_ids: list[int] = []
        for number, record in enumerate(records):
            rollouts += record.rollouts
            has_images += [bool(record.images)] * len(record.rollouts)
            group_ids += [number] * len(record.rollouts)
        return cls(
            step=step,
            groups=[_described(record, seed=seed, step=step) for record in records],
            rollouts=rollouts,
            has_images=has_images,
            rewards=torch.tensor([rollout.reward for rollout in rollouts]),
            group_ids=torch.tensor(group_ids),
            temperature=run.setting("worker.rollout.temperature", 1.0),
        )

    def serves(self, method: Estimator, own: Estimator | None) -> bool:
        """Returns whether all log-probs that `method` would read are those that a run of the method `own` recorded."""
        if not method.views or not method.needs_teacher(step=self.step):
            return True
        if own is None or method.teacher != own.teacher or not own.needs_teacher(step=self.step):
            return False
        if not set(method.views).issubset(own.views):
            return False
        readings = self._readings(method)
        of_own = self._readings(own)
        for view in method.views:
            hidden = self._hidden(own, of_own, view)
            for row, reference in enumerate(readings.shown[view]):
                if reference is None or not readings.learning[row]:
                    continue
                if reference != of_own.shown[view][row]:
                    return False
                if not hidden[row] and not self._was_scored(method, row, view):
                    return False
        return True

    def _hidden(self, own: Estimator, of_own: TeacherContexts[Reference], view: str) -> Sequence[bool]:
        """Returns (B,) whether the reference that the run's method chose for a row is known to have been impossible to show.

        So it is if no teacher read it although the method would have kept it beside what the row's other teachers read.
        """
        import torch

        was_read = {name: torch.tensor(self._was_read(name)) for name in own.views}
        if_shown = own.settled(was_read | {view: torch.ones_like(was_read[view])})[view]
        was_chosen = torch.tensor([reference is not None for reference in of_own.shown[view]])
        hidden: list[bool] = (was_chosen & ~was_read[view] & if_shown).tolist()
        return hidden

    def _was_read(self, view: str) -> list[bool]:
        """Returns (B,) whether the teachers of a view read a reference."""
        return [rollout.references.get(view) is not None for rollout in self.rollouts]

    def _was_scored(self, method: Estimator, row: int, view: str) -> bool:
        """Returns whether the log-probs that `method` compares were recorded, all at one temperature.

        Log-probs of the student by the rollout engine are those of temperature 1.
        """
        rollout = self.rollouts[row]
        reads_student = "old_log_probs" in method.reads
        has_student = rollout.is_scored or self.temperature == 1.0 or not reads_student
        return has_student and rollout.log_probs[view] is not None and rollout.references.get(view) is not None

    def _readings(self, method: Estimator) -> TeacherContexts[Reference]:
        """Returns what the teachers of a method read of the recorded rollouts, if every reference fits into the context."""

        def show(row: int, reference: Reference) -> Reference | None:
            changes_images = isinstance(reference, ImageReference)
            return None if changes_images and not self.has_images[row] else reference

        live = possible_rows(method, self.rewards, self.group_ids, with_teachers=True)
        return teacher_contexts_of(method, self.groups, live, show, rewards=self.rewards, group_ids=self.group_ids)


def _described(record: GroupRecord, *, seed: int, step: int) -> RolloutGroup:
    """Returns a recorded group as methods see it. A trace has no final answers: the whole response stands for each.

    Both methods choose among the same stand-ins, so that equal choices remain equal.
    """
    import torch

    rollouts: list[Rollout] = []
    for index, rollout in enumerate(record.rollouts):
        token_ids = range(len(rollout.tokens)) if rollout.token_ids is None else rollout.token_ids
        rollouts.append(
            Rollout(
                index=index,
                reward=rollout.reward,
                correct=rollout.right,
                response_ids=torch.tensor(list(token_ids), dtype=torch.int32),
                answer=rollout.response,
                answer_equals_ground_truth=rollout.right,
            )
        )
    return RolloutGroup(
        prompt_id=record.prompt_id,
        ground_truth=record.ground_truth,
        rollouts=rollouts,
        seed=seed,
        step=step,
        solution=_ANY_SOLUTION,
    )
