"""Turns the rollouts that another trainer gathered from its processes into cepo's, and chooses what teachers read."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from cepo.algorithms import Estimator, build_estimator
from cepo.algorithms.masking import at_last_token
from cepo.algorithms.teacher_contexts import TeacherContexts, possible_rows, teacher_contexts_of
from cepo.config.worker_schema import RewardConfig
from cepo.data.batch import token_array
from cepo.data.prompts import ReferenceTexts
from cepo.errors import ConfigError, DataError
from cepo.files.trees import Fields, Tree
from cepo.metrics import Metrics, fraction
from cepo.models.text_codec import TextCodec
from cepo.rewards.pool import RewardPool
from cepo.trainer.rollout_groups import PromptResponses, described_groups, reference_metrics
from cepo.types import (
    ImageReference,
    PromptReference,
    Reference,
    RolloutGroup,
    TokenBatch,
    TokenSignal,
    WordedReference,
)

Messages = Sequence[Fields]
"""Turns with a `role` and a `content`, which is a text or a list of parts of the types `text` and `image`."""


class Row(NamedTuple):
    """What all processes must know of a rollout; `own` marks the tokens that the policy wrote, not a tool."""

    response_ids: tuple[int, ...]
    own: list[bool]
    ground_truth: str
    solution: str | None
    has_images: bool

    def policy_ids(self) -> list[int]:
        """Returns the tokens that the policy wrote."""
        policy_ids: list[int] = []
        for token_id, is_policys in zip(self.response_ids, self.own, strict=True):
            if is_policys:
                policy_ids.append(token_id)
        return policy_ids


@dataclass(frozen=True, kw_only=True)
class Hint:
    """What a teacher's prompt has other than the student's: `text`, or without one no images."""

    text: str | None = None


Shown = Mapping[str, Sequence[Hint | None]]
"""By view what the teacher of each row reads, None for the student's own prompt."""
Score = Callable[[Tensor, Shown], tuple[Tensor, dict[str, Tensor]]]
"""Returns the student's log-probs (B, T), and by view the teachers', given which rows learn and what teachers read."""


def supported_estimator(
    method: str, settings: Fields | None, trainer: str, *, loads_teachers: bool = False
) -> Estimator:
    """Builds a method; raises `ConfigError` if it needs a loss, critic, rollout or teacher that the other trainer lacks.

    With `loads_teachers` the other trainer can score by a model at `teacher.model_path`.
    """
    estimator = build_estimator(method, settings)
    source = estimator.teacher.source
    needs = {
        "a loss over the whole vocabulary": estimator.distilled_view is not None,
        "a critic": "values" in estimator.reads,
        "masked images": estimator.masks_images,
        "other problems' prompts": estimator.reads_other_prompts,
        "a greedy rollout of each prompt": "reward_baselines" in estimator.reads,
        f"teacher.source {source}": source != "actor",
        "teacher.model_path": estimator.teacher.model_path is not None and not loads_teachers,
    }
    lacking = [name for name, is_needed in needs.items() if is_needed]
    if lacking:
        raise ConfigError(f"method {method} needs {' and '.join(lacking)}, which {trainer} lacks and `cepo train` has")
    return estimator


class MethodAdapter:
    """Chooses references and computes advantages as cepo's own trainer does."""

    def __init__(self, estimator: Estimator, texts: TextCodec, seed: int, answer_function: str | None) -> None:
        self.texts = texts
        self._estimator = estimator
        self._seed = seed
        self._reward = RewardConfig(answer_function=answer_function)
        self._wording = ReferenceTexts(texts, estimator.teacher)

    @cached_property
    def _pool(self) -> RewardPool:
        """Finds and compares answers in worker processes, because a comparison may never end."""
        return RewardPool(self._reward)

    def signal(
        self,
        rows: Sequence[Row],
        rewards: Tensor,
        correct: Tensor,
        sizes: Sequence[int],
        score: Score,
        *,
        step: int,
        penalties: Tensor | None = None,
    ) -> TokenSignal:
        """Computes advantages (B, T) and metrics; rows of a prompt follow each other, and `sizes` are their numbers.

        A rollout without a reward, which is NaN, is left out of its group, and its advantages are 0; so are all of a
        group in which too few rollouts are left to be compared. `penalties` (B, T), of a KL for example, are subtracted
        from the tokens' rewards alone: what teachers read is chosen by the rewards without them, as in cepo's trainer.
        """
        compares_rollouts = "group_ids" in self._estimator.reads
        scored = _Scored(rewards, sizes, at_least=2 if compares_rollouts else 1)
        if scored.has_all:
            return self._signal(rows, rewards, correct, sizes, score, step, penalties)
        longest = max(len(row.own) for row in rows)
        advantages = torch.zeros(len(rows), longest)
        if not scored.rows:
            return TokenSignal(advantages=advantages)
        signal = self._signal(
            [rows[row] for row in scored.rows],
            rewards[scored.rows],
            correct[scored.rows],
            scored.sizes,
            scored.score_of(score, len(rows)),
            step,
            None if penalties is None else penalties[scored.rows],
        )
        width = signal.advantages.shape[1]  # the longest of these rows may be shorter
        advantages[scored.rows, :width] = signal.advantages
        return TokenSignal(advantages=advantages, metrics=signal.metrics)

    def _signal(
        self,
        rows: Sequence[Row],
        rewards: Tensor,
        correct: Tensor,
        sizes: Sequence[int],
        score: Score,
        step: int,
        penalties: Tensor | None,
    ) -> TokenSignal:
        """Computes what `signal` returns for rows that all have a reward."""
        estimator = self._estimator
        rewards = rewards.float()
        group_ids = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
        groups: list[RolloutGroup] = []
        if estimator.needs_teacher(step=step):
            groups = self._groups(rows, rewards, correct, sizes, step)

        def placed(row: int, reference: Reference) -> Hint | None:
            return self._placed(reference, rows[row])

        possible = possible_rows(estimator, rewards, group_ids, with_teachers=bool(groups))
        readings = teacher_contexts_of(estimator, groups, possible, placed, rewards=rewards, group_ids=group_ids)
        # A penalty is a signal of its own, also for rows of which the method has none.
        live = readings.learning | (penalties is not None)
        shown_to_teachers, metrics = self._shown(readings, groups, live)
        old_log_probs, teacher_log_probs = score(live, shown_to_teachers)

        mask = pad_sequence([torch.tensor(row.own) for row in rows], batch_first=True)  # (B, T)
        width = mask.shape[1]  # the other trainer may pad to more
        token_rewards = at_last_token(rewards, mask)
        if penalties is not None:
            token_penalties = penalties[:, :width].float().where(mask, 0.0)
            token_rewards = token_rewards - token_penalties
        cut_teacher_log_probs = {view: log_probs[:, :width] for view, log_probs in teacher_log_probs.items()}
        batch = TokenBatch(
            token_level_rewards=token_rewards,
            response_mask=mask,
            old_log_probs=old_log_probs[:, :width],
            group_ids=group_ids,
            teacher_log_probs=cut_teacher_log_probs,
            correct=correct,
            has_reference=readings.has_reference,
        )
        signal = estimator.checked_signal(batch, step=step)
        return replace(signal, metrics=metrics | signal.metrics)

    def _shown(
        self, readings: TeacherContexts[Hint], groups: Sequence[RolloutGroup], live: Tensor
    ) -> tuple[Shown, Metrics]:
        """Returns what teachers read, and metrics of it. Both are empty in a step without teachers."""
        metrics: Metrics = {}
        if groups:
            metrics |= reference_metrics(groups, self._estimator.negative)
        num_live = int(live.sum())
        for view, has_reference in readings.has_reference.items():
            num_used = int((has_reference & live).sum())
            metrics[f"references/{view}_used"] = fraction(num_used, num_live)
        return readings.shown, metrics

    def _groups(
        self, rows: Sequence[Row], rewards: Tensor, correct: Tensor, sizes: Sequence[int], step: int
    ) -> list[RolloutGroup]:
        """Returns the group of each prompt, whose number in the step is its id."""
        prompts: list[PromptResponses] = []
        first_row = 0
        for number, size in enumerate(sizes):
            end = first_row + size
            members = rows[first_row:end]
            # A tool's result may state an answer, which is not the policy's.
            texts = [self.texts.decode(row.policy_ids()) for row in members]
            prompts.append(
                PromptResponses(
                    prompt_id=str(number),
                    ground_truth=members[0].ground_truth,
                    solution=members[0].solution,
                    responses=texts,
                    response_ids=[token_array(row.response_ids) for row in members],
                    rewards=rewards[first_row:end].tolist(),
                    correct=[bool(is_correct) for is_correct in correct[first_row:end]],
                )
            )
            first_row = end
        by_value = self._estimator.negative.counts_by_value
        return described_groups(prompts, self._pool, self.texts, seed=self._seed, step=step, with_values=by_value)

    def teacher_messages(self, messages: Messages, hint: Hint | None) -> tuple[list[Tree], str]:
        """Returns the conversation that a teacher reads, and the text after its assistant header.

        The hint's text is added to the last user turn's last text, or with `assistant_prefix` it is that text. None gives
        the student's conversation.
        """
        template = self._wording.template
        turns = [dict(turn) for turn in messages]
        if not self.shows_images(hint):
            for turn in turns:
                _drop_visuals(turn)
        if hint is None or hint.text is None:
            return turns, ""
        if self._estimator.teacher.placement == "assistant_prefix":
            return turns, template.render(prompt="", reference=hint.text)
        users_turns = [turn for turn in turns if turn["role"] == "user"]
        last_turn = users_turns[-1]
        if isinstance(last_turn["content"], str):
            last_turn["content"] = template.render(prompt=last_turn["content"], reference=hint.text)
            return turns, ""
        parts = [dict(part) for part in last_turn["content"]]
        last_turn["content"] = parts
        text_parts = [part for part in parts if part["type"] == "text"]
        last_text = text_parts[-1]
        last_text["text"] = template.render(prompt=last_text["text"], reference=hint.text)
        return turns, ""

    def shows_images(self, hint: Hint | None) -> bool:
        """Whether a teacher sees the row's images."""
        return hint is None or (hint.text is not None and self._estimator.teacher.with_images)

    def _placed(self, reference: Reference, row: Row) -> Hint | None:
        """Returns what remains of a reference to show; None if its text is empty, or the row has no images to leave out."""
        if isinstance(reference, PromptReference):
            raise _without_teachers("reads other problems' prompts", "reads_other_prompts")
        if isinstance(reference, ImageReference):
            if reference.masked is not None:
                raise _without_teachers("masks images", "masks_images")
            return Hint() if row.has_images else None
        assert isinstance(reference, WordedReference)
        text = self._wording.reference_text(reference)
        return Hint(text=text) if text else None


def _without_teachers(need: str, attribute: str) -> ConfigError:
    return ConfigError(
        f"this method {need}, for which other trainers have no teachers; say so by its class with {attribute} = True, and "
        "train it with cepo train"
    )


def _drop_visuals(turn: Tree) -> None:
    """Leaves of a turn's parts only those that are neither an image nor a video."""
    content = turn.get("content")
    if isinstance(content, list):
        turn["content"] = [part for part in content if part["type"] not in ("image", "video")]


class _Scored:
    """The rollouts that have a reward, in groups of at least so many; `sizes` are the groups' numbers of `rows`."""

    def __init__(self, rewards: Tensor, sizes: Sequence[int], *, at_least: int) -> None:
        has_reward = (~rewards.isnan()).tolist()
        self.has_all = all(has_reward)
        self.rows: list[int] = []
        self.sizes: list[int] = []
        first = 0
        for size in sizes:
            end = first + size
            members = [row for row in range(first, end) if has_reward[row]]
            first = end
            if len(members) >= at_least:
                self.rows += members
                self.sizes.append(len(members))

    def score_of(self, score: Score, num_rows: int) -> Score:
        """Returns a function that scores these rows alone, by one that scores all."""

        def score_these(live: Tensor, shown: Shown) -> tuple[Tensor, dict[str, Tensor]]:
            live_of_all = torch.zeros(num_rows, dtype=torch.bool)
            live_of_all[self.rows] = live
            shown_to_all: dict[str, list[Hint | None]] = {}
            for view, hints in shown.items():
                hint_of_row: list[Hint | None] = [None] * num_rows
                for row, hint in zip(self.rows, hints, strict=True):
                    hint_of_row[row] = hint
                shown_to_all[view] = hint_of_row
            old_log_probs, teacher_log_probs = score(live_of_all, shown_to_all)
            teachers_of_these: dict[str, Tensor] = {}
            for view, log_probs in teacher_log_probs.items():
                teachers_of_these[view] = log_probs[self.rows]
            return old_log_probs[self.rows], teachers_of_these

        return score_these


def spliced(
    prompt: Sequence[int], student: Sequence[int], teacher: Sequence[int], placeholders: Container[int]
) -> list[int]:
    """Returns a teacher's prompt whose images are expanded as in `prompt`.

    `student` and `teacher` have one of the `placeholders` for each image; `prompt` is the student's with as many as the
    image has features. All up to their first difference is taken from `prompt`. Raises `DataError`: an image comes
    after that difference, or `prompt` does not end as `student` does.
    """
    num_common = 0  # tokens with which both begin
    for students_token, teachers_token in zip(student, teacher, strict=False):
        if students_token != teachers_token:
            break
        num_common += 1
    rest_of_student = list(student[num_common:])
    end_of_common = len(prompt) - len(rest_of_student)  # in the prompt, whose images take more tokens
    has_image_in_rest = any(token in placeholders for token in rest_of_student)
    if list(prompt[end_of_common:]) != rest_of_student or has_image_in_rest:
        raise DataError(
            "a reference cannot be put into a prompt: either an image comes after the text that the reference is added "
            "to, or the prompt does not end as the chat template renders it, because it was cut or rendered otherwise"
        )
    return [*prompt[:end_of_common], *teacher[num_common:]]


def check_beginning(prompt: Sequence[int], student: Sequence[int], placeholders: Container[int]) -> None:
    """Raises `DataError` if `prompt` begins otherwise than `student`, the conversation as rendered, up to its first image.

    An agent loop may have added the descriptions of tools, without which a teacher would read another task.
    """
    for prompts_token, students_token in zip(prompt, student, strict=False):
        if students_token in placeholders:
            return
        if prompts_token != students_token:
            raise DataError(
                "a view without images renders the conversation of a row anew, and the row's prompt begins otherwise: it "
                "was cut, or an agent loop added a system prompt or descriptions of tools; accepted: prompts that begin "
                "as the chat template renders them, or methods and settings whose teachers see the images"
            )


def images_of(messages: Messages) -> list[object]:
    """Returns the images of all turns, in their order."""
    images: list[object] = []
    for turn in messages:
        content = turn.get("content")
        if isinstance(content, list):
            images += [part["image"] for part in content if part["type"] == "image"]
    return images
