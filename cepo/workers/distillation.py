"""A teacher's hidden states, kept from the pass that scored its contexts to the update that distils from them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cepo.types import DivergenceConfig
from cepo.workers.gathering import whole_tensor
from cepo.workers.scoring_model import ScoringModel, TeacherStates


class KeptStates:
    """Hidden states on the CPU: tokens x hidden size, where the distributions would be tokens x vocabulary.

    The teacher is the one that was asked, whatever its weights become during the step's updates, so a trained head is
    kept beside the states. Each rank keeps the states of the rows it scored, so a row is distilled where it was scored:
    within a step the rows of a prompt go to one rank.
    """

    def __init__(self) -> None:
        self._states: list[Tensor] = []
        self._head: Tensor | None = None

    def keep(self, states: Sequence[Tensor], module: ScoringModel) -> None:
        """Keeps one (response length, H) tensor per row, and the head that `module` has at this moment if it is trained."""
        self._states = list(states)
        weight: Any = module.base.lm_head.weight
        if weight.requires_grad:
            self._head = whole_tensor(weight).detach().clone()

    def forget(self) -> None:
        """Frees everything."""
        self._states, self._head = [], None

    def states_for(
        self, lengths: Sequence[int], places: Sequence[int], divergence: DivergenceConfig
    ) -> TeacherStates | None:
        """The states of rows of `lengths` response tokens, flat, each from its place among the kept ones.

        Place -1 gives zeros: a row without a teacher, whose weight is 0. None where nothing was kept.
        """
        if not self._states:
            return None
        width, kind = self._states[0].shape[1], self._states[0].dtype
        parts = [
            torch.zeros(length, width, dtype=kind) if place < 0 else self._states[place]
            for length, place in zip(lengths, places, strict=True)
        ]
        return TeacherStates(hidden=torch.cat(parts), head=self._head, divergence=divergence)
