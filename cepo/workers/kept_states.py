"""Keeps a teacher's hidden states from its scoring pass until the update that distils from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cepo.data.batch import ScoringRow
from cepo.types import DivergenceConfig
from cepo.workers.gathering import whole_tensor
from cepo.workers.scoring_model import ScoringModel, TeacherStates


@dataclass(frozen=True)
class _KeptView:
    states: Mapping[int, Tensor]
    head: Tensor | None


class KeptStates:
    """Hidden states by view and row, on the CPU: tokens x hidden size, which is smaller than tokens x vocabulary.

    The update distils from the teacher of the scoring pass, even if the step's updates change its weights; a trained
    head is therefore kept with the states. Each rank distils the rows whose states it keeps, because within a step all
    rows of a prompt go to one rank.
    """

    def __init__(self) -> None:
        self._views: dict[str, _KeptView] = {}

    def keep(self, view: str, states: Mapping[int, Tensor], module: ScoringModel) -> None:
        """Keeps one (response length, H) tensor per row and, if the head of `module` is trained, a copy of the head."""
        weight: Any = module.base.lm_head.weight
        head = whole_tensor(weight).detach().clone() if weight.requires_grad else None
        self._views[view] = _KeptView(states, head)

    def forget(self) -> None:
        """Frees all states."""
        self._views = {}

    def require(self, view: str, rows: Sequence[ScoringRow]) -> None:
        """Asserts that the states of these rows were kept on this rank."""
        kept = self._views[view].states if view in self._views else {}
        missing = [row.row for row in rows if row.row not in kept]
        assert not missing, f"no hidden states of the view '{view}' are kept here for the rows {missing}"

    def states_for(self, view: str, rows: Sequence[ScoringRow], divergence: DivergenceConfig) -> TeacherStates | None:
        """Concatenates the rows' states, with zeros for rows without any (of weight 0); None if the view has none."""
        kept = self._views.get(view)
        if kept is None or not kept.states:
            return None
        (width, *_), kind = next((state.shape[1:], state.dtype) for state in kept.states.values())
        parts = [
            torch.zeros(len(row.response_ids), width, dtype=kind)
            if row.row is None or row.row not in kept.states
            else kept.states[row.row]
            for row in rows
        ]
        return TeacherStates(hidden=torch.cat(parts), head=kept.head, divergence=divergence)
