"""Keeps the hidden states of teachers between scoring and update."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from cepo.data.batch import ScoringRow
from cepo.types import DivergenceConfig
from cepo.workers.distributed import whole_tensor
from cepo.workers.scoring_model import ScoringModel, TeacherStates


class HiddenStateCache:
    """The distilled view's hidden states by row, on the CPU: tokens x hidden size, which is smaller than tokens x vocabulary.

    The update distils from the teacher of the scoring pass, even if the step's updates change its weights; a trained
    head is therefore kept with the states. Each rank distils the rows whose states it keeps, because within a step all
    rows of a prompt go to one rank.

    Attributes:
        entropies: of the teacher's distributions in nats, (response length,) by row, if the update needs them.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        self._states: Mapping[int, Tensor] = {}
        self._head: Tensor | None = None
        self.entropies: Mapping[int, Tensor] = {}

    def keep(
        self,
        states: Mapping[int, Tensor],
        module: ScoringModel,
        *,
        is_student: bool = True,
        entropies: Mapping[int, Tensor] | None = None,
    ) -> None:
        """Keeps one (response length, H) tensor per row, and a copy of the head unless it is the student's frozen one."""
        weight: Any = module.base.lm_head.weight
        is_students_head = is_student and not weight.requires_grad
        self._head = None if is_students_head else whole_tensor(weight).detach().clone()
        self._states = states
        self.entropies = entropies or {}

    def states_for(
        self, rows: Sequence[ScoringRow], divergence: DivergenceConfig, *, required: Sequence[ScoringRow] = ()
    ) -> TeacherStates | None:
        """Concatenates the rows' states, with zeros for rows without any (of weight 0); None if nothing is kept.

        The states of the `required` rows must be kept.
        """
        missing = [row.row for row in required if row.row not in self._states]
        assert not missing, f"no hidden states are kept here for the rows {missing}"
        if not self._states:
            return None
        any_state = next(iter(self._states.values()))  # (T, H)
        hidden_size = any_state.shape[1]
        parts: list[Tensor] = []
        for row in rows:
            if row.row is None or row.row not in self._states:
                parts.append(any_state.new_zeros(len(row.response_ids), hidden_size))
            else:
                parts.append(self._states[row.row])
        return TeacherStates(hidden=torch.cat(parts), head=self._head, divergence=divergence)
