"""A teacher's hidden states, kept from the pass that scored its contexts to the update that distils from them."""

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
    """Hidden states by view and row, on the CPU: tokens x hidden size, where the distributions would be tokens x vocabulary.

    The teacher is the one that was asked, whatever its weights become during the step's updates, so a trained head is
    kept beside the states. Each rank keeps the states of the rows it scored, so a row is distilled where it was scored:
    within a step the rows of a prompt go to one rank.
    """

    def __init__(self) -> None:
        self._views: dict[str, _KeptView] = {}

    def keep(self, view: str, states: Mapping[int, Tensor], module: ScoringModel) -> None:
        """Keeps one (response length, H) tensor per row, and the head that `module` has at this moment if it is trained."""
        weight: Any = module.base.lm_head.weight
        head = whole_tensor(weight).detach().clone() if weight.requires_grad else None
        self._views[view] = _KeptView(states, head)

    def forget(self) -> None:
        """Frees everything."""
        self._views = {}

    def require(self, view: str, rows: Sequence[ScoringRow]) -> None:
        """Holds the trainer to it that these rows were scored here."""
        kept = self._views[view].states if view in self._views else {}
        missing = [row.row for row in rows if row.row not in kept]
        assert not missing, f"no hidden states of the view '{view}' are kept here for the rows {missing}"

    def states_for(self, view: str, rows: Sequence[ScoringRow], divergence: DivergenceConfig) -> TeacherStates | None:
        """The rows' states, flat. None where nothing was kept for the view.

        A row of which no state was kept gets zeros: it has no teacher, and its weight is 0.
        """
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
