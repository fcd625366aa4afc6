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
    """Hidden states by view and row, on the CPU: tokens x hidden size, which is smaller than tokens x vocabulary.

    The update distils from the teacher of the scoring pass, even if the step's updates change its weights; a trained
    head is therefore kept with the states. Each rank distils the rows whose states it keeps, because within a step all
    rows of a prompt go to one rank.
    """

    def __init__(self) -> None:
        self._views: dict[str, tuple[Mapping[int, Tensor], Tensor | None]] = {}
        self._entropies: dict[str, Mapping[int, Tensor]] = {}

    def keep(self, view: str, states: Mapping[int, Tensor], module: ScoringModel, *, is_student: bool = True) -> None:
        """Keeps one (response length, H) tensor per row, and a copy of the head unless it is the student's frozen one."""
        weight: Any = module.base.lm_head.weight
        is_students_head = is_student and not weight.requires_grad
        head = None if is_students_head else whole_tensor(weight).detach().clone()
        self._views[view] = (states, head)

    def keep_entropies(self, view: str, entropies: Mapping[int, Tensor]) -> None:
        """Keeps one (response length,) tensor per row: the entropies of the teacher's distributions in nats."""
        self._entropies[view] = entropies

    def entropies_of(self, view: str) -> Mapping[int, Tensor]:
        """Returns what is kept by row, which is nothing if no row was distilled."""
        return self._entropies.get(view, {})

    def forget(self) -> None:
        self._views = {}
        self._entropies = {}

    def states_for(
        self,
        view: str,
        rows: Sequence[ScoringRow],
        divergence: DivergenceConfig,
        *,
        required: Sequence[ScoringRow] = (),
    ) -> TeacherStates | None:
        """Concatenates the rows' states, with zeros for rows without any (of weight 0); None if the view has none.

        The states of the `required` rows must be kept.
        """
        states, head = self._views.get(view, ({}, None))
        missing = [row.row for row in required if row.row not in states]
        assert not missing, f"no hidden states of the view '{view}' are kept here for the rows {missing}"
        if not states:
            return None
        any_state = next(iter(states.values()))  # (T, H)
        hidden_size = any_state.shape[1]
        parts: list[Tensor] = []
        for row in rows:
            if row.row is None or row.row not in states:
                parts.append(any_state.new_zeros(len(row.response_ids), hidden_size))
            else:
                parts.append(states[row.row])
        return TeacherStates(hidden=torch.cat(parts), head=head, divergence=divergence)
