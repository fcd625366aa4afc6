"""Registers the oracle of `running_totals`: a gate that a programme opens, which grades every stated total."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from cepo.algorithms import GroupRelativeEstimator, register_estimator, statistics
from cepo.algorithms.settings import GroupConfig
from cepo.metrics import mean_of
from cepo.sections.fields import Share, section
from cepo.types import Reference, RolloutGroup, TokenBatch, TokenSignal
from lab.studies.running_totals.grading import decisive_places, pieces_of, tokens_at, totals_of


@lru_cache
def tokenizer_of(path: str) -> Any:
    """Returns the tokenizer of a model folder."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path)


@register_estimator("oracle_gate")
class OracleGate(GroupRelativeEstimator):
    """`A_t = A` at the tokens that decided the outcome, and `floor A` at all others.

    In a right response they are the digits of all its numbers, in a wrong one the first wrong digit. It reads texts, which
    a method sees only in `references`, and keeps them until `signal`, which a method must not: it is a reference for
    comparison. No teacher gets a reference.
    """

    @section
    class Config(GroupConfig):
        floor: Share = 0.1
        """Share of the advantage that all other tokens keep."""
        only_wrong: bool = False
        """Whether right responses keep the whole advantage at all tokens."""
        tokenizer: str = ""
        """Folder of the model whose tokens the responses have."""

    config: Config
    views = ("oracle",)
    reads = ("group_ids",)

    def __init__(self, config: object) -> None:
        super().__init__(config)
        self._decisive: list[list[bool]] = []

    def references(self, group: RolloutGroup) -> Mapping[str, Sequence[Reference | None]]:
        """Marks the decisive tokens of the group's responses."""
        assert group.solution is not None, "the rows of this world have solutions"
        tokenizer = tokenizer_of(self.config.tokenizer)
        totals = totals_of(group.solution)
        for rollout in group.rollouts:
            token_ids: Any = rollout.response_ids.tolist()  # torch leaves its type open
            pieces = pieces_of(tokenizer, token_ids)
            places = decisive_places("".join(pieces), totals)
            self._decisive.append(tokens_at(places, pieces))
        return {"oracle": [None] * len(group.rollouts)}

    def signal(self, batch: TokenBatch, *, step: int) -> TokenSignal:
        mask = batch.response_mask
        opens = self._marked(mask)
        advantages = statistics.group_advantages(batch.rewards, batch.group_ids, self.config.advantage).unsqueeze(1)
        keeps_all = opens | (advantages > 0) if self.config.only_wrong else opens
        gate = mask.new_ones(mask.shape).double().where(keeps_all, self.config.floor)
        metrics = statistics.group_metrics(batch)
        metrics["evidence/open_fraction"] = mean_of(opens.float(), mask & (advantages != 0))
        return TokenSignal(
            advantages=(advantages * gate).to(batch.rewards.dtype).where(mask, 0.0),
            metrics=metrics,
            diagnostics={"weight": gate.to(batch.rewards.dtype).where(mask, 0.0)},
        )

    def _marked(self, mask: Tensor) -> Tensor:
        """Returns (B, T) where the gate is open, by the marks of `references`, which are then forgotten.

        A method is shown responses without the end of their turn, at which the gate stays closed.
        """
        rows, self._decisive = self._decisive, []
        assert len(rows) == len(mask)
        opens = torch.zeros_like(mask)
        for row, decisive in enumerate(rows):
            opens[row, : len(decisive)] = torch.tensor(decisive)
        return opens
