"""Registers the chain world's oracle, which learns from true credit, as a plugin (`trainer.plugins`)."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from cepo.algorithms import GroupRelativeEstimator, register_estimator, statistics
from cepo.metrics import mean_of
from cepo.types import Reference, RolloutGroup, TokenBatch, TokenSignal
from lab.studies.support.chain_values import Chances, Step, steps_of, token_advantages, values_along
from lab.studies.worlds.kinds import CHAIN
from lab.worlds.tokenizer import build_tokenizer


@lru_cache
def _tokenizer() -> Any:
    return build_tokenizer(CHAIN)


@register_estimator("chain_oracle")
class ChainOracle(GroupRelativeEstimator):
    """`A_t = (V(end of t's step) - V(start of t's step)) / (std_g + 1e-6)`: the group advantage's scale and groups.

    Tokens before the first that decides their step get 0.

    It keeps counts between steps, which a method must not: it is a reference for comparison, not a method.
    """

    views = ("oracle",)
    reads = ("group_ids",)

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._chances = Chances()
        self._rows: list[tuple[list[Step], list[Step], list[str]]] = []

    def references(self, group: RolloutGroup) -> dict[str, list[Reference | None]]:
        """Stores the texts, which a method sees only here; no teacher gets a reference."""
        assert group.solution is not None, "the chain world's data set has solutions"
        truth = steps_of(group.solution)
        for rollout in group.rollouts:
            pieces = [_tokenizer().decode([token]) for token in rollout.response_ids.tolist()]
            self._rows.append((steps_of("".join(pieces)), truth, pieces))
        return {"oracle": [None] * len(group.rollouts)}

    def signal(self, batch: TokenBatch, *, step: int) -> TokenSignal:
        rows, self._rows = self._rows, []
        assert len(rows) == len(batch.rewards)
        if not self._chances.seen:
            self._chances.add(
                [pair for steps, truth, _ in rows for pair in values_along(steps, truth, self._chances).outcomes]
            )
        _, deviation, _ = statistics.group_moments(batch.rewards, batch.group_ids)
        live = statistics.live_rows(batch.rewards, batch.group_ids)
        advantages = torch.zeros_like(batch.token_level_rewards, dtype=torch.float64)
        outcomes, error = list[tuple[str, bool]](), torch.zeros(len(rows))
        for row, (steps, truth, pieces) in enumerate(rows):
            walk = values_along(steps, truth, self._chances)
            outcomes += walk.outcomes
            reward = float(batch.rewards[row])
            error[row] = abs(reward - walk.values[-1])
            length = int(batch.response_mask[row].sum())
            credits = token_advantages(steps, walk, pieces, reward)[:length]
            advantages[row, :length] = torch.tensor(credits).to(advantages)
        self._chances.add(outcomes)
        scaled = (advantages / (deviation + statistics.DEVIATION_FLOOR).unsqueeze(1)) * live.unsqueeze(1)
        metrics = statistics.group_metrics(batch)
        metrics["oracle/last_value_error"] = mean_of(error)
        return TokenSignal(advantages=scaled.to(batch.token_level_rewards.dtype) * batch.response_mask, metrics=metrics)
