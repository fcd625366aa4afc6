"""One step's rollouts, filled stage by stage. Row `b` of every tensor is rollout `b % G` of prompt `b // G`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from cepo.data.batch import ScoringRow
from cepo.data.dataset import Problem
from cepo.models.inputs import EncodedPrompt
from cepo.rollout.base import Generation
from cepo.types import RolloutGroup, TokenBatch, TokenSignal


@dataclass(kw_only=True)
class View:
    """One of a method's views of a batch.

    Attributes:
        references: the text shown to the teacher of each row, None where the view is the student's own.
        rows: live rows that a reference is shown for; only they get a pass.
        scoring_rows: those rows behind the teacher's contexts.
        distilled: whether the update needs the teacher's states.
        num_chosen: live rows for which the method had chosen a reference.
        num_empty, num_without_room: those of them of which sanitising left nothing, or for which the context had no room.
        num_cut: rows whose reference was cut, by its cap or for want of room.
        log_probs: of `scoring_rows`, once a pass has run.
        first_place: of the view's rows among all rows of that pass.
    """

    name: str
    references: list[str | None]
    rows: list[int]
    scoring_rows: list[ScoringRow]
    distilled: bool
    num_chosen: int = 0
    num_empty: int = 0
    num_without_room: int = 0
    num_cut: int = 0
    log_probs: list[Tensor] = field(default_factory=list)
    first_place: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens of the rows, contexts included."""
        return sum(row.num_tokens for row in self.scoring_rows)


@dataclass(kw_only=True)
class RolloutBatch:
    """Prompts and their sampled responses, then what each stage adds.

    Attributes:
        responses: decoded texts, row by row.
        scores: the reward function's fields, row by row.
        rewards, correct: (B,).
        num_raised, num_timed_out: responses whose reward failed.
        reward_baselines: (B,) the greedy response's reward, for methods that compare with it.
        reference_log_probs: (B, T) of the initial weights, under a KL penalty.
        reference_divergence: (B, T) KL over the vocabulary from the initial weights, for the penalty `full`.
        penalised_rewards: (B, T) token rewards less a KL in the reward; None without one.
        values: (B, T) the critic's value before each token, for methods with a critic.
        live: (B,) rows whose signal can be non-zero; the others get no pass.
        on_policy: (B,) rows whose optimizer step starts from the weights that sampled them.
        sampled_log_probs: (B, T) the rollout engine's own.
        old_log_probs: (B, T); rows that nothing scored hold the rollout engine's own.
        views: what the method's teachers are shown at this step.
        references: view -> the text shown to the teacher of each row, None where the view is the student's own.
        teacher_log_probs: view -> (B, T).
        state_index: row -> its place in the pass that kept teacher states for distillation.
    """

    step: int
    problems: Sequence[Problem]
    prompts: Sequence[EncodedPrompt]
    generations: list[Generation]
    responses: list[str] = field(default_factory=list)
    scores: list[dict[str, float]] = field(default_factory=list)
    rewards: Tensor = field(default_factory=lambda: torch.zeros(0))
    correct: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.bool))
    groups: list[RolloutGroup] = field(default_factory=list)
    num_raised: int = 0
    num_timed_out: int = 0
    reward_baselines: Tensor | None = None
    reference_log_probs: Tensor | None = None
    reference_divergence: Tensor | None = None
    penalised_rewards: Tensor | None = None
    values: Tensor | None = None
    live: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.bool))
    on_policy: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.bool))
    sampled_log_probs: Tensor = field(default_factory=lambda: torch.zeros(0, 0))
    old_log_probs: Tensor = field(default_factory=lambda: torch.zeros(0, 0))
    views: list[View] = field(default_factory=list)
    references: dict[str, list[str | None]] = field(default_factory=dict)
    teacher_log_probs: dict[str, Tensor] = field(default_factory=dict)
    state_index: dict[int, int] = field(default_factory=dict)
    signal: TokenSignal | None = None

    def __post_init__(self) -> None:
        lengths = torch.tensor([len(generation.response_ids) for generation in self.generations])
        self.response_mask = torch.arange(int(lengths.max())).unsqueeze(0) < lengths.unsqueeze(1)
        self.group_ids = torch.arange(len(self.problems)).repeat_interleave(self.group_size)

    @property
    def group_size(self) -> int:
        """G, rollouts per prompt."""
        return len(self.generations) // len(self.problems)

    def generations_by_group(self) -> list[list[Generation]]:
        """The rollouts of each prompt."""
        size = self.group_size
        return [self.generations[number * size : (number + 1) * size] for number in range(len(self.problems))]

    def split_groups(self) -> list[RolloutBatch]:
        """One batch per prompt, with what the reward stage has filled."""
        size = self.group_size
        return [
            RolloutBatch(
                step=self.step,
                problems=[self.problems[number]],
                prompts=[self.prompts[number]],
                generations=group,
                responses=self.responses[number * size : (number + 1) * size],
                scores=self.scores[number * size : (number + 1) * size],
                rewards=self.rewards[number * size : (number + 1) * size],
                correct=self.correct[number * size : (number + 1) * size],
            )
            for number, group in enumerate(self.generations_by_group())
        ]

    def padded(self, rows: Sequence[Tensor] | Sequence[Sequence[float]]) -> Tensor:
        """(B, T) from one value per response token and row, 0 on padding."""
        result = torch.zeros(self.response_mask.shape)
        result[self.response_mask] = torch.cat([torch.as_tensor(row, dtype=torch.float32) for row in rows])
        return result

    def scoring_row(self, row: int, context: EncodedPrompt | None = None, *, keep_state: bool = True) -> ScoringRow:
        """Row `row` behind the student's prompt, or behind another context."""
        number = row // self.group_size
        prompt = context or self.prompts[number]
        response = self.generations[row].response_ids
        return ScoringRow(context=prompt, response_ids=response, prompt=number, keep_state=keep_state)

    def outcome_rewards(self) -> Tensor:
        """(B, T) the outcome reward on the last response token, 0 elsewhere."""
        rewards = torch.zeros(self.response_mask.shape)
        last = self.response_mask.sum(dim=1) - 1
        rewards[torch.arange(len(last)), last] = self.rewards
        return rewards

    def token_batch(self) -> TokenBatch:
        """What the estimator sees."""
        return TokenBatch(
            token_level_rewards=self.outcome_rewards() if self.penalised_rewards is None else self.penalised_rewards,
            response_mask=self.response_mask,
            old_log_probs=self.old_log_probs,
            group_ids=self.group_ids,
            teacher_log_probs=self.teacher_log_probs,
            correct=self.correct,
            has_reference={
                view: torch.tensor([text is not None for text in texts]) for view, texts in self.references.items()
            },
            reward_baselines=self.reward_baselines,
            values=self.values,
        )
