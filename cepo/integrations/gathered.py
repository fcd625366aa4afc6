"""Turns the rollouts that another trainer gathered from its processes into cepo's, and chooses what teachers read."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from cepo.algorithms import Estimator, build_estimator
from cepo.config.worker_schema import RewardConfig
from cepo.data.contexts import ContextBuilder, Problem
from cepo.errors import ConfigError, DataError
from cepo.files.trees import Fields, Tree
from cepo.metrics import Metrics, fraction
from cepo.models.processing import Processing
from cepo.rewards.pool import RewardPool
from cepo.rollout.generator import Generation
from cepo.trainer.groups import reference_metrics, rollout_groups
from cepo.trainer.rollouts import Rollouts
from cepo.types import Reference, RolloutGroup, TokenBatch, TokenSignal

Messages = Sequence[Fields]
"""Turns with a `role` and a `content`, which is a text or a list of parts of the types `text` and `image`."""


class Row(NamedTuple):
    """What all processes must know of a rollout; `own` marks the tokens that the policy wrote, not a tool."""

    response_ids: tuple[int, ...]
    own: list[bool]
    ground_truth: str
    solution: str | None
    has_images: bool


Shown = dict[str, list[Reference | None]]
"""By view what the teacher of each row reads, None for the student's own prompt."""
Score = Callable[[Tensor, Shown], tuple[Tensor, dict[str, Tensor]]]
"""Returns the student's log-probs (B, T), and by view the teachers', given which rows learn and what teachers read."""


class Texts(Processing):
    """The text functions of `Processing` for a tokenizer that is loaded already."""

    def __init__(self, tokenizer: Any, eos_token_ids: Sequence[int]) -> None:
        self.tokenizer, self.eos_token_ids = tokenizer, tuple(eos_token_ids)


def supported_estimator(method: str, settings: Fields | None, trainer: str) -> Estimator:
    """Builds a method; raises `ConfigError` if it needs a loss, critic, rollout or teacher that the other trainer lacks."""
    estimator = build_estimator(method, settings)
    source = estimator.teacher.source
    needs = {
        "a loss over the whole vocabulary": estimator.distilled_view is not None,
        "a critic": estimator.needs_values,
        "a greedy rollout of each prompt": estimator.needs_baseline,
        f"teacher.source {source}": source != "actor",
    }
    if lacking := [name for name, is_needed in needs.items() if is_needed]:
        raise ConfigError(f"method {method} needs {' and '.join(lacking)}, which {trainer} lacks and `cepo train` has")
    return estimator


class Credit:
    """Chooses references and computes advantages as cepo's own trainer does."""

    def __init__(self, estimator: Estimator, texts: Texts, seed: int, answer_function: str | None) -> None:
        self.texts, self._estimator, self._seed = texts, estimator, seed
        self._reward = RewardConfig(answer_function=answer_function)
        limit = texts.tokenizer.model_max_length
        self._contexts = ContextBuilder(texts, estimator.teacher, max_context_length=limit)

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
        scored = _Scored(rewards, sizes, at_least=2 if self._estimator.needs_group else 1)
        if scored.has_all:
            return self._signal(rows, rewards, correct, sizes, score, step, penalties)
        width = max(len(row.own) for row in rows)
        advantages = torch.zeros(len(rows), width)
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
        advantages[scored.rows, : signal.advantages.shape[1]] = signal.advantages
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
        estimator, rewards = self._estimator, rewards.float()
        group_ids = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
        mask = pad_sequence([torch.tensor(row.own) for row in rows], batch_first=True)
        shown, metrics = self._shown(rows, rewards, correct, sizes, step)
        live = estimator.live_rows(rewards, group_ids) | (penalties is not None)
        has_reference = {view: torch.tensor([each is not None for each in of]) for view, of in shown.items()}
        if shown:
            live = estimator.learning_rows(live, has_reference) | (penalties is not None)
        old, teachers = score(live, shown)
        width = mask.shape[1]
        old, teachers = old[:, :width], {view: values[:, :width] for view, values in teachers.items()}
        token_rewards, last = torch.zeros(mask.shape), mask.shape[1] - 1 - mask.flip(1).int().argmax(dim=1)
        token_rewards[range(len(rows)), last] = rewards  # at the last token that the policy wrote
        if penalties is not None:
            token_rewards = token_rewards - penalties[:, :width].float().where(mask, 0.0)
        batch = TokenBatch(
            token_level_rewards=token_rewards,
            response_mask=mask,
            old_log_probs=old,
            group_ids=group_ids,
            teacher_log_probs=teachers,
            correct=correct,
            has_reference=has_reference,
        )
        signal = estimator.signal(batch, step=step)
        for view, has in has_reference.items():
            metrics[f"references/{view}_used"] = fraction(int((has & live).sum()), int(live.sum()))
        return replace(signal, metrics=metrics | signal.metrics)

    def _shown(
        self, rows: Sequence[Row], rewards: Tensor, correct: Tensor, sizes: Sequence[int], step: int
    ) -> tuple[Shown, Metrics]:
        """Returns what teachers read, and metrics. Both are empty in a step without teachers."""
        estimator = self._estimator
        if not estimator.needs_teacher(step=step):
            return {}, {}
        groups: list[RolloutGroup] = []
        first_row = 0
        for size, equal in groupby(sizes):
            end = first_row + size * len(list(equal))
            part = slice(first_row, end)
            groups += self._groups(
                rows[part], rewards[part], correct[part], size=size, step=step, first_prompt=len(groups)
            )
            first_row = end
        chosen = [estimator.references(group) for group in groups]
        shown: Shown = {}
        for view in estimator.views:
            every = [reference for group in chosen for reference in group[view]]
            shown[view] = [self._placed(reference, row) for reference, row in zip(every, rows, strict=True)]
        stays = estimator.settled({view: [each is not None for each in of] for view, of in shown.items()})
        for view, of in shown.items():
            shown[view] = [each if stay else None for each, stay in zip(of, stays[view], strict=True)]
        return shown, reference_metrics(groups, estimator.negative)

    def _groups(
        self, rows: Sequence[Row], rewards: Tensor, correct: Tensor, *, size: int, step: int, first_prompt: int
    ) -> list[RolloutGroup]:
        """Returns the groups of rows of which `size` in succession share a prompt.

        Their prompts are numbered from `first_prompt` on, because a group's random choices depend on its number.
        """
        without: Any = {"text": "", "images": (), "columns": {}}
        rollouts = Rollouts(
            step=step,
            problems=[
                Problem(prompt_id=str(number), ground_truth=row.ground_truth, solution=row.solution, **without)
                for number, row in enumerate(rows[::size], start=first_prompt)
            ],
            prompts=(),
            generations=[
                Generation(response_ids=row.response_ids, log_probs=(0.0,) * len(row.response_ids), finished=True)
                for row in rows
            ],
            responses=[self.texts.decode(row.response_ids) for row in rows],
            scores=[{"overall": reward} for reward in rewards.tolist()],
            correct=correct,
        )
        by_value = self._estimator.negative.select == "most_frequent"
        return rollout_groups(rollouts, self._pool, self.texts, seed=self._seed, with_values=by_value)

    def teacher_messages(self, messages: Messages, reference: Reference | None) -> tuple[list[Tree], str]:
        """Returns the conversation that a teacher reads, and the text after its assistant header.

        The reference is added to the last user turn's last text, or with `assistant_prefix` it is that text. None gives the
        student's conversation.
        """
        teacher, template = self._estimator.teacher, self._contexts.template
        turns = [dict(turn) for turn in messages]
        if reference is not None and (reference.blind or not teacher.with_images):
            for turn in turns:
                if isinstance(content := turn.get("content"), list):
                    turn["content"] = [part for part in content if part["type"] not in ("image", "video")]
        if reference is None or reference.text is None:
            return turns, ""
        if teacher.placement == "assistant_prefix":
            return turns, template.render(prompt="", reference=reference.text)
        holder, key = next(turn for turn in reversed(turns) if turn["role"] == "user"), "content"
        if not isinstance(holder[key], str):
            holder[key] = [dict(part) for part in holder[key]]
            holder, key = next(part for part in reversed(holder[key]) if part["type"] == "text"), "text"
        holder[key] = template.render(prompt=holder[key], reference=reference.text)
        return turns, ""

    def _placed(self, reference: Reference | None, row: Row) -> Reference | None:
        if reference is None or reference.blind:
            return reference if row.has_images else None
        text = self._contexts.reference_text(reference)
        return Reference(text=text) if text else None


class _Scored:
    """The rollouts that have a reward, in groups of at least so many; `sizes` are the groups' numbers of `rows`."""

    def __init__(self, rewards: Tensor, sizes: Sequence[int], *, at_least: int) -> None:
        has_reward = (~rewards.isnan()).tolist()
        self.has_all = all(has_reward)
        self.rows: list[int] = []
        self.sizes: list[int] = []
        first = 0
        for size in sizes:
            members = [row for row in range(first, first + size) if has_reward[row]]
            first += size
            if len(members) >= at_least:
                self.rows += members
                self.sizes.append(len(members))

    def score_of(self, score: Score, num_rows: int) -> Score:
        """Returns a function that scores these rows alone, by one that scores all."""

        def score_these(live: Tensor, shown: Shown) -> tuple[Tensor, dict[str, Tensor]]:
            live_of_all = torch.zeros(num_rows, dtype=torch.bool)
            live_of_all[self.rows] = live
            shown_to_all: Shown = {}
            for view, references in shown.items():
                shown_to_all[view] = [None] * num_rows
                for row, reference in zip(self.rows, references, strict=True):
                    shown_to_all[view][row] = reference
            old, teachers = score(live_of_all, shown_to_all)
            return old[self.rows], {view: values[self.rows] for view, values in teachers.items()}

        return score_these


def spliced(
    prompt: Sequence[int], student: Sequence[int], teacher: Sequence[int], placeholders: Container[int]
) -> list[int]:
    """Returns a teacher's prompt whose images are expanded as in `prompt`.

    `student` and `teacher` have one of the `placeholders` for each image; `prompt` is the student's with as many as the
    image has features. All up to their first difference is taken from `prompt`. Raises `DataError`: an image comes
    after that difference, or `prompt` does not end as `student` does.
    """
    pairs = enumerate(zip(student, teacher, strict=False))
    same = next((at for at, (one, other) in pairs if one != other), min(len(student), len(teacher)))
    rest = list(student[same:])
    kept = len(prompt) - len(rest)
    if list(prompt[kept:]) != rest or any(token in placeholders for token in rest):
        raise DataError(
            "a reference cannot be put into a prompt: either an image comes after the text that the reference is added "
            "to, or the prompt does not end as the chat template renders it, because it was cut or rendered otherwise"
        )
    return [*prompt[:kept], *teacher[same:]]


def images_of(messages: Messages) -> list[object]:
    contents = [turn["content"] for turn in messages if isinstance(turn.get("content"), list)]
    return [part["image"] for content in contents for part in content if part["type"] == "image"]
